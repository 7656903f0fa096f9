"""An MCP server with one tool, a pocket calculator. Needs: pip install 'es-cookbook[mcp]'.

    es-cookbook train tools="mcp:python recipes/calculator_server.py" data=recipes/expressions.jsonl
        reward=number dataset.chat.tools_in=nowhere sampling.max_tokens=24
        model_name=es_cookbook/recipes/calculator/model

The bundled model knows the tool without a description. A model that reads one needs no `tools_in`.
"""

import re

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
def calculate(expression: str) -> int:
    """Compute one operation with two whole numbers, such as 12*3."""
    found = re.fullmatch(r"(\d{1,12})([-+*])(\d{1,12})", expression)
    if found is None:
        raise ValueError("one operation with two whole numbers is accepted, such as 12*3")
    a, operation, b = int(found[1]), found[2], int(found[3])
    return {"+": a + b, "-": a - b, "*": a * b}[operation]


if __name__ == "__main__":
    server.run()

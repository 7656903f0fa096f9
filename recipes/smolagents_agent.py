"""An agent of smolagents with a tool, trained as it is: a worker that takes rows and answers them.

    pip install 'es-cookbook[serve,gguf]' smolagents[openai]
    es-cookbook train program="python recipes/smolagents_agent.py" dataset.rows_at_once=32 \
        data=sums.jsonl reward=number sampling.max_tokens=64 batch=16 model_name=MODEL

A row has a `question`, for example {"question": "What is 52 + 18?", "answer": 70}. An agent sends a
thousand tokens with each request.
"""

import json
import sys
import threading
from typing import Any

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def work(task: dict[str, Any]) -> None:
    model = OpenAIServerModel("any", api_base=task["base_url"], api_key=task["api_key"])
    agent = ToolCallingAgent(tools=[add], model=model, max_steps=1, verbosity_level=0)
    try:
        answer = str(agent.run(task["row"]["question"]))
    except Exception as error:  # What the model writes is no call that the agent can read.
        answer = type(error).__name__
    print(json.dumps({"id": task["id"], "answer": answer}), flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        threading.Thread(target=work, args=(json.loads(line),)).start()

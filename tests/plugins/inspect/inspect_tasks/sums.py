"""Tasks of inspect-ai: sums in the head, and sums with a tool."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import Tool, tool


@task
def head(most: int = 3) -> Task:
    samples = [Sample(input=f"{i}+{i}=", target=str(2 * i)) for i in range(most)]
    return Task(dataset=samples, solver=[system_message("Add."), generate()], scorer=includes())


@tool
def add() -> Tool:
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    return execute


@task
def with_tool() -> Task:
    samples = [Sample(input="What is 20 + 22?", target="42")]
    return Task(dataset=samples, solver=[use_tools(add()), generate()], scorer=includes())


@task
def with_top_k() -> Task:
    return Task(dataset=[Sample(input="1", target="1")], config=GenerateConfig(top_k=5))

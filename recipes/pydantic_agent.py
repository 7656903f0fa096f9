"""An agent of pydantic-ai, trained as it is: a worker that takes rows and answers them.

    pip install 'es-cookbook[serve,gguf]' pydantic-ai-slim[openai]
    es-cookbook train program="python recipes/pydantic_agent.py" dataset.rows_at_once=64 \
        data=sums.jsonl reward=number sampling.max_tokens=16 batch=16 model_name=MODEL

A row has a `question`, for example {"question": "What is 52 + 18?", "answer": 70}.
"""

import asyncio
import json
import sys
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

agent = Agent(instructions="Answer briefly.")


async def work(task: dict[str, Any]) -> None:
    provider = OpenAIProvider(base_url=task["base_url"], api_key=task["api_key"])
    model = OpenAIChatModel("any", provider=provider)
    result = await agent.run(task["row"]["question"], model=model)
    print(json.dumps({"id": task["id"], "answer": result.output}), flush=True)


async def main() -> None:
    async with asyncio.TaskGroup() as rows:
        while line := await asyncio.to_thread(sys.stdin.readline):
            rows.create_task(work(json.loads(line)))


if __name__ == "__main__":
    asyncio.run(main())

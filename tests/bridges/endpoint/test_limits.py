"""What a request may cost: it is known, and refused, before anything is made for it."""

from typing import Any

import anyio
import openai
import pytest

from es_cookbook.bridges.endpoint.limits import UnderWay
from tests.bridges.endpoint.test_application import QUESTION, asked

pytestmark = pytest.mark.anyio


async def test_a_key_has_so_many_answers_under_way_and_others_are_told_to_come_later() -> None:
    client, speaker = asked(*("x" for _ in range(9)))
    speaker.under_way, speaker.is_stuck = UnderWay(4), True

    async def ask(**more: Any) -> None:
        await client.completions.create(model="centre", prompt=["a", "b"], **more)

    with pytest.raises(openai.BadRequestError, match="6 answers, and a key may have 4"):
        await ask(n=3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        while len(speaker.seen) < 2:
            await anyio.sleep(0)
        with pytest.raises(openai.RateLimitError, match="2 answers of this key are under") as told:
            await client.chat.completions.create(model="centre", messages=QUESTION, n=3)
        assert told.value.code == "rate_limit_exceeded" and len(speaker.seen) == 2
        speaker.is_stuck = False
        await client.chat.completions.create(model="centre", messages=QUESTION, n=2)
        tasks.cancel_scope.cancel()
    await ask(n=2)  # Nothing of a request that was given up counts any more.

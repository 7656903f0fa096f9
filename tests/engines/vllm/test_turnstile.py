"""Only one set of weights is ever in use, and everybody's turn comes."""

import asyncio
from collections.abc import Hashable

import pytest

from es_cookbook.engines.vllm.host import Turnstile


class Weights:
    """Says who used what while which set was there."""

    def __init__(self) -> None:
        self.there: Hashable = None
        self.switches: list[Hashable] = []
        self.inside = 0
        self.turnstile = Turnstile(self.switch)

    async def switch(self, weights: Hashable) -> None:
        assert self.inside == 0
        await asyncio.sleep(0)
        assert self.inside == 0
        self.there = weights
        self.switches.append(weights)

    async def use(self, weights: Hashable, turns: int = 1) -> None:
        async with self.turnstile.using(weights):
            self.inside += 1
            for _ in range(turns):
                assert self.there == weights
                await asyncio.sleep(0)
            self.inside -= 1


async def test_requests_for_the_same_weights_run_together_and_others_wait() -> None:
    weights = Weights()
    names = ["a", "b", "a", "c", "b", "a"] * 5
    await asyncio.gather(*[weights.use(name, turns=i % 4) for i, name in enumerate(names)])
    assert weights.switches == ["a", "b", "c"]


@pytest.mark.parametrize("turns", range(6))
async def test_cancelled_at_any_moment_it_lets_the_next_in(turns: int) -> None:
    weights = Weights()
    first = asyncio.create_task(weights.use("a"))
    second = asyncio.create_task(weights.use("b", turns=3))
    for _ in range(turns):
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    weights.inside = 0
    await asyncio.wait_for(weights.use("c"), timeout=5)
    assert weights.there == "c"

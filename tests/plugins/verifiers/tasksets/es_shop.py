"""A taskset with tools: buy things; what is in the basket is the rollout's state."""

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["ShopTaskset"]

PRICES = {"tea": 2, "cake": 3}


class Basket(vf.State):
    items: list[str] = Field(default_factory=list)


class Till(vf.Toolset[vf.ToolsetConfig, Basket]):
    TOOL_PREFIX = "shop"

    async def setup_task(self, task) -> None:
        self.money = task.money

    @vf.tool
    def buy(self, item: str) -> str:
        """Buy one thing.

        Args:
            item: what to buy
        """
        self.state.items.append(item)
        return f"{self.money - sum(PRICES[each] for each in self.state.items)} left"


class PriceListConfig(vf.SharedToolsetConfig):
    pass


class PriceList(vf.Toolset[PriceListConfig, vf.State]):
    TOOL_PREFIX = None
    started = 0

    async def setup(self) -> None:
        PriceList.started += 1

    @vf.tool
    async def price(self, item: str) -> int:
        """What a thing costs."""
        return PRICES[item]


class ShopData(vf.TaskData):
    money: int


class ShopTask(vf.Task[ShopData, Basket]):
    async def setup(self, trace: vf.Trace) -> None:
        trace.info["opened"] = True

    async def finalize(self, trace: vf.Trace) -> None:
        trace.info["closed"] = trace.info["opened"]

    @classmethod
    def toolsets(cls, config):
        return [Till(vf.ToolsetConfig())]

    @vf.reward
    async def spent(self, trace: vf.Trace) -> float:
        assert trace.info["closed"]
        return float(sum(PRICES[item] for item in trace.state.items))


class ShopTaskset(vf.Taskset[ShopTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [PriceList(PriceListConfig())]

    def load(self):
        for money in range(5, 10):
            yield ShopTask(ShopData(prompt="Buy.", money=money), self.config.task)

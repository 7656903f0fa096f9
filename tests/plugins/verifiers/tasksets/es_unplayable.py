"""Tasksets that cannot be played or are broken, one for every `kind`."""

import math
from typing import Literal

import verifiers.v1 as vf

__all__ = ["UnplayableTaskset"]


class Config(vf.TasksetConfig):
    kind: Literal[
        "raises",
        "picture",
        "no_prompt",
        "container",
        "skills",
        "runtime_reward",
        "runtime_setup",
        "server_tools",
        "intercepts",
        "nan_reward",
        "raising_reward",
    ] = "raises"


class Data(vf.TaskData):
    kind: str


class Plain(vf.Task[Data]):
    @vf.reward
    async def points(self, task: Data) -> float:
        if task.kind == "raising_reward":
            raise KeyError("no\nsuch row")
        return math.nan if task.kind == "nan_reward" else 1.0


class InContainer(Plain):
    NEEDS_CONTAINER = True


class RuntimeReward(Plain):
    @vf.reward
    async def passes_tests(self, trace: vf.Trace, runtime) -> float:
        return 1.0

    @vf.reward
    async def optional(self, runtime=None) -> float:
        return 1.0


class RuntimeSetup(Plain):
    async def setup(self, trace, runtime) -> None:
        await runtime.write("file", b"")


class ServerTools(Plain):
    @classmethod
    def toolsets(cls, config):
        return [Remote(vf.ToolsetConfig(url="http://127.0.0.1:9/mcp"))]


class Remote(vf.Toolset[vf.ToolsetConfig, vf.State]):
    pass


class Intercepts(Plain):
    @vf.intercept
    async def masked(self, request: vf.Request) -> None:
        return None


_TASKS = {
    "container": InContainer,
    "runtime_reward": RuntimeReward,
    "runtime_setup": RuntimeSetup,
    "server_tools": ServerTools,
    "intercepts": Intercepts,
}


class UnplayableTaskset(vf.Taskset[Plain, Config]):
    def load(self):
        kind = self.config.kind
        if kind == "raises":
            raise OSError("the server of the data\nis down")
        picture = vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url="data:,"))
        prompt = {"picture": [vf.UserMessage(content=[picture])], "no_prompt": None}
        for i in range(20):
            data = Data(prompt=prompt.get(kind, f"task {i}"), kind=kind)
            if kind == "skills":
                data = data.model_copy(update={"skills": ["a/skill"]})
            yield _TASKS.get(kind, Plain)(data, self.config.task)

"""An environment in which two agents talk to each other."""

import verifiers.v1 as vf

__all__ = ["TalkEnv", "TalkTaskset"]


class TalkConfig(vf.EnvConfig):
    asker: vf.AgentConfig = vf.AgentConfig()
    answerer: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        await agents.asker.run(task)


class TalkTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="hello"), self.config.task)

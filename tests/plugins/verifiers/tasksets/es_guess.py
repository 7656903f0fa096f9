"""A taskset of many turns: guess a number; the environment answers as the user."""

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.stop
    async def shouted(self, trace: vf.Trace) -> bool:
        return trace.last_reply.endswith("!")

    @vf.reward
    async def near(self, task: GuessData, trace: vf.Trace) -> float:
        digits = trace.last_reply.strip("!")
        return 1.0 / (1 + abs(int(digits) - task.number)) if digits.isdigit() else 0.0

    @vf.reward(weight=-0.1)
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.number):
                digits = segment.last_reply
                hint = "more" if digits.isdigit() and int(digits) < task.data.number else "less"
                segment = await interaction.turn(hint)
        interaction.trace.record_metric("found", float(not segment.terminated))

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("seen", float(len(trace.messages)), 0.01)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for number in range(1, 9):
            yield GuessTask(GuessData(prompt="1 to 9?", number=number), self.config.task)

"""A taskset of one turn: add two numbers; rewards of two kinds, and a metric."""

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: int


class SumConfig(vf.TasksetConfig):
    tasks: int = 30
    most: int = 9


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def correct(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(task.answer))

    @vf.reward
    async def brief(self, trace: vf.Trace) -> float:
        """By the tokens that were sampled, so the tokens count and not the text alone."""
        return 1.0 / (1 + trace.num_output_tokens)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(self.config.tasks):
            a, b = i % self.config.most, 3 * i % self.config.most
            data = SumData(prompt=f"{a}+{b}=", system_prompt="Add.", answer=a + b)
            yield SumTask(data, self.config.task)

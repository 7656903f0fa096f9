"""What chooses problems, through TRL's own sampler: replay, and mixtures by tag."""

import functools
from pathlib import Path

import chz
import pytest
from typing_extensions import override

from es_cookbook.plugins.gradients.checkpoints import latest_checkpoint
from es_cookbook.plugins.gradients.grpo import main
from es_cookbook.plugins.mixtures.mixture import Mixture, Part
from es_cookbook.plugins.mixtures.selection import Replay
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.types import Datasets, Observation, RLDatasetBuilder, Tokenizer
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.grpo_runs import CopierBuilder, Listening, grpo_config, metrics_of
from tests.tiny_run import untimed


class Odd(ProblemEnv):
    """Rewards odd characters."""

    @override
    def grade(self, text: str) -> Grade:
        odd = sum(ord(character) % 2 for character in text) / max(len(text), 1)
        return Grade(odd, {"correct": float(odd > 0.5), "odd": odd})


class Never(ProblemEnv):
    """Gives every answer the reward 0."""

    @override
    def grade(self, text: str) -> Grade:
        return Grade(0.0, {"correct": 0.0})


@chz.chz
class Numbers(RLDatasetBuilder):
    """Problems whose prompts begin with the same token, one longer than the last."""

    first: int = chz.field(doc="that token")
    count: int = chz.field(default=6, doc="problems")
    never: bool = chz.field(default=False, doc="no answer is right")

    @override
    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        env = Never if self.never else Odd
        builders = [
            ProblemGroupBuilder(
                functools.partial(env, Observation((self.first, *[3 + n] * (1 + n % 3)))),
                f"{self.first}/{n}",
            )
            for n in range(self.count)
        ]
        return Datasets(ProblemDataset(builders, 1, seed=0))


def asked(start: int = 0) -> list[list[tuple[int, ...]]]:
    """The prompts that the engine was given, four problems a generation, 8 attempts at each."""
    prompts = [request.observation.tokens_T for request in Listening.heard[start:]]
    generations = [prompts[i : i + 32] for i in range(0, len(prompts), 32)]
    return [
        [prompt for prompt in dict.fromkeys(of) for _ in range(of.count(prompt) // 8)]
        for of in generations
    ]


def how(**dataset: object) -> dict[str, object]:
    Listening.heard.clear()
    return {
        "engine": Listening(),
        "dataset": Mixture(**{"problems_per_generation": 4, **dataset}),  # pyright: ignore[reportArgumentType]
        "attempts": 8,
        "num_generations": 6,
        "eval_every": 0,
    }


@pytest.mark.slow
async def test_replayed_problems_come_back_by_their_bounds_and_after_a_resume(
    model: Path, tmp_path: Path
) -> None:
    """Solved problems alone are taken in; from the third generation on half a batch is theirs.

    Exploration counts for more than any reward does: what was attempted once comes before it.
    """
    replay = Replay(fraction=0.5, warmup=2, exploration=3.0, value="reward", solved_only=True)
    parts = (
        Part(dataset=Numbers(first=40, count=12), weight=1),
        Part(dataset=Numbers(first=50, count=12, never=True), weight=1),
    )
    copier = {"trackers": CopierBuilder(generations=4), "checkpoint_every": 3}
    whole = grpo_config(model, tmp_path / "whole", **how(parts=parts, replay=replay), **copier)
    await main(whole)
    batches = asked()
    counts = [row["data/replayed"] for row in metrics_of(tmp_path / "whole")[:-1]]
    assert counts == [0] * 2 + [2] * 4
    assert [sum(prompt[0] == 40 for prompt in of) for of in batches] == [2, 2, 3, 3, 3, 3]
    checkpoint = latest_checkpoint(tmp_path / "whole")
    assert checkpoint is not None
    seen = {r.problem: r for results in checkpoint.results[:2] for r in results if r.solved > 0}
    best = sorted(seen, key=lambda problem: -seen[problem].reward)[:2]
    replayed = [[result.problem for result in results[:2]] for results in checkpoint.results]
    assert replayed[2] == best
    assert not set(replayed[3]) & set(best)
    assert set(batches[2][:2]) <= {prompt for of in batches[:2] for prompt in of}
    resumed = chz.replace(
        whole,
        log_path=str(tmp_path / "copy"),
        trackers=JsonlTrackerBuilder(),
        behavior_if_log_dir_exists="resume",
    )
    Listening.heard.clear()
    await main(resumed)
    assert asked() == batches[3:], "the checkpoint was after three generations"
    assert untimed(tmp_path / "copy" / "metrics.jsonl") == untimed(
        tmp_path / "whole" / "metrics.jsonl"
    )

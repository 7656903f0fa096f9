"""Does paying for pass@4 raise held-out pass@4 by more than paying for pass@1 does?

    python -m benchmarks.pass_at_k

The two objectives want different things where the question does not settle the answer: pass@1 wants
the likeliest answer every time, pass@4 wants four different ones. So the bundled model guesses a
hidden operator, one token, from a Countdown question and the begun thought
"<think>27". The question says nothing about it; only that + is hidden four times out of ten, -
three times, * twice and / once can be learned. Always saying + has pass@1 = pass@4 = 0.4;
saying all four equally often has pass@1 = 0.25 and pass@4 = 0.68; the most is 0.73.

What is perturbed are norms and biases: one token hardly answers to noise that is as small as those
that a whole answer must survive, and the larger noise that it needs costs weights too much.

Trained at temperature 1, eight attempts of each genome at each problem, once for the chance that
one attempt is right and once for the chance that one of four is. Both are estimated from the same
eight attempts; problems, seeds, population and rollouts are the same, and nothing differs but k.
Held-out problems are attempted eight times at temperature 1, before and after.

On Countdown itself nothing is to be seen: see docs/lab_notes.md, 2026-11-22.
"""

import dataclasses
import functools
import itertools
import random
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import chz
from transformers import PreTrainedTokenizerBase

from benchmarks.harness import Row, report, row
from es_cookbook.common.seeds import derive_seed
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.schedules import Cosine
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.recipes.countdown.dataset import Split, generate_problems, question
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.objectives import PassAtK
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.types import Datasets, Observation, RLDatasetBuilder, SamplingParams
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.directory import METRICS
from es_cookbook.runs.program import run
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics

SEEDS = (0, 1, 2)
TIMES_HIDDEN = {"+": 4, "-": 3, "*": 2, "/": 1}
"""Times in ten that each operator is hidden."""


class HiddenOperatorEnv(ProblemEnv):
    """One guess."""

    full_reward = 1.0

    def __init__(self, observation: Observation, hidden: str) -> None:
        super().__init__(observation)
        self.hidden = hidden

    def grade(self, text: str) -> Grade:
        """Return 1 for the hidden operator."""
        right = float(text == self.hidden)
        return Grade(right, {"correct": right})


@chz.chz
class HiddenOperatorDatasetBuilder(RLDatasetBuilder):
    """Hidden operators, which cannot be known."""

    problems_per_generation: int = chz.field(default=32, doc="problems in a batch")
    num_train: int = chz.field(default=4000, doc="training problems")
    num_test: int = chz.field(default=500, doc="held-out problems")

    async def __call__(self, tokenizer: PreTrainedTokenizerBase) -> Datasets:
        """Return Countdown's problems, with an operator hidden in each."""

        def problems(split: Split, count: int) -> list[ProblemGroupBuilder]:
            found: list[ProblemGroupBuilder] = []
            for problem in itertools.islice(generate_problems(0, split), count):
                asked = question(problem.numbers, problem.target, "compact")
                prompt = f"{asked}<think>{max(problem.numbers)}"
                chooser = random.Random(derive_seed(0, f"hidden operator of {problem.key}"))
                (hidden,) = chooser.choices(list(TIMES_HIDDEN), list(TIMES_HIDDEN.values()))
                observation = Observation(tuple(tokenizer.encode(prompt)))
                make_env = functools.partial(HiddenOperatorEnv, observation, hidden)
                found.append(ProblemGroupBuilder(make_env, f"problem {problem.key}", gold=hidden))
            return found

        dataset = ProblemDataset(problems("train", self.num_train), self.problems_per_generation, 0)
        return Datasets(dataset, problems("test", self.num_test))


def config(k: int, seed: int, log_path: Path) -> Config:
    """Return a run that rewards pass@k."""
    return Config(
        model_name=str(BUNDLED_MODEL),
        dataset=HiddenOperatorDatasetBuilder(),
        log_path=str(log_path),
        search_space=FullRank(include=("*norm*", "*bias*")),
        optimizer=ES(
            population_size=32,
            sigma=0.3,
            learning_rate=0.3,
            learning_rate_schedule=Cosine(),
        ),
        objective=PassAtK(k=k),
        attempts=8,
        sampling=SamplingParams(max_tokens=1, temperature=1.0),
        eval_attempts=8,
        eval_temperature=1.0,
        num_generations=30,
        trackers=JsonlTrackerBuilder(),
        seed=seed,
    )


@dataclasses.dataclass(frozen=True)
class Measured:
    """Held-out pass@1 and pass@4 in percent."""

    before: Mapping[int, float]
    after: Mapping[int, float]

    def gain(self, k: int) -> float:
        """Return points of pass@k."""
        return self.after[k] - self.before[k]


def measured(k: int, seed: int) -> Measured:
    """Train for pass@k, and measure both."""
    with tempfile.TemporaryDirectory() as directory:
        run(config(k, seed, Path(directory) / "run"))
        lines = read_metrics(Path(directory) / "run" / METRICS)
    before, *_, after = (
        {of: 100 * line[f"test/pass@{of}"] for of in (1, 4)}
        for line in lines
        if "test/pass@1" in line
    )
    return Measured(before, after)


def main() -> None:
    """Run both objectives with every seed, by turns."""
    runs: dict[int, list[Measured]] = {1: [], 4: []}
    for seed in SEEDS:
        for k, of_k in runs.items():
            of_k.append(measured(k, seed))
            print(f"seed {seed}, pass@{k} pays: {of_k[-1]}", flush=True)
    rows: list[Row] = []
    for of in (1, 4):
        rows.append(row(f"held-out pass@{of} before", [runs[1][0].before[of]], "%"))
        rows += [
            row(f"points of pass@{of} gained where pass@{k} pays", [r.gain(of) for r in of_k], "")
            for k, of_k in runs.items()
        ]
    more = [four.gain(4) - one.gain(4) for one, four in zip(runs[1], runs[4], strict=True)]
    rows += [
        row("gain in pass@4: where it pays less where pass@1 does", more, "points"),
        row("the same, mean of the seeds", [statistics.mean(more)], "points", at_least=0),
    ]
    report("pass_at_k", rows)


if __name__ == "__main__":
    main()

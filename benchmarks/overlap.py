"""The gain from overlapping generations, and its effect on learning.

    python -m benchmarks.overlap busy
    python -m benchmarks.overlap learning

`busy`: a Ray pool of two torch engines of one lane each, the bundled model without its
end-of-sequence token, 32 rank-1 genomes × 16 Countdown prompts. How long an answer is was drawn for
each rollout from a Pareto distribution, median 12 tokens, cut at 240. By turns, 16 generations with
`max_staleness` 1 and 0; how busy engines are is read from the run's own profile (the share of the
time in which they load or run a block or take a step), the first four generations left out.

`learning`: the main job with `max_staleness=1` and without, run seeds 0, 1 and 2, held-out exact
answers. Where genomes stand does not depend on the engine, so one engine says what many would.
"""

import asyncio
import json
import math
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import chz

from benchmarks.harness import Row, before_and_after, call, ratios, report, row
from benchmarks.sampling import endless_model, first_prompt
from es_cookbook.common.seeds import derive_seed
from es_cookbook.engines.ray.pool import RayPoolBuilder
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.rl.types import (
    Action,
    Datasets,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    SamplingParams,
    StepResult,
)
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.directory import METRICS, PROFILE
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENOMES, PROBLEMS, GENERATIONS, WARM = 32, 16, 16, 4
MEDIAN, LONGEST, SHAPE = 12, 240, 1.3
REPEATS = 3
SEEDS = (0, 1, 2)
CORRECT = "test/env/all/correct"


def length_of(*which: int) -> int:
    """Return tokens of one answer, the same on every engine."""
    u = random.Random(derive_seed(0, "length", *which)).random()
    return min(LONGEST, round(MEDIAN * (2 * (1 - u)) ** (-1 / SHAPE)))


class Tailed(Env):
    """A prompt with a fixed length of answer."""

    def __init__(self, prompt_T: Sequence[int], length: int) -> None:
        self._observation = Observation(tuple(prompt_T), max_tokens=length, is_last=True)

    async def initial_observation(self) -> Observation:
        """Return the prompt, and how long its answer is."""
        return self._observation

    async def step(self, action: Action) -> StepResult:
        """Return any reward by which genomes differ."""
        return StepResult(reward=sum(action.tokens_T) % 7 / 7, done=True)


class TailedBuilder(EnvGroupBuilder):
    """Makes a group whose answers differ in length."""

    def __init__(self, prompt_T: Sequence[int], generation: int, number: int) -> None:
        self._prompt_T = prompt_T
        self._which = generation, number

    async def make_envs(self, num_envs: int) -> EnvGroup:
        """Return an Env for each attempt."""
        lengths = [length_of(*self._which, i) for i in range(num_envs)]
        return EnvGroup([Tailed(self._prompt_T, length) for length in lengths])


class TailedDataset(RLDataset):
    """The same prompts in every generation."""

    def __init__(self, prompts_P: Sequence[Sequence[int]]) -> None:
        self._prompts_P = prompts_P

    def get_batch(self, generation: int) -> Sequence[EnvGroupBuilder]:
        """Return all prompts, with this generation's lengths."""
        return [TailedBuilder(prompt, generation, p) for p, prompt in enumerate(self._prompts_P)]

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._prompts_P)

    async def validate(self, context_length: int) -> None:
        """Check that every prompt has an answer."""


@chz.chz
class TailedDatasetBuilder(RLDatasetBuilder):
    """Builds a `TailedDataset` of Countdown's prompts."""

    async def __call__(self, tokenizer: "PreTrainedTokenizerBase") -> Datasets:
        """Take them from the recipe's first batch."""
        countdown = await CountdownDatasetBuilder(problems_per_generation=PROBLEMS)(tokenizer)
        batch = countdown.train.get_batch(0)
        return Datasets(TailedDataset([await first_prompt(problem) for problem in batch]), [])


def run_once(model: Path, log_path: Path, staleness: int) -> tuple[float, float]:
    """Return utilisation of the engines, and tokens per second, of one run."""
    config = Config(
        model_name=str(model),
        dataset=TailedDatasetBuilder(),
        log_path=str(log_path),
        engine=RayPoolBuilder(num_engines=2, num_cpus=1, engine=TorchEngineBuilder(num_lanes=1)),
        optimizer=ES(population_size=GENOMES, sigma=0.005, learning_rate=0.005),
        sampling=SamplingParams(max_tokens=LONGEST),
        trackers=JsonlTrackerBuilder(),
        num_generations=GENERATIONS,
        eval_every=0,
        max_staleness=staleness,
        profile=True,
    )
    asyncio.run(train(config))
    rows = read_metrics(log_path / METRICS)[WARM:GENERATIONS]
    tokens = rows[-1]["progress/tokens"] - rows[0]["progress/tokens"]
    seconds = math.fsum(row["time/total"] for row in rows[1:])
    return busy_share(log_path / PROFILE), tokens / seconds


def busy_share(profile: Path) -> float:
    """Return the share of time, after the first generations, in which engines were busy."""
    events = json.loads(profile.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = defaultdict[str, list[tuple[str, float, float]]](list)
    for e in events:
        if e["ph"] == "X":
            spans[names[e["tid"]]].append((e["name"], e["ts"], e["ts"] + e["dur"]))
    generations = sorted(spans.pop("generations"), key=lambda span: span[1])
    began, ended = generations[WARM][1], generations[-1][2]
    engines = [of for track, of in spans.items() if track.startswith("engine ")]
    idle = math.fsum(
        max(min(until, ended) - max(since, began), 0)
        for of in engines
        for name, since, until in of
        if name == "idle"
    )
    return 1 - idle / (len(engines) * (ended - began))


def busy() -> list[Row]:
    """Measure two engines, with overlap and without, by turns."""
    lengths = sorted(
        length_of(g, p, i) for g in range(4) for p in range(PROBLEMS) for i in range(GENOMES)
    )
    median = lengths[len(lengths) // 2]
    shares: dict[int, list[float]] = {0: [], 1: []}
    rates: dict[int, list[float]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as directory:
        model = endless_model(Path(directory) / "model")
        for repeat in range(REPEATS):
            for staleness in (1, 0):
                log_path = Path(directory) / f"{staleness}-{repeat}"
                share, rate = run_once(model, log_path, staleness)
                shares[staleness].append(share)
                rates[staleness].append(rate)
    return [
        row("longest answer / median", [lengths[-1] / median], "x"),
        row("two engines busy, max_staleness=1", shares[1], "of 1", at_least=0.95),
        row("two engines busy, max_staleness=0", shares[0], "of 1"),
        row("tokens a second, max_staleness 1 / 0", ratios(rates[1], rates[0]), "x"),
    ]


def learning() -> list[Row]:
    """Run the main job, with overlap and without."""
    rows: list[Row] = []
    gained: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in SEEDS:
            after: list[float] = []
            for staleness in (1, 0):
                log_path = Path(directory) / f"{seed}-{staleness}"
                options = (f"seed={seed}", f"max_staleness={staleness}", f"log_path={log_path}")
                call("countdown", *options)
                after.append(100 * before_and_after(log_path, CORRECT)[1])
                name = f"Countdown, seed {seed}, max_staleness={staleness}: exact answers"
                rows.append(row(name, after[-1:], "%"))
            gained.append(after[0] - after[1])
    rows.append(row("points with overlap more than without", gained, "points", at_least=-1))
    return rows


PARTS = {"busy": busy, "learning": learning}


def main() -> None:
    """Measure and report the parts that are named; all if none is."""
    for part in sys.argv[1:] or PARTS:
        report("overlap", PARTS[part](), part)


if __name__ == "__main__":
    main()

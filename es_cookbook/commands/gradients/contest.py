"""One run of a comparison, in a process of its own, and what its last weights are worth.

A process of its own tells how much memory a run needs: the most that it ever had resident, less
what importing torch and transformers takes. What was measured is kept beside the run directory, as
`<run>.measured.json`, with the Config it holds for; a run that has it is not run again.

The last weights are measured on an engine that was built from the base, so that it knows both: the
KL to the base is that of answers which the last weights gave at temperature 1.

Seconds are those of training, without the measurements. At equal seconds, a run has the last score
that it had reached by then.
"""

import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import resource
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from statistics import fmean
from typing import TypeAlias, cast

import anyio

from es_cookbook import train
from es_cookbook.baselines import policy_gradient
from es_cookbook.baselines.checkpoints import latest_checkpoint
from es_cookbook.baselines.grpo import config as grpo
from es_cookbook.baselines.grpo import main as run_grpo
from es_cookbook.commands.gradients import program
from es_cookbook.common.configs import config_from_json, config_to_json, trust_of
from es_cookbook.common.errors import WorkerError
from es_cookbook.common.files import LARGEST_TEXT, read_file
from es_cookbook.common.terminal import markdown, plural, say
from es_cookbook.engines.base import Engine
from es_cookbook.population.config import closing
from es_cookbook.population.evaluate import evaluate
from es_cookbook.rl.regularisers import KLToBase
from es_cookbook.rl.types import EnvGroupBuilder, Metrics, RLDatasetBuilder
from es_cookbook.runs.directory import CHECKPOINTS, HISTORY, read_trained_on
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.reading import RunFiles
from es_cookbook.runs.report.comparison import mean_and_range
from es_cookbook.runs.report.curves import points
from es_cookbook.train.recorded import RecordedRun, rebuild

AnyConfig: TypeAlias = train.Config | policy_gradient.Config | grpo.Config
"""Of a run of evolution strategies, or of gradients."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What a run needed, and what its last weights are worth.

    Attributes:
        peak_bytes: most resident memory, less that of imported libraries.
        kept_bytes: of the files that hold the trained weights: the history, or the checkpoint.
        final: metrics of the last weights; none where only the training matters.
    """

    peak_bytes: int
    kept_bytes: int
    final: Metrics


@dataclasses.dataclass(frozen=True, slots=True)
class Finals:
    """How last weights are measured.

    Attributes:
        attempts: at each held-out problem, at temperature 1.
        second: held-out problems of another task, attempted greedily; None for none.
    """

    attempts: int
    second: RLDatasetBuilder | None


def run_measured(config: AnyConfig, finals: Finals | None) -> Measured:
    """Run to the end in a process of its own, unless that was done before.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
        KeyboardInterrupt: It was stopped.
    """
    path = Path(f"{config.log_path}.measured.json")
    config_json = config_to_json(config)
    asked = {"config": json.loads(config_json), "finals": finals and finals.attempts}
    if finals is not None and finals.second is not None:
        asked["second"] = json.loads(config_to_json(finals.second))
    if path.exists():
        found = json.loads(read_file(path, LARGEST_TEXT, path.parent))
        if all(found.get(key) == value for key, value in asked.items()):
            return Measured(found["peak_bytes"], found["kept_bytes"], found["final"])
    peak = _run(config_json)
    final = {} if finals is None else anyio.run(functools.partial(_final, config, finals))
    measured = Measured(peak, kept_bytes(Path(config.log_path)), final)
    replace_file(path, [json.dumps({**asked, **dataclasses.asdict(measured)}, indent=1).encode()])
    return measured


def base_metrics(config: AnyConfig, finals: Finals) -> Metrics:
    """What the model is worth that a run begins with."""
    return anyio.run(functools.partial(_final, config, finals, at_the_base=True))


def kept_bytes(log_path: Path) -> int:
    history, checkpoints = log_path / HISTORY, log_path / CHECKPOINTS
    files = [history] if history.exists() else [p for p in checkpoints.rglob("*") if p.is_file()]
    return sum(path.stat().st_size for path in files)


def _run(config_json: str) -> int:
    spawn = multiprocessing.get_context("spawn")  # A fork would begin with this process's memory.
    with ProcessPoolExecutor(1, spawn) as pool:
        try:
            return pool.submit(_run_here, config_json).result()
        except BrokenProcessPool as error:
            raise WorkerError("a run of the comparison failed: its process was killed") from error


def _run_here(config_json: str) -> int:
    """Run; returns how much more memory was resident at most than imported libraries take."""
    from torch import nn
    from transformers import PreTrainedModel

    del nn, PreTrainedModel  # What comes after them counts.
    before = _most_resident()
    config = config_from_json(config_json, trust_of(config_json))
    if isinstance(config, train.Config):
        train.run(config)
    elif isinstance(config, grpo.Config):
        program.run(run_grpo, config)
    else:
        program.run(policy_gradient.main, cast(policy_gradient.Config, config))
    return _most_resident() - before


def _most_resident() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # Of this program; what `getrusage` says begins with its parent's there.
        (line,) = (each for each in status.read_text().splitlines() if each.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


async def _final(config: AnyConfig, finals: Finals, *, at_the_base: bool = False) -> Metrics:
    async with _opened(config, at_the_base=at_the_base) as engine:
        sampler = config.sampler(engine)
        test_P = (await config.dataset(engine.tokenizer)).test_P
        kl = KLToBase(
            weight=0.0,
            problems_per_generation=max(len(test_P), 1),
            max_tokens=config.sampling.max_tokens,
        )
        kl_P = kl(engine.tokenizer, engine.traits.context_length, 0)(0, test_P)
        found = await evaluate(sampler, test_P, finals.attempts, 1.0, kl_P)
        if finals.second is not None:
            second_P = (await finals.second(engine.tokenizer)).test_P
            if not at_the_base:
                say_shared(Path(config.log_path), second_P)
            second = await evaluate(sampler, second_P)
            found |= {f"second/{key}": value for key, value in second.items()}
        return found


def say_shared(log_path: Path, second_P: Sequence[EnvGroupBuilder]) -> None:
    """Say how many of another task's problems a run trains on, where it does."""
    known = read_trained_on(log_path)
    if shared := known and known.overlap(problem.digests for problem in second_P):
        of_second = plural(len(second_P), "problem")
        say(f"not held out: {log_path} trains on {shared} of {of_second} of second")


@contextlib.asynccontextmanager
async def _opened(config: AnyConfig, *, at_the_base: bool) -> AsyncGenerator[Engine]:
    """An engine whose base is the run's, and whose centre has its last weights."""
    log_path = Path(config.log_path)
    if isinstance(config, train.Config) and not at_the_base:
        run = RecordedRun(log_path, trust=trust_of(config_to_json(config)))
        rebuilt = await rebuild(run, config.engine)
        async with closing(rebuilt.engine) as engine:
            await rebuilt.go_to(len(run.records))
            yield engine
        return
    model_name, search_space = config.model_name, config.search_space
    built = await config.engine(model_name=model_name, search_space=search_space)
    async with closing(built) as engine:
        if not at_the_base:
            await _take_checkpoint(engine, log_path)
        yield engine


async def _take_checkpoint(engine: Engine, log_path: Path) -> None:
    import torch

    from es_cookbook.baselines.gradient_run import take_weights
    from es_cookbook.checkpoints.models import load_causal_lm

    checkpoint = latest_checkpoint(log_path)
    assert checkpoint is not None, "a complete run has one"
    model = load_causal_lm(str(checkpoint.model), "float32", torch.device("cpu"))
    parameters: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    await take_weights(engine, {name: parameters[name] for name in engine.space.shapes})


@dataclasses.dataclass(frozen=True, slots=True)
class Race:
    """Runs that differ in their seed alone: runs x measurements, the first before training."""

    rollouts_M: Sequence[int]
    seconds_R_M: Sequence[Sequence[float]]
    scores_R_M: Sequence[Sequence[float]]

    def at_seconds(self, seconds: float) -> list[float]:
        """The last score of each run that it had reached by then."""
        return [
            [score for t, score in zip(seconds_M, scores_M, strict=True) if t <= seconds][-1]
            for seconds_M, scores_M in zip(self.seconds_R_M, self.scores_R_M, strict=True)
        ]

    @property
    def seconds_R(self) -> list[float]:
        return [seconds_M[-1] for seconds_M in self.seconds_R_M]


def race_of(runs_R: Sequence[RunFiles], metric: str) -> Race:
    """Read the metrics of runs.

    Raises:
        ConfigError: A run without the metric.
    """
    scores_R = [points(run, metric, "rollouts") for run in runs_R]
    seconds_R = [list(points(run, metric, "seconds")) for run in runs_R]
    rollouts_M = [int(count) for count in scores_R[0]]
    return Race(rollouts_M, seconds_R, [list(scores.values()) for scores in scores_R])


def table(
    races: Mapping[str, Race],
    measured: Mapping[str, Sequence[Measured]],
    base: Metrics,
    attempts: int,
    *,
    second: bool,
) -> str:
    """All contestants, and the base, as a Markdown table."""
    least = min(min(race.seconds_R) for race in races.values())
    head = [
        *("", "held-out, greedy", f"after {least:.0f} s", "s of training"),
        *(f"pass@{k}, T = 1" for k in (1, attempts)),
        "KL to the base, nats a token",
        *(["second task"] if second else []),
        *("peak memory, MiB", "kept, kB"),
    ]

    def finals(of: Sequence[Metrics], kl: str) -> list[str]:
        shares = [
            _percent([each.get(f"test/pass@{k}", math.nan) for each in of]) for k in (1, attempts)
        ]
        return [*shares, kl, *([_percent(list(map(_second, of)))] if second else [])]

    start = next(iter(races.values())).scores_R_M[0][0]
    rows = [["base", _percent([start]), "", "", *finals([base], "0"), "", ""]]
    for name, race in races.items():
        of = measured[name]
        kl = fmean(each.final["test/env/kl/kl"] for each in of)
        rows.append(
            [
                name,
                _percent([scores_M[-1] for scores_M in race.scores_R_M]),
                _percent(race.at_seconds(least)),
                f"{fmean(race.seconds_R):.0f}",
                *finals([each.final for each in of], f"{kl:.3f}"),
                f"{fmean(each.peak_bytes for each in of) / 2**20:.0f}",
                f"{fmean(each.kept_bytes for each in of) / 1000:.0f}",
            ]
        )
    return markdown(head, rows)


def _second(metrics: Metrics) -> float:
    for name in ("correct", "solved"):
        if (key := f"second/test/env/all/{name}") in metrics:
            return metrics[key]
    return metrics["second/test/reward/mean"]


def _percent(values_R: Sequence[float]) -> str:
    if any(map(math.isnan, values_R)):
        return "–"
    return f"{100 * values_R[0]:.1f} %" if len(values_R) == 1 else mean_and_range(values_R)

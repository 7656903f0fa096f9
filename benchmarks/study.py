"""A fair study of learning on a real chat model: evolution strategies beside gradients.

    python -m benchmarks.study sums             # or extraction, constraints, long
    python -m benchmarks.study sums group gold  # some contestants
    python -m benchmarks.study try es group     # minutes, to see that it runs
    python -m benchmarks.study tables           # of README and docs/es_vs_grpo.md, from results

The model is that of `make chat-model`. A task takes two to three hours of two cores. Each run is a
separate process with one thread, one per core at a time, and what is complete is never run again,
so the same command goes on where it was interrupted. Runs lie in `build/study/<task>`, results and
metrics in `benchmarks/results/study/<task>.json`, and all tables of the page are made from those.

**Questions.** Settings, the `LOSS` of `auto` and genomes × problems were chosen on folds 0 and 1 of
the recipe. Trials are scored on `TUNING_FOLD`, results on `FOLD`, which chooses nothing.

**Tuning.** Every contestant's learning rate (α; for gradients AdamW's) is multiplied by `FACTORS`,
in runs with another seed, and the best is taken by held-out accuracy after the whole run. While a
contestant's best is at an edge of its grid, the grid goes on beyond it; the others have as many
trials, between their best and its better neighbour. Where α is `auto`, factors multiply what the
first trial found.

**Schedules.** There are none: all rates are constant. So a run's measurements are those of shorter
runs with the same settings, and equal seconds and equal evaluations are read from the same curves,
on the line between two measurements. One dependence on the length is left: α of `auto` follows from
the number of generations, which is as many as take about four minutes.

**Costs.** Seconds are processor seconds of training and of the search for σ, without evaluations.
They do not count what waits, but caches and memory are shared: beside other programs those of a
gradient grew by half, those of steering vectors by a seventh. So results need a machine that does
nothing else; each run keeps the machine's mean load, and the tables state it. A virtual machine can
be slower at another hour without any load, so each run also keeps how fast memory was copied before
and after it. Scores do not depend on either. An evaluation is one genome that answers a question or
reads an answer to it, or one answer of the centre or of a gradient's model. With `best` a genome
reads answers to some of the questions only, and all count. Memory is the peak of a run's own
process, less what it has after the imports that all have.
"""

import dataclasses
import importlib
import json
import math
import multiprocessing
import os
import shutil
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeAlias, TypeVar, cast

import anyio
import chz
import torch

from benchmarks.harness import CHAT_MODEL, commit, machine
from benchmarks.study_tables import CORRECT, RESULTS, Run, Task, Trials, rewrite, tables
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.common.options import built
from es_cookbook.plugins.gradients.commands.compare_gradients import (
    AnyConfig,
    final_metrics,
    first_config,
    rollouts,
    train,
)
from es_cookbook.plugins.sweep.in_turn import batch_of
from es_cookbook.rl.types import Metrics
from es_cookbook.runs import choosing, recorder
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.directory import METRICS
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.tracking.jsonl import finite, read_metrics
from es_cookbook.runs.tracking.reading import read_run

_T = TypeVar("_T")
Told: TypeAlias = Literal["gold answers", "rewards"]
STUDY = CHAT_MODEL.parents[1] / "study"
TUNING_FOLD, FOLD = 2, 3
SEEDS, TUNING_SEED = (0, 1, 2), 1000
FACTORS = (0.3, 1.0, 3.0)
LONGEST_GRID = 8
"""Most trials of a contestant; if its best is still at an edge, the table says so."""
_KEPT = ("reward/mean", "time/total", CORRECT)
"""Metrics of each generation that go into the results."""


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A method and its settings.

    Attributes:
        like: the contestant of `compare-gradients` that it begins as.
        told: what it learns from.
        generations: number in about four minutes of a core, of each of `TASKS`.
        options: options that differ.
        of_task: further ones for a task.
    """

    like: str
    told: Told
    generations: tuple[int, int, int, int]
    options: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    of_task: Mapping[str, Mapping[str, object]] = dataclasses.field(
        default_factory=dict[str, Mapping[str, object]]
    )

    @property
    def rate(self) -> str:
        """The option that trials multiply."""
        of_gradients = self.like in ("group", "grpo", "gold")
        return "learning_rate" if of_gradients else "optimizer.learning_rate"


_PROBLEMS = {"dataset.problems_per_generation": 16}
_DENSE = {**_PROBLEMS, "optimizer.sigma": "auto", "optimizer.learning_rate": "auto"}
_STEERING = {"search_space": "steering"}
# Chosen on fold 1, as all settings: on constraints vectors of all layers learned less.
_LAST_LAYER = {"constraints": {"search_space.include": "*layers.29.*"}}
CONTESTANTS: Mapping[str, Contestant] = {
    "es": Contestant("es", "gold answers", (20, 16, 16, 12), _STEERING),
    "low_rank_gold": Contestant("es", "gold answers", (10, 7, 7, 6)),
    "gold": Contestant(
        "gold",
        "gold answers",
        (20, 17, 17, 14),
        {"dataset.problems_per_generation": 32, "learning_rate": 1e-5},
    ),
    "rewards": Contestant(
        "rewards", "rewards", (12, 6, 8, 4), {**_PROBLEMS, **_STEERING}, _LAST_LAYER
    ),
    "best": Contestant(
        "rewards",
        "rewards",
        (12, 6, 6, 4),
        {
            "surrogate": "best",
            "dataset.problems_per_generation": 12,
            "optimizer.population_size": 128,
            **_STEERING,
        },
        _LAST_LAYER,
    ),
    "low_rank": Contestant(
        "rewards", "rewards", (12, 5, 5, 4), {**_PROBLEMS, "optimizer.population_size": 32}
    ),
    # Of the paper's 200 problems in a generation 16: with all of them one takes six minutes.
    "es_at_scale": Contestant("es_at_scale", "rewards", (7, 4, 4, 3), _PROBLEMS),
    "dense_auto": Contestant("es_at_scale", "rewards", (7, 4, 4, 3), _DENSE),
    "group": Contestant("group", "rewards", (12, 9, 9, 5), {"attempts": 16, "learning_rate": 9e-5}),
    "grpo": Contestant("grpo", "rewards", (3, 3, 3, 3), {"attempts": 16, "learning_rate": 9e-5}),
}
_RARE = ("low_rank_gold", "low_rank", "grpo")
USUAL = tuple(name for name in CONTESTANTS if name not in _RARE)
"""The others run if they are named: TRL's trainer learns as `group` does in several times the time,
and low-rank genomes are those of the study before."""
_LONG = {"dataset.answer_tokens": 120, "sampling.max_tokens": 120}
TASKS: Mapping[str, tuple[str, str, Mapping[str, object]]] = {
    "sums": ("sums", "extraction", {}),
    "extraction": ("extraction", "sums", {}),
    "constraints": ("constraints", "sums", {}),
    "long": ("constraints", "sums", _LONG),
}
"""Task -> the recipe's task, the one on which forgetting is measured, and options of all."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run: as it is written above, or less of it to try the command.

    Attributes:
        common: options of all runs, beside the task's.
        generations: of every run; None for those of the contestants.
        num_tuning: held-out questions of a trial; `num_test` of a final run; `num_sampled` of
            those are answered at temperature 1.
    """

    directory: Path = STUDY
    common: Mapping[str, object] = dataclasses.field(
        default_factory=lambda: {"model_name": CHAT_MODEL}
    )
    seeds: tuple[int, ...] = SEEDS
    factors: tuple[float, ...] = FACTORS
    longest_grid: int = LONGEST_GRID
    generations: int | None = None
    num_tuning: int = 200
    num_test: int = 400
    num_sampled: int = 100
    pass_at: int = 8


TRIED = Plan(
    directory=STUDY / "try",
    seeds=(0,),
    longest_grid=4,
    generations=1,
    num_tuning=20,
    num_test=20,
    num_sampled=10,
    pass_at=2,
)
"""Minutes, in which all that the study does is done once, and nothing can be learned."""


@dataclasses.dataclass(frozen=True)
class Study:
    """One task's runs under a plan."""

    plan: Plan
    task: str

    @property
    def directory(self) -> Path:
        return self.plan.directory / self.task

    def config(self, name: str, seed: int, rate: object, *, tuning: bool) -> AnyConfig:
        """A contestant's run; `rate` is None for its first one."""
        contestant, (task, _, options) = CONTESTANTS[name], TASKS[self.task]
        count = self.plan.generations or contestant.generations[[*TASKS].index(self.task)]
        schedule = f"{contestant.rate}_schedule"
        given: dict[str, object] = {
            **{"dataset.task": task, schedule: "none", "num_generations": count},
            **options,
            **self.plan.common,
            **contestant.options,
            **contestant.of_task.get(self.task, {}),
            "dataset.fold": TUNING_FOLD if tuning else FOLD,
            "dataset.num_test": self.plan.num_tuning if tuning else self.plan.num_test,
            "eval_every": count if tuning else max(1, count // 4),
            "seed": seed,
            "log_path": self.directory / f"{name}-{'begin' if rate is None else rate}-{seed}",
            "behavior_if_log_dir_exists": "resume",
            "trackers.live": None,
        }
        if rate is not None:
            given[contestant.rate] = rate
        return built(first_config("chat", contestant.like), {k: str(v) for k, v in given.items()})

    def run(self, name: str, seed: int, rate: float | None, *, tuning: bool) -> Run:
        """The results of a run, which is made if it is not complete; only they are kept of it."""
        config = self.config(name, seed, rate, tuning=tuning)
        log_path = Path(config.log_path)
        path = log_path.with_name(f"{log_path.name}.json")
        if path.exists():
            return cast(Run, json.loads(path.read_text()))
        print(f"{log_path.name}: {config.num_generations} generations", flush=True)
        measured = _in_a_process(_trained, config)
        final: Metrics = {}
        if not tuning:
            final = _in_a_process(self.final, config, False)
        found = _results(config, seed, CONTESTANTS[name].rate, measured, final)
        replace_file(path, [json.dumps(found, indent=1).encode()])
        shutil.rmtree(log_path)  # Weights and state of a gradient take 1.6 GB.
        return found

    def final(self, config: AnyConfig, is_base: bool) -> Metrics:
        """Metrics of a run's end at temperature 1, and its score on the other task."""
        _, other, _ = TASKS[self.task]
        options = {"dataset.task": other, "dataset.num_test": 100, **self.plan.common}
        second = cast(Config, first_config("chat", "es"))
        second = built(second, {path: str(value) for path, value in options.items()})
        dataset = chz.replace(config.dataset, num_test=self.plan.num_sampled)
        config = chz.replace(config, dataset=dataset)
        return anyio.run(final_metrics, config, self.plan.pass_at, second, is_base)

    def base(self) -> Metrics:
        """The same of the base, measured once."""
        path = self.directory / "base.json"
        if not path.exists():
            config = self.config("es", 0, None, tuning=False)
            final = _in_a_process(self.final, config, True)
            replace_file(path, [json.dumps(finite(final)).encode()])
        return cast("Metrics", json.loads(path.read_text()))


def at_edge(tried: Mapping[float, float]) -> bool:
    """Whether the best rate of a grid is the smallest or the largest, and no inner one as good.

    >>> at_edge({0.3: 0.1, 1.0: 0.2, 3.0: 0.4}), at_edge({0.3: 0.1, 1.0: 0.4, 3.0: 0.4})
    (True, False)
    """
    inner = sorted(tried)[1:-1]
    return max(tried.values()) > max((tried[rate] for rate in inner), default=-math.inf)


def best_of(tried: Mapping[float, float]) -> float:
    """The best rate; of several the one nearest to the middle of the grid."""
    rates = sorted(tried)
    middle = (len(rates) - 1) / 2
    return max(rates, key=lambda rate: (tried[rate], -abs(rates.index(rate) - middle)))


def next_rate(tried: Mapping[float, float]) -> float:
    """The rate to try next: beyond the best one at an edge, else beside it, in three digits.

    >>> next_rate({0.3: 0.1, 1.0: 0.2, 3.0: 0.4}), next_rate({0.3: 0.1, 1.0: 0.4, 3.0: 0.2})
    (9.0, 1.73)
    """
    rates, best = sorted(tried), best_of(tried)
    at = rates.index(best)
    if at_edge(tried):
        found = best * best / (rates[1] if at == 0 else rates[-2])
    else:
        beside = max(rates[at - 1], rates[at + 1], key=lambda rate: tried[rate])
        found = math.sqrt(best * beside)
    return float(f"{found:.2e}")


def tune(
    names: Sequence[str],
    trial: Callable[[str, float | None], tuple[float, float]],
    factors: Sequence[float] = FACTORS,
    longest: int = LONGEST_GRID,
    workers: int = 1,
) -> dict[str, dict[float, float]]:
    """Rates of each contestant and their scores: as many for all, and no best one at an edge.

    Args:
        names: the contestants.
        trial: runs a contestant with a rate, or with its first one for None; that rate, and the
            held-out score. Asked again, it answers without a run.
        factors: multiples of the first rate, 1 among them.
        longest: most trials of a contestant.
        workers: trials at a time.
    """
    tried_of = {name: dict[float, float]() for name in names}
    with ThreadPoolExecutor(workers) as pool:

        def try_all(asked: Sequence[tuple[str, float | None]]) -> None:
            found = list(pool.map(trial, *zip(*asked, strict=True)))
            for (name, _), (rate, score) in zip(asked, found, strict=True):
                tried_of[name][rate] = score

        try_all([(name, None) for name in names])
        firsts = {name: next(iter(tried)) for name, tried in tried_of.items()}
        others = [factor for factor in factors if factor != 1]
        try_all([(name, float(f"{each * firsts[name]:.3g}")) for name in names for each in others])
        while len(factors) > 1:
            most = max(map(len, tried_of.values()))
            short = [
                (name, next_rate(tried))
                for name, tried in tried_of.items()
                if len(tried) < most or (at_edge(tried) and len(tried) < longest)
            ]
            if not short:
                break
            try_all(short)
    return tried_of


def results_of(task: str, names: Sequence[str], plan: Plan) -> Task:
    """Tune and run the contestants of a task, as far as that is not done."""
    of_task = Study(plan, task)
    of_task.directory.mkdir(parents=True, exist_ok=True)
    trials: dict[str, list[Run]] = {name: [] for name in names}

    def trial(name: str, rate: float | None) -> tuple[float, float]:
        run = of_task.run(name, TUNING_SEED, rate, tuning=True)
        trials[name].append(run)
        return run["rate"], run["points"][-1]["score"]

    workers = num_cores()
    tried_of = tune(names, trial, plan.factors, plan.longest_grid, workers)
    found: Task = {
        "command": _command(task, names),
        "questions": {"tuning": of_task.plan.num_tuning, "test": of_task.plan.num_test},
        "pass_at": of_task.plan.pass_at,
        "base": dict(of_task.base()),
        "contestants": {},
    }
    with ThreadPoolExecutor(workers) as pool:
        runs_of = {
            name: [
                pool.submit(of_task.run, name, seed, best_of(tried), tuning=False)
                for seed in plan.seeds
            ]
            for name, tried in tried_of.items()
        }
    for name, tried in tried_of.items():
        at_an_edge = len(tried) > 1 and at_edge(tried)
        tuned = Trials(rate=best_of(tried), at_edge=at_an_edge, runs=trials[name])
        runs = [each.result() for each in runs_of[name]]
        told = CONTESTANTS[name].told
        found["contestants"][name] = {"told": told, "tuned": tuned, "runs": runs}
    return found


def _command(task: str, names: Sequence[str]) -> str:
    return f"python -m benchmarks.study {' '.join([task, *names])}"


def _in_a_process(function: Callable[..., _T], *arguments: object) -> _T:
    """Run a function in a separate process with one thread; if it fails, so does this one."""
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(function, *arguments).result()


def _gib(name: str) -> float:
    """A size from the status of this process (Linux): `VmRSS`, `VmHWM`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith(f"{name}:"))


def _trained(config: AnyConfig) -> dict[str, float]:
    """Run to the end. GiB of this process after imports, and at most; the machine's load, pace."""
    for module in ("es_cookbook.engines.torch.self_check", "es_cookbook.plugins.gradients.learner"):
        importlib.import_module(module)  # What either kind of run imports.
    imports, before = _gib("VmRSS"), _copied()
    loads: list[float] = []

    def watch() -> None:
        while True:
            time.sleep(10)
            loads.append(os.getloadavg()[0])

    threading.Thread(target=watch, daemon=True).start()
    search = choosing.find_sigma_for
    # The total of a generation is then one of processor seconds.
    recorder.time = types.SimpleNamespace(perf_counter=time.process_time, time=time.time)

    async def timed(*arguments: object) -> object:
        began = time.process_time()
        found = await cast("Callable[..., object]", search)(*arguments)  # type: ignore[misc]
        seconds = time.process_time() - began
        _search_file(config).write_text(json.dumps(seconds))
        return found

    choosing.find_sigma_for = timed  # type: ignore[assignment]
    train(config)
    copied = {"before": before, "after": _copied()}
    return {"imports": imports, "peak": _gib("VmHWM"), "load": fmean(loads or [0.0]), **copied}


def _copied(elements: int = 2**24) -> float:
    """Copy memory that no cache holds, 64 MiB, five times; GB/s read and written, at best."""
    source = torch.ones(elements)
    target = torch.ones(elements)
    seconds: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(seconds) / 1e9


def _search_file(config: AnyConfig) -> Path:
    """Seconds of the search for σ, which a run that goes on does not search again."""
    return Path(config.log_path) / "search.json"


def evaluations_of(config: AnyConfig) -> int:
    """Evaluations of a generation at most, the centre's answers that genomes read included."""
    if not isinstance(config, Config):
        return rollouts(config) // config.num_generations
    by_centre = 0 if config.surrogate is None else config.surrogate.attempts
    each = config.optimizer.population_size * config.attempts + by_centre
    return each * (batch_of(config.dataset) or 1)


def _results(
    config: AnyConfig, seed: int, rate: str, found: Mapping[str, float], final: Metrics
) -> Run:
    log_path = Path(config.log_path)
    rows = read_metrics(log_path / METRICS)
    search = _search_file(config)
    seconds = json.loads(search.read_text()) if search.exists() else 0.0
    evaluations = 0.0
    per_generation = evaluations_of(config)
    points: list[dict[str, float]] = []
    for generation, line in enumerate(rows):
        if CORRECT in line:
            score = {"seconds": seconds, "evaluations": evaluations, "score": line[CORRECT]}
            points.append({"generation": generation, **score})
        seconds += line.get("time/total", 0.0)
        evaluations += per_generation
    if not points or points[-1]["generation"] != config.num_generations:
        raise SystemExit(f"{log_path} has no evaluation after its last generation")
    kept = [{key: line[key] for key in _KEPT if key in line} for line in rows]
    return {
        "machine": {**machine(), "threads": 1},
        "commit": commit(),
        "seed": seed,
        "rate": float(cast(float, read_run(log_path).config[rate])),
        "points": points,
        "metrics": cast("list[dict[str, float]]", finite(kept)),
        "memory": {"imports": found["imports"], "peak": found["peak"]},
        "load": found["load"],
        "copied": [found["before"], found["after"]],
        "final": cast("dict[str, float]", finite(dict(final))),
    }


def main(words: Sequence[str]) -> None:
    """Run a task and write its results, or print all tables and put them into the page."""
    first, *names = words or ["tables"]
    if first == "tables":
        rewrite()
        print(tables())
        return
    unknown = [each for each in names if each not in CONTESTANTS]
    if first not in (*TASKS, "try") or unknown:
        raise SystemExit(
            f"python -m benchmarks.study TASK [CONTESTANT ...], or tables: tasks are "
            f"{', '.join(TASKS)} and try, contestants {', '.join(CONTESTANTS)}; found "
            f"{' '.join(words)}"
        )
    if not CHAT_MODEL.is_file():
        raise SystemExit(f"{CHAT_MODEL} is not there: run `make chat-model`")
    task, plan, results = (first, Plan(), RESULTS)
    if first == "try":
        task, plan, results = "sums", TRIED, TRIED.directory / "results"
    path = results / f"{task}.json"
    found = results_of(task, names or USUAL, plan)
    if path.exists():  # Of contestants that were run another time.
        before = cast(Task, json.loads(path.read_text()))
        found["contestants"] = {**before["contestants"], **found["contestants"]}
        found["command"] = _command(task, [*found["contestants"]])
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, [json.dumps(found, indent=1).encode(), b"\n"])
    if first != "try":
        rewrite()
    print(tables(results))


if __name__ == "__main__":
    main(sys.argv[1:])

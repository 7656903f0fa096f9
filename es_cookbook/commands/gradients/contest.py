"""One run of a comparison, in a process of its own, and what its last weights are worth.

A process of its own tells how much memory a run needs: the most that it ever had resident, less
what importing torch and transformers takes. What was measured is kept beside the run directory, as
`<run>.measured.json`, with the Config it holds for; a run that has it is not run again.

The last weights are measured on an engine that was built from the base, so that it knows both: the
KL to the base is that of answers which the last weights gave at temperature 1.
"""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import resource
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias, cast

import anyio

from es_cookbook import train
from es_cookbook.baselines import policy_gradient
from es_cookbook.baselines.checkpoints import latest_checkpoint
from es_cookbook.baselines.grpo import config as grpo
from es_cookbook.baselines.grpo.run import main as run_grpo
from es_cookbook.commands.gradients import as_program
from es_cookbook.common.configs import config_from_json, config_to_json, trust_of
from es_cookbook.common.errors import ESCookbookError
from es_cookbook.common.files import LARGEST_TEXT, read_file
from es_cookbook.common.terminal import plural, say
from es_cookbook.engines.base import Engine
from es_cookbook.population.evaluate import evaluate
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.grading.workers import end_idle_workers
from es_cookbook.rl.regularisers.kl_to_base import KLToBase
from es_cookbook.rl.types import EnvGroupBuilder, Metrics, RLDatasetBuilder
from es_cookbook.runs.directory import CHECKPOINTS, HISTORY, read_trained_on
from es_cookbook.runs.files import replace_file
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
    """Of the history or the checkpoints."""
    history, checkpoints = log_path / HISTORY, log_path / CHECKPOINTS
    files = [history] if history.exists() else [p for p in checkpoints.rglob("*") if p.is_file()]
    return sum(path.stat().st_size for path in files)


def _run(config_json: str) -> int:
    spawn = multiprocessing.get_context("spawn")  # A fork would begin with this process's memory.
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_run_here, args=(config_json, theirs))
    process.start()
    theirs.close()
    try:
        said = ours.recv()
    except EOFError:
        process.join()
        said = f"its process ended with status {process.exitcode}"
    finally:
        process.join()
    if isinstance(said, int):
        return said
    if said == "interrupted":
        raise KeyboardInterrupt("interrupted; give the same command again to go on")
    raise ESCookbookError(f"a run of the comparison failed: {said}")


def _run_here(config_json: str, result: Connection) -> None:
    from torch import nn
    from transformers import PreTrainedModel

    del nn, PreTrainedModel  # What comes after them counts.
    before = _most_resident()
    config = config_from_json(config_json, trust_of(config_json))
    try:
        if isinstance(config, train.Config):
            train.run(config)
        elif isinstance(config, grpo.Config):
            as_program.run(run_grpo, config)
        else:
            as_program.run(policy_gradient.main, cast(policy_gradient.Config, config))
        said: int | str = _most_resident() - before
    except ESCookbookError as error:
        said = str(error)
    except KeyboardInterrupt:
        said = "interrupted"
    with contextlib.suppress(BrokenPipeError):  # Nobody is there any more who asked.
        result.send(said)


def _most_resident() -> int:
    """Bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # Of this program; what `getrusage` says begins with its parent's there.
        (line,) = (each for each in status.read_text().splitlines() if each.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


async def _final(config: AnyConfig, finals: Finals, *, at_the_base: bool = False) -> Metrics:
    async with _opened(config, at_the_base=at_the_base) as engine:
        sampler = PopulationSampler(
            engine,
            sampling=config.sampling,
            rollout_timeout=config.rollout_timeout,
            turn_timeout=config.turn_timeout,
        )
        test_P = (await config.dataset(engine.tokenizer)).test_P
        kl = KLToBase(
            weight=0.0,
            problems_per_generation=max(len(test_P), 1),
            max_tokens=config.sampling.max_tokens,
        )
        beside_P = kl(engine.tokenizer, engine.traits.context_length, 0)(0, test_P)
        found = await evaluate(sampler, test_P, finals.attempts, 1.0, beside_P)
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


@asynccontextmanager
async def _opened(config: AnyConfig, *, at_the_base: bool) -> AsyncGenerator[Engine]:
    """An engine whose base is the run's, and whose centre has its last weights."""
    log_path = Path(config.log_path)
    if isinstance(config, train.Config) and not at_the_base:
        recorded = RecordedRun(log_path, trust=trust_of(config_to_json(config)))
        rebuilt = await rebuild(recorded, config.engine)
        engine = rebuilt.engine
    else:
        rebuilt = None
        engine = await config.engine(model_name=config.model_name, search_space=config.search_space)
    try:
        if rebuilt is not None:
            await rebuilt.go_to(len(rebuilt.run.records))
        elif not at_the_base:
            await _take_checkpoint(engine, log_path)
        yield engine
    finally:
        end_idle_workers()
        with anyio.CancelScope(shield=True):
            await engine.close()


async def _take_checkpoint(engine: Engine, log_path: Path) -> None:
    import torch

    from es_cookbook.baselines.sampled import take_weights
    from es_cookbook.checkpoints.models import load_causal_lm

    checkpoint = latest_checkpoint(log_path)
    assert checkpoint is not None, "a complete run has one"
    model = load_causal_lm(str(checkpoint.model), "float32", torch.device("cpu"))
    parameters: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    await take_weights(engine, {name: parameters[name] for name in engine.space.shapes})

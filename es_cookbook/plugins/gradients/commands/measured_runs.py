"""Runs of a comparison, each a process of its own, and what their last weights are worth.

What a run measured is kept beside its directory, as `<run>.measured.json`, and what the base did as
`base.measured.json`, so that nothing is run twice.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import multiprocessing
import resource
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import anyio

from es_cookbook.cli.evaluate.measuring import Subject, opened
from es_cookbook.common.configs import config_from_json, config_to_json, trust_of
from es_cookbook.common.errors import WorkerError
from es_cookbook.common.files import LARGEST_TEXT, read_file
from es_cookbook.common.terminal import plural, say
from es_cookbook.engines.base import Engine, LogprobsRequest
from es_cookbook.plugins.gradients import policy_gradient
from es_cookbook.plugins.gradients.checkpoints import latest_checkpoint
from es_cookbook.plugins.gradients.commands.policy_gradient import run as run_program
from es_cookbook.plugins.gradients.grpo import config as grpo
from es_cookbook.plugins.gradients.grpo import main as run_grpo
from es_cookbook.plugins.regularisers.kl import KLToBase
from es_cookbook.population.evaluate import evaluate
from es_cookbook.rl.golds import check_attempted
from es_cookbook.rl.types import EnvGroupBuilder, Metrics
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.directory import CHECKPOINTS, HISTORY, keep_date, read_trained_on
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.program import run as run_config
from es_cookbook.runs.recorded import open_run

AnyConfig: TypeAlias = Config | policy_gradient.Config | grpo.Config
"""Of a run of evolution strategies, or of gradients."""
TEXT = "text/nats_per_token"
"""The metric of plain text."""
_PIECE = 512
"""Tokens of plain text that are read at once."""


@dataclasses.dataclass(frozen=True)
class Finals:
    """What the last weights of a run are measured on.

    Attributes:
        attempts: at each held-out problem, at temperature 1; of 0 nothing is measured.
        others: by name, runs of other tasks, whose held-out problems are attempted greedily.
        texts: plain text.
    """

    attempts: int = 0
    others: Mapping[str, Config] = dataclasses.field(default_factory=dict)
    texts: Sequence[str] = ()

    def described(self) -> dict[str, object]:
        """As JSON values that are equal where the same is measured."""
        others = {name: json.loads(config_to_json(each)) for name, each in self.others.items()}
        digests = [hashlib.sha256(text.encode()).hexdigest() for text in self.texts]
        return {"finals": self.attempts, "others": others, "texts": digests}


class Measured(NamedTuple):
    """What a run needed, and what its last weights are worth.

    Attributes:
        peak_bytes: most resident memory, less that of imported libraries; 0 if nobody saw.
        kept_bytes: of the files that hold the trained weights: the history, or the checkpoint.
        final: metrics of the last weights; none where only the training matters.
    """

    peak_bytes: int
    kept_bytes: int
    final: Metrics


def run_measured(config: AnyConfig, finals: Finals = Finals()) -> Measured:
    """Run to the end in a process of its own, unless that was done before.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
        KeyboardInterrupt: It was stopped.
    """
    path, log_path = Path(f"{config.log_path}.measured.json"), Path(config.log_path)
    config_json = config_to_json(config)
    asked = {"config": json.loads(config_json), **finals.described()}
    if (known := _known(path, asked)) is not None:
        return Measured(known["peak_bytes"], known["kept_bytes"], known["final"])
    # A complete run is not run again, so what it needed would not be seen.
    ran = _known(path, {"config": asked["config"]})
    peak = ran["peak_bytes"] if ran else _peak_of(config_json)
    if finals.attempts:  # Which takes long, and may be interrupted.
        _keep(path, {"config": asked["config"], "peak_bytes": peak})
    history, checkpoints = log_path / HISTORY, log_path / CHECKPOINTS
    files = [history] if history.exists() else [p for p in checkpoints.rglob("*") if p.is_file()]
    final = anyio.run(final_metrics, config, finals) if finals.attempts else {}
    measured = Measured(peak, sum(file.stat().st_size for file in files), final)
    _keep(path, {**asked, **measured._asdict()})
    return measured


def measured_base(config: AnyConfig, finals: Finals, path: Path) -> Metrics:
    """What the model that a run begins with is worth, unless that is in the file already."""
    asked = {"config": json.loads(config_to_json(config)), **finals.described()}
    if (known := _known(path, asked)) is None:
        known = {"final": anyio.run(partial(final_metrics, config, finals, at_the_base=True))}
        _keep(path, {**asked, **known})
    return known["final"]


def _known(path: Path, asked: Mapping[str, object]) -> Mapping[str, Any] | None:
    """What was kept, if it is of what is asked."""
    found = json.loads(read_file(path, LARGEST_TEXT, path.parent)) if path.exists() else {}
    return found if all(found.get(key) == value for key, value in asked.items()) else None


def _keep(path: Path, found: Mapping[str, object]) -> None:
    replace_file(path, [json.dumps(found, indent=1).encode()])


def _peak_of(config_json: str) -> int:
    """Run to the end in a process of its own, and say what `_run_here` does."""
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
    if isinstance(config, Config):
        run_config(config)
    elif isinstance(config, grpo.Config):
        run_program(run_grpo, config)
    else:
        run_program(policy_gradient.main, cast(policy_gradient.Config, config))
    return _most_resident() - before


def _most_resident() -> int:
    """Bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # Of this program; what `getrusage` says begins with its parent's there.
        (line,) = (each for each in status.read_text().split("\n") if each.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


async def final_metrics(config: AnyConfig, finals: Finals, at_the_base: bool = False) -> Metrics:
    """What a run's last weights are worth, or the model that it begins with."""
    async with _opened(config, at_the_base) as engine:
        test_P = (await config.dataset(engine.tokenizer)).test_P
        kl = KLToBase(
            weight=0.0,
            problems_per_generation=max(len(test_P), 1),
            max_tokens=config.sampling.max_tokens,
        )
        kl_P = kl(engine.tokenizer, engine.traits.context_length, 0)(0, test_P)
        found = await evaluate(config.sampler(engine), test_P, finals.attempts, 1.0, kl_P)
        for name, other in finals.others.items():
            other_P = (await other.dataset(engine.tokenizer)).test_P
            of = engine.tokenizer, engine.traits.context_length, other.sampling
            await check_attempted(other_P, *of)
            if not at_the_base:
                say_shared(Path(config.log_path), name, other_P)
            of_other = await evaluate(other.sampler(engine), other_P)
            found |= {f"{name}/{key}": value for key, value in of_other.items()}
        if finals.texts:
            found[TEXT] = await nats_per_token(engine, finals.texts)
        return found


async def nats_per_token(engine: Engine, texts: Sequence[str]) -> float:
    """How surprising plain text is to the centre: its mean -log π, over all tokens but first ones.

    A text is read in pieces of `_PIECE` tokens, or as many as the context has room for.
    """
    length = min(_PIECE, engine.traits.context_length)
    pieces = [
        tuple(tokens_T[start : start + length])
        for tokens_T in (engine.tokenizer.encode(text, add_special_tokens=False) for text in texts)
        for start in range(0, len(tokens_T), length)
    ]
    logprobs: list[float] = []

    async def read(piece_T: tuple[int, ...]) -> None:
        logprobs.extend(await engine.logprobs(LogprobsRequest("centre", piece_T[:1], piece_T[1:])))

    async with anyio.create_task_group() as tasks:
        for piece_T in pieces:
            if len(piece_T) > 1:
                tasks.start_soon(read, piece_T)
    return -math.fsum(logprobs) / len(logprobs) if logprobs else math.nan


def say_shared(log_path: Path, name: str, other_P: Sequence[EnvGroupBuilder]) -> None:
    """Say how many of another task's problems a run trains on, where it does."""
    known = read_trained_on(log_path)
    if shared := known and known.overlap(problem.digests for problem in other_P):
        of_other = plural(len(other_P), "problem")
        say(f"not held out: {log_path} trains on {shared} of {of_other} of {name}")


@contextlib.asynccontextmanager
async def _opened(config: AnyConfig, at_the_base: bool) -> AsyncGenerator[Engine]:
    """An engine whose base is the run's, and whose centre has its last weights."""
    run = None
    if isinstance(config, Config) and not at_the_base:
        run = open_run(Path(config.log_path), trust=trust_of(config_to_json(config)))
    name = "the base" if at_the_base else config.log_path
    subject = Subject(name, config.model_name, config.engine, config.space, run)
    async with opened(subject) as (engine, rebuilt):
        if rebuilt is not None:
            await rebuilt.go_to(len(rebuilt.run.records))
        elif not at_the_base:
            await _take_checkpoint(engine, Path(config.log_path))
        keep_date(Path(config.log_path), engine.tokenizer, writes=False)
        yield engine


async def _take_checkpoint(engine: Engine, log_path: Path) -> None:
    import torch

    from es_cookbook.checkpoints.models import load_causal_lm
    from es_cookbook.plugins.gradients.gradient_run import take_weights

    checkpoint = latest_checkpoint(log_path)
    assert checkpoint is not None, "a complete run has one"
    model = load_causal_lm(str(checkpoint.model), "float32", torch.device("cpu"))
    parameters: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    await take_weights(engine, {name: parameters[name] for name in engine.space.shapes})

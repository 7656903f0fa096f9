"""Evaluate a run with a task of inspect-ai: its centre, its base, or any genome.

    python -m es_cookbook inspect log_path=runs/mine task=my_task.py
    python -m es_cookbook inspect log_path=runs/mine task=my_task.py genome=base limit=20
    inspect view --log-dir logs

`my_task.py` has a function with inspect's `@task`; where it has several, `my_task.py@name` is one.
The model is called es/centre, es/base or es/genome/3 in the log, which inspect's viewer opens. The
run directory is only read.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio
import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import Names
from es_cookbook.common.errors import ConfigError, EnvError, not_installed
from es_cookbook.common.terminal import plural, say
from es_cookbook.engines.base import ENGINE_NAMES, EngineBuilder
from es_cookbook.rl.messages.chat import ChatOptions
from es_cookbook.rl.types import SamplingParams
from es_cookbook.train.recorded import RecordedRun, rebuild

if TYPE_CHECKING:
    from es_cookbook.bridges.inspect_models import Evaluated

_ENGINES = Names(ENGINE_NAMES, default=None)


@chz.chz
class InspectConfig:
    """Evaluate a run's centre, its base or a genome with a task of inspect-ai."""

    log_path: str = chz.field(doc="run directory")
    task: str = chz.field(doc="script with a task of inspect-ai: my_task.py or my_task.py@name")
    generation: int | None = chz.field(
        default=None, doc="the centre after so many generations, and the genomes around it"
    )
    genome: int | Literal["centre", "base"] = chz.field(
        default="centre", doc="who answers: centre, base, or the number of a genome"
    )
    limit: int | None = chz.field(default=None, doc="most samples of the task; None: all")
    epochs: int | None = chz.field(
        default=None, doc="answers to each sample; None: as the task says"
    )
    log_dir: str = chz.field(default="logs", doc="where inspect's log goes")
    engine: EngineBuilder | None = chz.field(
        meta_factory=_ENGINES, default=None, doc="where it runs; the run's own engine if None"
    )
    model_name: str | None = chz.field(
        default=None, doc="where the run's base model is now; where the run had it if None"
    )
    trust: tuple[str, ...] = chz.field(
        default=(), doc="packages beside es_cookbook whose code config.json may name"
    )
    temperature: float = chz.field(
        default=0.0, doc="0 is greedy; a task's own temperature holds before it"
    )
    max_tokens: int | None = chz.field(
        default=None, doc="most tokens of a turn; the run's own if None; a task's own holds before"
    )
    seed: int = chz.field(default=0, doc="of the sampling")
    chat: ChatOptions = chz.field(
        default_factory=ChatOptions, doc="how chats are rendered, and where tools are told"
    )

    @chz.validate
    def _ranges(self) -> None:
        for name in ("limit", "epochs", "max_tokens"):
            if getattr(self, name) is not None:
                check_range(self, name, at_least=1)


def main(config: InspectConfig) -> None:
    """Rebuild the run, evaluate it, and say what came of it."""
    script = Path(config.task.partition("@")[0])
    if not script.is_file():
        raise ConfigError(f"there is no script {script}; task= is one with a task of inspect-ai")
    run = RecordedRun(Path(config.log_path), config.model_name, config.trust)
    generation = run.meant(config.generation, config.genome)
    engine = config.engine or run.config.engine
    say(f"{config.log_path}: loading {run.model_name} on {engine.name}")
    for evaluated in anyio.run(_evaluated, config, run, engine, generation):
        if evaluated.error is not None:
            raise EnvError(f"{evaluated.task} failed: {evaluated.error}; see {evaluated.log}")
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in evaluated.metrics.items())
        print(
            f"{evaluated.task}, es/{_model(config)}, generation {generation}, "
            f"{plural(evaluated.samples, 'sample')}: {metrics or 'no scores'}"
        )
        print(f"look at it: inspect view --log-dir {config.log_dir}   (this log: {evaluated.log})")


def _model(config: InspectConfig) -> str:
    who = config.genome
    return f"genome/{who}" if isinstance(who, int) else who


async def _evaluated(
    config: InspectConfig, run: RecordedRun, engine: EngineBuilder, generation: int
) -> "list[Evaluated]":
    try:
        from es_cookbook.bridges.inspect_models import Source, run_task
    except ModuleNotFoundError as error:
        if error.name != "inspect_ai":
            raise
        raise not_installed("inspect", "inspect-ai", "es-cookbook[inspect]") from error

    rebuilt = await rebuild(run, engine)
    try:
        await rebuilt.go_to(generation)
        async with rebuilt.answering(config.genome) as answer:
            source = Source(
                answer,
                rebuilt.engine.tokenizer,
                rebuilt.engine.traits.context_length,
                _sampling(config, run),
                config.chat,
                config.seed,
            )
            return await run_task(
                config.task,
                _model(config),
                source,
                limit=config.limit,
                epochs=config.epochs,
                log_dir=config.log_dir,
                metadata={"log_path": config.log_path, "generation": generation},
            )
    finally:
        with anyio.CancelScope(shield=True):
            await rebuilt.close()


def _sampling(config: InspectConfig, run: RecordedRun) -> SamplingParams:
    sampling = chz.replace(run.config.sampling, temperature=config.temperature)
    if config.max_tokens is None:
        return sampling
    return chz.replace(sampling, max_tokens=config.max_tokens)


def cli() -> None:
    """The console entry point."""
    run_cli(main, InspectConfig)

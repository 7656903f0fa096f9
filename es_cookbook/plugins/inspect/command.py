"""Evaluate a run with a task of inspect-ai: its centre, its base, or any genome; or a model.

    python -m es_cookbook inspect runs/mine task=my_task.py
    python -m es_cookbook inspect runs/mine task=my_task.py genome=base limit=20
    python -m es_cookbook inspect model_name=Qwen/Qwen2.5-0.5B-Instruct task=inspect_evals/gsm8k
    inspect view --log-dir logs

`my_task.py` has a function with inspect's `@task`; where it has several, `my_task.py@name` is one.
`inspect_evals/gsm8k` is a task of an installed package. The model is called es/centre, es/base,
es/genome/3 or, without a run, es/<its name> in the log, which inspect's viewer opens. The run
directory is only read.
"""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import chz

from es_cookbook.cli.evaluate.measuring import Subject, opened, subject_of
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, EnvError, importing
from es_cookbook.common.terminal import plural, printable
from es_cookbook.engines.base import Host, SampleRequest, Target
from es_cookbook.plugins.inspect.config import InspectConfig
from es_cookbook.rl.types import Action, Observation, SamplingParams
from es_cookbook.runs.recorded import RecordedRun

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog


def main(config: InspectConfig) -> None:
    """Load the model, or rebuild the run, evaluate it, and print the scores."""
    script = Path(config.task.partition("@")[0])
    if script.suffix == ".py" and not script.is_file():
        raise ConfigError(f"there is no script {script}; task= is one with a task of inspect-ai")
    subject = subject_of(config, config.engine, config.genome)
    (generation,) = subject.generations
    of_run = "" if subject.run is None else f"generation {generation}, "
    for log in anyio.run(_logs, config, subject):
        task, results = log.eval.task, log.results
        if log.status != "success":
            reason = " ".join((log.error.message if log.error else log.status).split())
            raise EnvError(f"{task} failed: {printable(reason)[:300]}; see {log.location}")
        metrics = ", ".join(
            f"{score.name}/{name} {float(metric.value):.4g}"
            for score in (results.scores if results else ())
            for name, metric in score.metrics.items()
        )
        samples = plural(results.completed_samples if results else 0, "sample")
        print(f"{task}, es/{config.subject}, {of_run}{samples}: {metrics or 'no scores'}")
        print(f"look at it: inspect view --log-dir {config.log_dir}   (this log: {log.location})")


async def _logs(config: InspectConfig, subject: Subject) -> "list[EvalLog]":
    with importing("inspect", "es-cookbook[inspect]", "inspect_ai"):
        from es_cookbook.plugins.inspect.models import Source, run_task
    (generation,) = subject.generations
    metadata: dict[str, object] = {"model_name": subject.model_name}
    async with AsyncExitStack() as stack:
        engine, rebuilt = await stack.enter_async_context(opened(subject))
        host: Host = engine
        target: Target = "centre"
        if rebuilt is not None:
            metadata = {"log_path": config.log_path, "generation": generation}
            await rebuilt.go_to(generation)
            host, target = await stack.enter_async_context(rebuilt.answering(config.genome))

        async def answer(observation: Observation, params: SamplingParams, seed: int) -> Action:
            return await host.sample(SampleRequest(target, observation, params, seed))

        sampling = _sampling(config, subject.run)
        context_length = engine.traits.context_length
        return await run_task(
            config,
            Source(answer, engine.tokenizer, context_length, sampling, config.chat, config.seed),
            metadata,
        )


def _sampling(config: InspectConfig, run: RecordedRun | None) -> SamplingParams:
    sampling = run.config.sampling if run is not None else SamplingParams()
    sampling = chz.replace(sampling, temperature=config.temperature)
    if config.max_tokens is None:
        return sampling
    return chz.replace(sampling, max_tokens=config.max_tokens)


def cli() -> None:
    run_cli(main, InspectConfig)

"""Supervised fine-tuning, to be read first: rows, a loss on what the model should write, AdamW.

    python -m es_cookbook.baselines.sft model_name=model data=rows.jsonl output=sft
    es-cookbook sft recipe=countdown data=demonstrations.jsonl output=sft

The rows are JSON lines (or a Parquet file, or a Hub set) with the texts `prompt` and `completion`,
or with `messages` (`supervised`). The loss is the mean surprise, -log π(token | all before it), of
the tokens that the model should write, the end of sequence included. Nothing else is learned.

`rank=8` trains a LoRA adapter, by PEFT, and writes that; `rank=0` trains all weights and writes a
model directory. An adapter is a start for other runs:

    ... search_space=singular_values search_space.start=sft optimizer=cma
    ... search_space=adapter search_space.start=sft

While it goes on, `<output>.training/` has the numbers and the last checkpoint. The same command
goes on from there after an interruption, and ends with the same weights. With an evaluation, which
`es-cookbook sft recipe=...` brings, the model is measured on held-out problems before, after, and
every so many steps, as runs of evolution strategies are.

Left out: several devices, training in lower precision than float32, and gradient checkpointing.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import chz

from es_cookbook.baselines.supervised import SupervisedDatasetBuilder
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import Names
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.schedules import SCHEDULE_NAMES, Linear, Schedule
from es_cookbook.engines.base import EngineBuilder
from es_cookbook.population.config import ENGINES
from es_cookbook.population.evaluate import check_evaluation
from es_cookbook.rl.data.problem_dataset import EpochOrder
from es_cookbook.rl.sequences import Example
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams

if TYPE_CHECKING:
    import torch

    from es_cookbook.baselines.learner import Learner

_ROWS = Names({"rows": "es_cookbook.baselines.supervised:SupervisedRows"}, default="rows")
_PROBLEMS = Names({"rows": "es_cookbook.rl.data.task:Task"}, default=None)


SHORT = {"data": "dataset.source"}
"""What may be typed -> the option that it is."""


@chz.chz
class Evaluation:
    """Problems on which the model is measured while it learns."""

    dataset: RLDatasetBuilder = chz.field(
        meta_factory=_PROBLEMS, doc="of which the held-out problems are attempted"
    )
    sampling: SamplingParams = chz.field(default_factory=SamplingParams, doc="how tokens are drawn")
    engine: EngineBuilder = chz.field(
        meta_factory=ENGINES, default_factory=ENGINES.build_default, doc="what samples"
    )
    every: int = chz.field(default=0, doc="steps between; 0: before and after only")
    attempts: int = chz.field(default=1, doc="at each problem; several also measure test/pass@k")
    temperature: float = chz.field(default=0.0, doc="of the attempts; 0 is greedy")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "every", at_least=0, prefix="evaluation.")
        check_evaluation(self.attempts, self.temperature, "evaluation.")


@chz.chz
class SFTConfig:
    """Fine-tune a LoRA adapter, or all weights, on rows that say what the model should write."""

    model_name: str = chz.field(doc="Hugging Face model directory or Hub name")
    dataset: SupervisedDatasetBuilder = chz.field(meta_factory=_ROWS, doc="rows to learn from")
    output: str = chz.field(doc="directory to write the adapter or model to; it must not exist")
    rank: int = chz.field(default=8, doc="of the LoRA adapter; 0 trains all weights instead")
    alpha: int = chz.field(default=16, doc="the adapter is scaled by alpha / rank")
    targets: tuple[str, ...] = chz.field(
        default=("q_proj", "k_proj", "v_proj", "o_proj"), doc="last names of the adapted layers"
    )
    learning_rate: float = chz.field(default=2e-4, doc="of AdamW")
    learning_rate_schedule: Schedule = chz.field(
        default=Linear(),
        meta_factory=Names(SCHEDULE_NAMES, default="linear"),
        doc="factor on learning_rate over the steps",
    )
    max_gradient_norm: float = chz.field(default=1.0, doc="longer gradients are cut to this length")
    batch_size: int = chz.field(default=32, doc="rows per step")
    epochs: float = chz.field(default=1.0, doc="passes over the rows")
    max_length: int = chz.field(default=1024, doc="tokens of a row; longer rows are truncated")
    packing: bool = chz.field(
        default=False, doc="several rows in one sequence of max_length, where none sees another"
    )
    tokens_per_pass: int = chz.field(
        default=16_384, doc="most tokens, padding included, of one backward pass; bounds memory"
    )
    log_every: int = chz.field(default=10, doc="steps between lines of metrics")
    checkpoint_every: int = chz.field(default=100, doc="steps between checkpoints; 0: none")
    evaluation: Evaluation | None = chz.field(
        default=None, doc="problems on which the model is measured: evaluation.dataset=..."
    )
    seed: int = chz.field(default=0, doc="of the adapter's first factors and the order of the rows")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "alpha", "batch_size", "tokens_per_pass", "log_every", at_least=1)
        check_range(self, "max_length", at_least=2)
        check_range(self, "rank", "checkpoint_every", at_least=0)
        check_range(self, "learning_rate", "epochs", "max_gradient_norm", above=0)
        if self.rank and not self.targets:
            raise ConfigError("targets must name a layer, for example targets=q_proj,v_proj")


def main(config: SFTConfig) -> None:
    """Train, and write the adapter or the model.

    Raises:
        ConfigError: The output is there already, PEFT is missing, or the model has no such layers.
        DataError: There are no rows, or one cannot be used.
        ModelError: The model cannot be read.
    """
    if Path(config.output).exists():
        raise ConfigError(f"output {config.output!r} is there already; give another one")
    config.dataset.check()
    from es_cookbook.baselines.sft_run import opened  # with torch

    with opened(config) as run:
        order = EpochOrder(len(run.data.train), config.seed)
        for step in range(run.start, run.num_steps):
            examples = [run.data.train[i] for i in order.batch(step, config.batch_size)]
            rate = config.learning_rate * config.learning_rate_schedule(step, run.num_steps)
            run.begin(step)
            loss, norm = learn(run.learner, examples, rate)
            run.record(step, {"loss/train": loss, "sft/gradient_norm": norm})
        run.finish()
    print(f"written to {config.output}")


def learn(
    learner: "Learner", examples: Sequence[Example], learning_rate: float
) -> tuple[float, float]:
    """One step down the mean surprise; returns that, and the gradient's length before it was cut.

    The small models that recipes begin with are trained by it too (`small_model.fit`).
    """
    share = 1 / max(sum(sum(example.learned_T[1:]) for example in examples), 1)
    gain, norm = learner.step(examples, likelihood, learning_rate, share)
    return -gain, norm


def likelihood(
    logprobs: "torch.Tensor", sampled: "torch.Tensor", weights: "torch.Tensor"
) -> "torch.Tensor":
    """What is maximised: the log-probability of every token that has a loss."""
    del sampled
    return weights * logprobs


def whole_names(arguments: list[str]) -> list[str]:
    """Options with their whole names in place of short ones.

    >>> whole_names(["data=rows.jsonl", "rank=4"])
    ['dataset.source=rows.jsonl', 'rank=4']
    """
    pairs = [argument.partition("=") for argument in arguments]
    return [f"{SHORT.get(name, name)}{equals}{value}" for name, equals, value in pairs]


def cli() -> None:
    """The console entry point."""
    run_cli(main, SFTConfig, whole_names(sys.argv[1:]), "\n\nShort: data (dataset.source).")


if __name__ == "__main__":
    cli()

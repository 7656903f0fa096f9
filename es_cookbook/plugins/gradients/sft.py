"""Supervised fine-tuning, to be read first: rows, a loss on what the model should write, AdamW.

    python -m es_cookbook.plugins.gradients.sft model_name=model data=rows.jsonl output=sft
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

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.gradients.supervised import SFTConfig
from es_cookbook.rl.data.problem_dataset import in_epochs
from es_cookbook.rl.rollouts import Example

if TYPE_CHECKING:
    import torch

    from es_cookbook.plugins.gradients.learner import Learner


def main(config: SFTConfig) -> None:
    """Train, and write the adapter or the model.

    Raises:
        ConfigError: The output is there already, PEFT is missing, or the model has no such layers.
        DataError: There are no rows, or one cannot be used.
        ModelError: The model cannot be read.
    """
    if Path(config.output).exists():
        raise ConfigError(f"output {config.output!r} is there already; give another one")
    measured = None if config.evaluation is None else config.evaluation.dataset
    for builder in (config.trackers, config.dataset, measured):
        if builder is not None:
            builder.check()
    from es_cookbook.plugins.gradients.sft_run import opened  # with torch

    with opened(config) as run:
        size, count = len(run.train), config.batch_size
        for step in range(run.start, run.num_steps):
            examples = [run.train[i] for i in in_epochs(size, config.seed, step * count, count)]
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


def cli() -> None:
    run_cli(main, SFTConfig, more_help="\n\nShort: data (dataset.source).")


if __name__ == "__main__":
    cli()

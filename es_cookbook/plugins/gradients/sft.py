"""Supervised fine-tuning: rows, a loss on what the model should write, AdamW. Read this first.

    python -m es_cookbook.plugins.gradients.sft model_name=model data=rows.jsonl output=sft
    es-cookbook sft recipe=countdown data=demonstrations.jsonl output=sft

The rows are JSON lines (or a Parquet file, or a Hub set) with the texts `prompt` and `completion`,
or with `messages` (`supervised`). The loss is the mean of -log π(token | all before it) over the
tokens that the model should write, including the end of sequence.

`rank=8` trains a LoRA adapter with PEFT and writes that; `rank=0` trains all weights and writes a
model directory. An adapter is a start for other runs:

    ... search_space=singular_values search_space.start=sft optimizer=cma
    ... search_space=adapter search_space.start=sft

The output directory is written when training ends, atomically, with `metrics.jsonl` beside the
weights. `es-cookbook evaluate recipe=... model_name=sft` measures a model on problems, and
`model_name=BASE search_space=adapter search_space.start=sft` an adapter.

Left out: resuming, several devices, and training in lower precision than float32.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import chz

from es_cookbook.cli.options import new_output, recipe_defaults
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, DataError, nearest, not_installed
from es_cookbook.common.files import whole_directory
from es_cookbook.common.names import Names
from es_cookbook.common.terminal import say
from es_cookbook.evolution.schedules import Schedule, schedule_field
from es_cookbook.plugins.gradients.supervised import Split, SupervisedRows
from es_cookbook.rl.data.problem_dataset import in_epochs
from es_cookbook.rl.rollouts import Example
from es_cookbook.rl.types import Metrics

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from es_cookbook.plugins.gradients.learner import Learner

_ROWS = Names({"rows": "es_cookbook.plugins.gradients.supervised:SupervisedRows"}, default="rows")


@chz.chz
class SFTConfig:
    """Fine-tune a LoRA adapter, or all weights, on rows that say what the model should write."""

    model_name: str = chz.field(doc="model directory, GGUF file, Hub name or run (RUN@GENERATION)")
    dataset: SupervisedRows = chz.field(meta_factory=_ROWS, doc="rows to learn from")
    output: str = chz.field(doc="directory to write the adapter or model to; it must not exist")
    rank: int = chz.field(default=8, doc="rank of the LoRA adapter; 0 trains all weights instead")
    alpha: int = chz.field(default=16, doc="the adapter is scaled by alpha / rank")
    targets: tuple[str, ...] = chz.field(
        default=("q_proj", "k_proj", "v_proj", "o_proj"), doc="last names of the adapted layers"
    )
    learning_rate: float = chz.field(default=2e-4, doc="learning rate of AdamW")
    learning_rate_schedule: Schedule = schedule_field("factor on learning_rate", default="linear")
    max_gradient_norm: float = chz.field(default=1.0, doc="gradients are clipped to this norm")
    batch_size: int = chz.field(default=32, doc="rows per step")
    epochs: float = chz.field(default=1.0, doc="passes over the rows")
    max_length: int = chz.field(
        default=1024, doc="tokens of a row, at most the model's context; longer rows are truncated"
    )
    tokens_per_pass: int | None = chz.field(
        default=None, doc="maximum tokens of a backward pass, padded; from the memory if unset"
    )
    log_every: int = chz.field(default=10, doc="steps between lines of metrics")
    seed: int = chz.field(default=0, doc="seed of the adapter's factors and of the rows' order")

    @classmethod
    def whole_options(cls, given: Mapping[str, str]) -> dict[str, str]:
        """Return options with full names, and the model of a recipe."""
        whole = {"dataset.source" if path == "data" else path: v for path, v in given.items()}
        if (recipe := whole.pop("recipe", None)) is not None:
            whole = {"model_name": recipe_defaults(recipe).model_name, **whole}
        return whole

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "alpha", "batch_size", "tokens_per_pass", "log_every", at_least=1)
        check_range(self, "max_length", at_least=2)
        check_range(self, "rank", at_least=0, at_most=2**16)
        check_range(self, "learning_rate", "epochs", "max_gradient_norm", above=0)
        if self.rank and not self.targets:
            raise ConfigError("targets must name a layer, for example targets=q_proj,v_proj")


def main(config: SFTConfig) -> None:
    """Train, and write the adapter or the model.

    Raises:
        ConfigError: The output exists, PEFT is missing, or the model lacks these layers.
        DataError: There are no rows, or one cannot be used.
        ModelError: The model cannot be read.
    """
    output = new_output(config.output)
    config.dataset.check()
    from es_cookbook.checkpoints.models import load_tokenizer, no_progress_bar
    from es_cookbook.plugins.gradients.learner import Learner

    length = _length(config)
    say(f"loading {config.model_name}")
    tokenizer = load_tokenizer(config.model_name)
    train, test = _shortened(config.dataset(tokenizer), length)
    model = _model(config)
    learner = Learner(
        model,
        [name for name, weight in model.named_parameters() if weight.requires_grad],
        tokens_per_pass=config.tokens_per_pass,
        max_gradient_norm=config.max_gradient_norm,
    )
    num_steps = max(1, math.ceil(config.epochs * len(train) / config.batch_size))
    lines: list[str] = []

    def log(step: int, metrics: Metrics) -> None:
        lines.append(json.dumps({"progress/generation": step, **metrics}))
        shown = "  ".join(f"{key} {value:.4g}" for key, value in metrics.items())
        print(f"step {step}/{num_steps}  {shown}", flush=True)

    if test:
        log(0, {"loss/test": surprise(learner, test)})
    for step in range(num_steps):
        count = config.batch_size
        rows = in_epochs(len(train), config.seed, step * count, count)
        rate = config.learning_rate * config.learning_rate_schedule(step, num_steps)
        loss, norm = learn(learner, [train[i] for i in rows], rate)
        if step % config.log_every == 0:
            log(step, {"loss/train": loss, "sft/gradient_norm": norm})
    if test:
        log(num_steps, {"loss/test": surprise(learner, test)})
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_directory(output) as directory, no_progress_bar():
        model.save_pretrained(directory)
        if not config.rank:
            tokenizer.save_pretrained(directory)
        (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    print(f"written to {output}")


def learn(
    learner: "Learner", examples: Sequence[Example], learning_rate: float
) -> tuple[float, float]:
    """Take one descent step; return the mean loss, and the gradient norm before clipping.

    The bundled small models are trained by it too (`small_model.fit`).
    """
    share = 1 / max(sum(sum(example.learned_T[1:]) for example in examples), 1)
    gain, norm = learner.step(examples, likelihood, learning_rate, share)
    return -gain, norm


def surprise(learner: "Learner", examples: Sequence[Example]) -> float:
    """Return the mean loss of rows, without a step."""
    losses = [-each for of in learner.logprobs(examples) for each in of]
    return math.fsum(losses) / max(len(losses), 1)


def likelihood(
    logprobs: "torch.Tensor", sampled: "torch.Tensor", weights: "torch.Tensor"
) -> "torch.Tensor":
    """Return the objective: the log-probability of every token that has a loss."""
    return weights * logprobs


def _shortened(data: Split, max_length: int) -> Split:
    """Truncate rows to the length; leave out those with nothing left to learn."""

    def short(examples: Sequence[Example]) -> list[Example]:
        cut = (
            dataclasses.replace(
                each, tokens_T=each.tokens_T[:max_length], learned_T=each.learned_T[:max_length]
            )
            for each in examples
        )
        return [each for each in cut if any(each.learned_T[1:])]

    train, test = map(short, data)
    if not train:
        raise DataError(
            f"max_length={max_length} leaves nothing to learn in any row: all prompts are as long"
        )
    if lost := len(data[0]) - len(train):
        say(f"{lost} rows are left out: their prompts alone have max_length={max_length} tokens")
    return train, test


def _length(config: SFTConfig) -> int:
    """Return the length of rows, at most the model's context.

    Raises:
        ConfigError: Targets that are no linear layers of the model, or PEFT is missing.
    """
    from es_cookbook.checkpoints.linear_weights import linear_weights
    from es_cookbook.checkpoints.models import load_architecture
    from es_cookbook.plugins.gradients.learner import most_tokens

    architecture = load_architecture(config.model_name)
    length = min(config.max_length, most_tokens(architecture))
    if not config.rank:
        return length
    weights = linear_weights(architecture)
    names = {name.removesuffix(".weight").rpartition(".")[2] for name in weights}
    for target in config.targets:
        if target not in names:
            hint = nearest(target, names)
            raise ConfigError(
                f"targets: {config.model_name} has no linear layer {target!r}: {hint}"
            )
    if find_spec("peft") is None:
        raise not_installed("rank (LoRA)", "peft", "es-cookbook[baselines]")
    return length


def _model(config: SFTConfig) -> "PreTrainedModel":
    """Load the model, with an adapter if any; trained weights require gradients."""
    import torch

    from es_cookbook.checkpoints.models import load_causal_lm

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_causal_lm(config.model_name, "float32", device)
    if not config.rank:
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.targets),
    )
    with torch.random.fork_rng():  # PEFT draws from torch's global generator.
        torch.manual_seed(config.seed)
        adapted = get_peft_model(model, lora)
    return cast("PreTrainedModel", adapted.eval())


def cli() -> None:
    more_help = "\n\nShort: data (dataset.source). recipe=NAME takes the model of a recipe."
    run_cli(main, SFTConfig, more_help=more_help)


if __name__ == "__main__":
    cli()

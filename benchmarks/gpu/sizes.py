"""Sizes of the measurements, and what the parts share."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness import Row, interleaved
from benchmarks.sampling import save_random
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL

Emit: TypeAlias = Callable[[Row], None]
"""Takes a row as soon as it is measured; one of the same name takes the place of an earlier one."""
SIGMA = 0.005
"""Of the genomes, in all parts with engines."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model of random weights in the shape of a published one, and a generation on it.

    Attributes:
        model: a Qwen2's sizes.
        include: patterns of the parameters that genomes perturb, so that the centre fits.
    """

    model: Mapping[str, int]
    genomes: int
    problems: int
    prompt: int
    tokens: int
    kv_gib: float
    include: tuple[str, ...] = ("*",)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement.

    Attributes:
        side: of a square weight.
        terms: most terms of a step.
        model: a Qwen2's sizes, for parts that sample.
        one_by_one: genomes that are measured one after the other, to save time.
        read: tokens of prompts that are only read.
        share: of a GPU's memory, for each of the engines that stand side by side.
        shapes: models of billions, by name.
    """

    device: Literal["cuda", "cpu"]
    dtype: Literal["bfloat16", "float32"]
    side: int
    calls: int
    warmups: int
    repeats: int
    terms: int
    model: Mapping[str, int]
    genomes: int
    one_by_one: int
    problems: int
    prompt: int
    tokens: int
    read: int
    kv_gib: float
    share: float
    shapes: Mapping[str, Shape]

    @property
    def dry(self) -> bool:
        """Whether this is a rehearsal without a GPU, whose numbers mean nothing."""
        return self.device == "cpu"


def _qwen2(hidden: int, between: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": between,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


FULL = Sizes(
    device="cuda",
    dtype="bfloat16",
    side=8192,
    calls=10,
    warmups=1,  # It compiles.
    repeats=3,
    terms=256,
    model=_qwen2(896, 4864, 24, 14, 2),  # Qwen2.5-0.5B
    genomes=64,
    one_by_one=2,
    problems=16,
    prompt=64,
    tokens=32,
    read=256,
    kv_gib=2.0,
    share=0.18,
    shapes={
        "7b": Shape(_qwen2(3584, 18944, 28, 28, 4), 64, 8, 32, 64, 4.0),
        # In float32 the centre of all layers would take 124 GB beside 65 GB of weights.
        "32b": Shape(
            *(_qwen2(5120, 27648, 64, 40, 8), 32, 8, 32, 64, 7.0),
            include=("*layers.?.*", "*layers.1?.*"),
        ),
    },
)
_TINY = _qwen2(64, 24, 1, 2, 1)  # vLLM's attention on the CPU needs heads of 32
DRY = Sizes(
    device="cpu",
    dtype="float32",
    side=5,
    calls=1,
    warmups=0,
    repeats=1,
    terms=3,
    model=_TINY,
    genomes=2,
    one_by_one=1,
    problems=1,
    prompt=3,
    tokens=2,
    read=8,
    kv_gib=0.1,
    share=0.2,
    shapes={
        "7b": Shape(_TINY, 2, 1, 3, 2, 0.1),
        "32b": Shape({**_TINY, "num_hidden_layers": 2}, 2, 1, 3, 2, 0.1, include=("*layers.0.*",)),
    },
)


def architecture(
    model: Mapping[str, int], dtype: str, vocabulary: int, *, tied: bool
) -> Qwen2Config:
    """Return a Qwen2's configuration, whose answers no token ends."""
    sides: dict[str, Any] = dict(model)
    return Qwen2Config(
        **sides,
        dtype=dtype,
        vocab_size=vocabulary,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        architectures=["Qwen2ForCausalLM"],
    )


def write_model(directory: Path, sizes: Sizes) -> Path:
    """Write a model of random weights with the bundled model's tokenizer."""
    vocabulary = len(AutoTokenizer.from_pretrained(BUNDLED_MODEL))
    # Tied: vLLM has no LoRA slot for a separate head, which genomes would perturb.
    shape = architecture(sizes.model, sizes.dtype, vocabulary, tied=True)
    return save_random(directory, Qwen2ForCausalLM, shape, getattr(torch, sizes.dtype))


def wait(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(functions: Mapping[str, Callable[[], object]], sizes: Sizes) -> dict[str, list[float]]:
    """Return seconds of each until the device is done, by turns."""

    def until_done(function: Callable[[], object]) -> None:
        function()
        wait(torch.device(sizes.device))

    return interleaved(
        {name: functools.partial(until_done, function) for name, function in functions.items()},
        repeats=sizes.repeats,
        warmups=sizes.warmups,
    )

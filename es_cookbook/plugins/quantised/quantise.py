"""Write a model with quantised weights, in 4 or 8 bits: a base for the quantised search spaces.

    python -m es_cookbook quantise model_name=Qwen/Qwen2.5-0.5B-Instruct output=quantised
    python -m es_cookbook train model_name=quantised search_space=quant_scales ...

Floats of 8 bits (FP8) are a base for adapters:

    python -m es_cookbook quantise ... number=float bits=8 group_size=None output=fp8
    python -m es_cookbook train model_name=fp8 search_space=adapter ...

`es_cookbook.plugins.quantised.compression` says how it rounds; vLLM and transformers read it too.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import chz

from es_cookbook.cli.options import new_output
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import plural, say, show_bytes

FP8 = (8, None, True)
"""Bits, group size, and that there are no zero points."""


@chz.chz
class QuantiseConfig:
    """Write a model with quantised linear weights, as a compressed-tensors checkpoint."""

    model_name: str = chz.field(doc="model directory, GGUF file, Hub name or run (RUN@GENERATION)")
    output: str = chz.field(doc="directory to create; must not exist")
    bits: Literal[4, 8] = chz.field(default=4, doc="bits per weight")
    number: Literal["int", "float"] = chz.field(
        default="int", doc="float: FP8 (e4m3), which needs bits=8 group_size=None"
    )
    group_size: int | None = chz.field(
        default=32, doc="number of inputs that share a scale; None: one scale per output"
    )
    symmetric: bool = chz.field(default=True, doc="False adds zero points")
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = chz.field(
        default="auto",
        doc="dtype of scales and of unquantised weights; auto: the model's, but bfloat16 instead "
        "of float32, which vLLM's kernels do not support",
    )
    ignore: tuple[str, ...] = chz.field(
        default=(),
        doc="layers not to quantise, by name or shell pattern; for vLLM treat q, k and v alike, "
        "and gate and up",
    )

    @chz.validate
    def _valid(self) -> None:
        check_range(self, "group_size", at_least=2)
        if self.number == "float" and (self.bits, self.group_size, self.symmetric) != FP8:
            raise ConfigError(
                "number=float is FP8, with one scale per output and no zero points: it needs "
                "bits=8 group_size=None symmetric=True"
            )


def main(config: QuantiseConfig) -> None:
    """Write the copy, and say what it is.

    Raises:
        ConfigError: The output is there already, a package is missing, or nothing can be quantised.
        ModelError: The model cannot be read, or is quantised already.
    """
    output = new_output(config.output)
    floats = "floats of " if config.number == "float" else ""
    say(f"rounding {config.model_name} to {floats}{config.bits} bits")
    # torch, which the options do without.
    from es_cookbook.plugins.quantised.compression import write_rounded

    output.parent.mkdir(parents=True, exist_ok=True)
    copy = write_rounded(
        config.model_name,
        output,
        bits=config.bits,
        number=config.number,
        group_size=config.group_size,
        symmetric=config.symmetric,
        dtype=config.dtype,
        ignore=config.ignore,
    )
    for line in _left(copy.left):
        print(line)
    before, after = map(show_bytes, copy.num_bytes)
    print(f"{plural(len(copy.rounded), 'layer')} quantised, {before} -> {after}: {output}")


def _left(left: Mapping[str, str]) -> Iterator[str]:
    """A line a reason, with the layers that it keeps as they are."""
    for reason in dict.fromkeys(left.values()):
        names = [name for name, why in left.items() if why == reason]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"not quantised ({reason}): {', '.join(names[:3])}{more}"


def cli() -> None:
    run_cli(main, QuantiseConfig)


if __name__ == "__main__":
    cli()

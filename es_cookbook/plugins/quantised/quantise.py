"""Write a model with quantised weights, in 4 or 8 bits: a base for the quantised search spaces.

    python -m es_cookbook quantise model_name=Qwen/Qwen2.5-0.5B-Instruct output=quantised
    python -m es_cookbook train model_name=quantised search_space=quant_scales ...

`es_cookbook.plugins.quantised.compression` says how it rounds; vLLM and transformers read it too.
"""

from typing import Literal

import chz

from es_cookbook.cli.options import new_output
from es_cookbook.common.checks import in_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import plural, say, show_bytes


@chz.chz
class QuantiseConfig:
    """Write a model with quantised linear weights, as a compressed-tensors checkpoint."""

    model_name: str = chz.field(doc="model directory, GGUF file, Hub name or run (RUN@GENERATION)")
    output: str = chz.field(doc="directory to create; must not exist")
    bits: Literal[4, 8] = chz.field(default=4, doc="bits per weight")
    group_size: int | None = chz.field(
        default=32, doc="number of inputs that share a scale; None: one scale per output"
    )
    symmetric: bool = chz.field(default=True, doc="False adds zero points")

    _group_size = in_range("group_size", at_least=2)


def main(config: QuantiseConfig) -> None:
    """Write the copy, and print what was rounded.

    Raises:
        ConfigError: The output exists, a package is missing, or nothing can be quantised.
        ModelError: The model cannot be read, or is quantised already.
    """
    output = new_output(config.output)
    say(f"rounding {config.model_name} to {config.bits} bits")
    # torch, which the options do without.
    from es_cookbook.plugins.quantised.compression import write_rounded

    output.parent.mkdir(parents=True, exist_ok=True)
    settings = config.bits, config.group_size, config.symmetric
    copy = write_rounded(config.model_name, output, *settings)
    for reason in dict.fromkeys(copy.left.values()):
        names = [name for name, why in copy.left.items() if why == reason]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        print(f"not quantised ({reason}): {', '.join(names[:3])}{more}")
    before, after = map(show_bytes, copy.num_bytes)
    print(f"{plural(len(copy.rounded), 'layer')} quantised, {before} -> {after}: {output}")


def cli() -> None:
    run_cli(main, QuantiseConfig)

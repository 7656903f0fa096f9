"""Everything that only a GPU can show, in four minutes.

    python -m benchmarks.gpu
    python -m benchmarks.gpu parts=vllm,vllm_7b
    python -m benchmarks.gpu parts=vllm_32b seconds=400
    python -m benchmarks.gpu dry=true

The parts, the most telling first, each in a separate process with a time of its own; what one has
left goes to the next. A part that fails or takes longer is ended, its rows so far are kept, and the
reason is printed and written beside them. Rows are written as they come.

- noise, slots, step: kernels against copying memory, and steps of a centre against the CPU, with
  the CPU's bits and fingerprint (`kernels`);
- torch: generations of the torch engine: a population against the centre alone, one genome after
  the other, and the products of its weights alone (`torch_engine`);
- vllm: the same population in LoRA slots against plain vLLM, one by one with full weights, and
  without CUDA graphs; answers and scores against the torch engine's; what a genome answers after
  others had its slot; how fast prompts are read and scored (`vllm_engine`);
- vllm_7b, torch_7b, vllm_32b: random weights in the shapes of Qwen2.5-7B and 32B: speed, a step,
  memory against `plan`, bytes sent (`shapes`);
- vllm_invariant: whether answers depend on the batch with `VLLM_BATCH_INVARIANT=1`.

The first six have 240 s together; the others take what is left, or are named. `parts=vllm` has an
engine without a large vocabulary, of random weights in the shape of Qwen2.5-0.5B. With `dry=true`
all of it runs at tiny sizes where no GPU is: kernels in Triton's interpreter, engines on the CPU,
vLLM where it is installed. The numbers then mean nothing, and are only written where `results`
says.
"""

import contextlib
import importlib.util
import signal
import sys
import tempfile
import time
from pathlib import Path

import chz
import pytest
import torch

from benchmarks import harness
from benchmarks.gpu.parts import PARTS, OwnProcess
from benchmarks.gpu.sizes import DRY, FULL, write_model
from benchmarks.harness import Row, table
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, nearest

_SLOWER = 10
"""Times as long as on a GPU that parts may take in a dry run."""


@chz.chz
class Config:
    """What only a GPU can show: kernels, steps, engines, and models of billions."""

    parts: tuple[str, ...] = chz.field(default=tuple(PARTS), doc="which, in this order")
    seconds: float = chz.field(default=240, doc="for all parts together; in a dry run 10 x as many")
    dry: bool = chz.field(
        default=False, doc="tiny sizes on the CPU and in Triton's interpreter; numbers mean nothing"
    )
    results: str | None = chz.field(
        default=None, doc="directory of the JSON; benchmarks/results if unset, in a dry run none"
    )


def main(config: Config) -> None:
    """Run the parts and write what they measured."""
    for name in config.parts:
        if name not in PARTS:
            raise ConfigError(f"unknown part {name!r}: {nearest(name, PARTS)}")
    if not config.dry and not torch.cuda.is_available():
        raise ConfigError(
            "benchmarks.gpu measures on an NVIDIA GPU, and this machine has none that torch can "
            "use; dry=true runs every part at tiny sizes without one"
        )
    if config.results is not None:
        harness.RESULTS = Path(config.results)
    rows, left_out = measured(config, is_written=not config.dry or config.results is not None)
    print(table(rows))
    if left_out:
        sys.exit("\n".join(f"{name}: {why}" for name, why in left_out.items()))


def measured(config: Config, *, is_written: bool) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of all parts, and why some of a part may be missing."""
    began, slower = time.monotonic(), _SLOWER if config.dry else 1
    sizes, rows, left_out = DRY if config.dry else FULL, dict[str, Row](), dict[str, str]()
    default = config.parts == tuple(PARTS)
    command = "python -m benchmarks.gpu" + ("" if default else f" parts={','.join(config.parts)}")
    names = list(config.parts)
    if importlib.util.find_spec("vllm") is None:
        left_out = {name: "vLLM is not installed" for name in names if PARTS[name].on_vllm}
        names = [name for name in names if name not in left_out]
    allowed = 0.0
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("HF_HUB_OFFLINE", "1")
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        model = write_model(Path(directory) / "model", sizes)

        def started(name: str) -> OwnProcess:
            process = OwnProcess(PARTS[name], sizes, model)
            stack.callback(process.end)
            return process

        ahead = [started(name) for name in names[:1]]
        for i, name in enumerate(names):
            # The next one imports torch while this one measures.
            ahead += [started(following) for following in names[i + 1 : i + 2]]
            allowed += slower * PARTS[name].seconds
            so_far = time.monotonic() - began
            limit = min(allowed, slower * config.seconds) - so_far
            if limit <= 0:
                left_out[name] = f"not begun after {so_far:.0f} s; take parts={name}"
                continue
            for row in ahead[i].rows(limit):
                rows[row.name] = row
                if is_written:
                    harness.write("gpu", command, list(rows.values()), left_out)
            if (reason := ahead[i].reason) is not None:
                left_out[name] = reason
            print(f"{name}: {time.monotonic() - began - so_far:.0f} s", file=sys.stderr)
    if is_written and rows:
        harness.write("gpu", command, list(rows.values()), left_out)
    return list(rows.values()), left_out


if __name__ == "__main__":
    # What ends this process, such as a machine that is taken back, ends those of the parts as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_cli(main, Config)

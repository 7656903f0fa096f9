"""What the peak memory of a run of the recipe `chat` consists of, and when it is reached.

    OMP_NUM_THREADS=2 python -m benchmarks.memory            # products as they are on this machine
    OMP_NUM_THREADS=2 python -m benchmarks.memory float32
    OMP_NUM_THREADS=2 python -m benchmarks.memory auto sampling

Two generations of the recipe's settings, 64 genomes that read gold answers, and two evaluations on
200 questions, on SmolLM2-135M-Instruct (`make chat-model`), in a separate process; `sampling`: 32
genomes answer 16 questions themselves. Its resident memory is watched from inside, 100 times a
second. Sizes of weights and tables are computed; all other rows are what the process has at a
moment, or at most in a phase. Linux only.
"""

import importlib
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

from transformers import PreTrainedModel

from benchmarks.harness import CHAT_MODEL, Row, report, row
from es_cookbook.cli.options import recipe_defaults
from es_cookbook.common.options import built
from es_cookbook.engines.torch import host
from es_cookbook.engines.torch.kernels.modules import Path as RowPath
from es_cookbook.engines.torch.resident_weights import ResidentWeights
from es_cookbook.evolution.spaces.base import SearchSpace
from es_cookbook.rl.types import Metrics
from es_cookbook.runs import setup
from es_cookbook.runs.program import run

_P = ParamSpec("_P")
_T = TypeVar("_T")
_GIB = 2.0**20
"""KiB of one."""
_SAMPLING = {
    "surrogate": "None",
    "optimizer.population_size": "32",
    "dataset.problems_per_generation": "16",
}


class _Watch:
    """Resident memory of this process: at moments, and at most in each phase; GiB."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}
        self.most: dict[str, float] = {}
        self.phase = "loading"
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self, moment: str, next_phase: str) -> None:
        """Note what there is at a moment, after which another phase begins."""
        self.at.setdefault(moment, _resident())
        self.phase = next_phase

    def around(
        self, function: Callable[_P, _T], before: tuple[str, str], after: tuple[str, str]
    ) -> Callable[_P, _T]:
        """Return the function with `now` called before and after it."""

        def watched(*given: _P.args, **more: _P.kwargs) -> _T:
            self.now(*before)
            found = function(*given, **more)
            self.now(*after)
            return found

        return watched

    def _watch(self) -> None:
        while True:
            self.most[self.phase] = max(self.most.get(self.phase, 0.0), _resident())
            time.sleep(0.01)


def _resident() -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / _GIB for line in lines if line.startswith("VmRSS"))


def measured(products: str, options: dict[str, str]) -> dict[str, float]:
    """Run the recipe in this process. Returns sizes in GiB by name."""
    importlib.import_module("es_cookbook.engines.torch.self_check")  # which a run imports late
    sizes: dict[str, float] = {}
    watch = _Watch()
    watch.now("after imports", "loading")
    build, evaluate = ResidentWeights.__init__, setup.evaluate

    def built_weights(
        weights: ResidentWeights,
        base: PreTrainedModel,
        space: SearchSpace,
        threads: int,
        path: RowPath,
    ) -> None:
        watch.now("after the self-check", "copies of the weights")
        build(weights, base, space, threads, path)
        watch.now("after copies of the weights", "search for sigma")
        parameters = dict(base.named_parameters())
        own = [parameters[name] for name in space.shapes]
        centre = weights.centre.weights.values()
        sizes["base, in its file"] = sum(p.nbytes for p in parameters.values()) / 2**30
        sizes["centre, float32"] = sum(p.nbytes for p in centre) / 2**30
        sizes["linear weights that sample"] = sum(p.nbytes for p in own) / 2**30

    async def evaluated(*given: object, **more: object) -> Metrics:
        watch.now("after the search", "evaluation")
        found = await cast("Callable[..., Awaitable[Metrics]]", evaluate)(*given, **more)
        watch.now("after the first evaluation", "generation")
        return found

    apply = watch.around(
        ResidentWeights.apply,
        ("before the first step", "step"),
        ("after the first step", "generation"),
    )
    load = watch.around(host.load, ("after imports", "loading"), ("after loading", "self-check"))
    patches: list[tuple[object, str, object]] = [
        (host, "load", load),
        (ResidentWeights, "__init__", built_weights),
        (ResidentWeights, "apply", apply),
        (setup, "evaluate", evaluated),
    ]
    for holder, name, function in patches:
        setattr(holder, name, function)
    with tempfile.TemporaryDirectory() as directory:
        given = {
            "model_name": str(CHAT_MODEL),
            "log_path": f"{directory}/run",
            "num_generations": "2",
            "eval_every": "2",
            "dataset.num_test": "200",
            "engine.products": products,
            "trackers.live": "None",
            **options,
        }
        run(built(recipe_defaults("chat"), given))
    most = {f"most in: {phase}": size for phase, size in watch.most.items()}
    peak = max(watch.most.values())
    beside = {"peak": peak, "peak beside imports": peak - watch.at["after imports"]}
    return {**sizes, **watch.at, **most, **beside}


def rows_of(products: str, options: dict[str, str]) -> list[Row]:
    """Return the table's rows, of a run in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        found = process.submit(measured, products, options).result()
    beside = "peak beside imports"
    goal = 1.4 if products == "auto" else None
    return [
        row(name, [size], "GiB", at_most=goal if name == beside else None)
        for name, size in found.items()
    ]


def main(words: list[str]) -> None:
    """Measure, and report."""
    products = words[0] if words else "auto"
    if not CHAT_MODEL.is_file():
        raise SystemExit(f"{CHAT_MODEL} is not there: run `make chat-model`")
    options = _SAMPLING if "sampling" in words else {}
    report("memory", rows_of(products, options), " ".join(words))


if __name__ == "__main__":
    main(sys.argv[1:])

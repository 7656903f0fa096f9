"""The same generation of a chat model on processors that can do less, and beside llama.cpp.

    python -m benchmarks.processors                   # under every cap that this processor allows
    python -m benchmarks.processors avx2              # under some
    python -m benchmarks.processors llama_cpp         # the same file beside llama.cpp
    python -m benchmarks.processors llama_cpp avx2    # beside it, under a cap
    python -m benchmarks.processors model.gguf avx2   # a file of your own first, to all of these

What is fast on one kind of CPU may be slow on most others: bfloat16 products take half of float32's
time where the processor has instructions for them, ten times as long where it has none. A cap sets
environment variables that keep torch, oneDNN and the kernels from instructions that the processor
has, so that it stands for one that has not: `no_bfloat16` for one with AVX-512 and VNNI, `avx2` for
laptops before 2021, `avx_vnni` for later ones. Which there are is read from the processor's flags.

Under each cap, in a separate process, the population answers as in `benchmarks.real_model`, by
turns and in processor time of all threads: `engine.dtype=auto`, `float32`, `bfloat16`. A dtype that
takes more than twice as long as the other in a short generation is left out of the whole one; and
`engine.products=int8`, where there are instructions for it.
Beside these: `generate` of transformers, in the better dtype for it, with some genomes' requests;
and the floor of `benchmarks.sampling`, by the fastest kernel of any dtype that there is, MKL,
oneDNN, or the engine's own. Peak memory is of processes that do nothing but a short generation and
a step.

llama.cpp's server (`pip install 'es-cookbook[compare]'`) runs in a separate process, since it may
abort, with as many slots as there are answers at once, its prompt cache and continuous batching,
once with a thread per core and once with one alone; the better counts: its threads wait
for each other without giving up their cores, which costs them several times their work where other
programs run. All prompts are new in every round; what they begin with is in both caches. The wheel
of llama.cpp has kernels for AVX2 and none for AVX-512, as its rows say, so an equal comparison is
the one under `avx2`.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import importlib.util
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
import torch

from benchmarks.engines import generation
from benchmarks.harness import CHAT_MODEL, Row, mirrored_pairs, processor_flags, ratios, report, row
from benchmarks.real_model import cases_of
from benchmarks.sampling import Case, Contest, Floor, measured
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.common.terminal import plural
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.torch.kernels.products import multiplies_int8, multiply
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.rl.types import SamplingParams

AUTO, DTYPES, INT8, LLAMA = "auto", ("float32", "bfloat16"), "int8", "llama_cpp"
GENOMES = {"sums": 16, "examples": 8}
"""Half of those of `benchmarks.real_model`, to save time."""
REPEATS = 2
_MUCH_SLOWER = 2.0
_GENERATED = 4
"""Genomes whose requests `generate` gets as a batch, to save time."""
_EVERY = 8
"""One in so many of the floor's products is run, to save time."""
_SHARE, _AUTO, _MEMORY, _LLAMA = 0.8, 0.95, 1.1, 4
"""Goals; the last for `_MANY` answers at once and more."""
_MANY = 32
_TORCH = "torch"
AT_ONCE = {1: 5, 8: 3, 32: 2, 128: 1}
"""Answers at once beside llama.cpp -> repeats."""
SLOT_TOKENS = 96
"""Tokens of a slot of llama.cpp: a sum takes 46 and 16."""

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Cap:
    """Instructions that the environment keeps a process from.

    Attributes:
        leaves: flags that a processor needs to run under it.
        takes: flags; a processor without any of them has no such cap.
        environment: variables of the process.
    """

    leaves: frozenset[str]
    takes: frozenset[str]
    environment: Mapping[str, str]

    def suits(self, flags: frozenset[str]) -> bool:
        """Return whether a processor with these flags can stand for one that has less."""
        return self.leaves <= flags and bool(self.takes & flags)


NO_CAP = Cap(frozenset(), frozenset(), {})
CAPS = {
    "no_bfloat16": Cap(
        frozenset({"avx512_vnni"}),
        frozenset({"avx512_bf16", "amx_bf16"}),
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    ),
    "avx2": Cap(
        frozenset({"avx2", "fma"}),
        frozenset({"avx512f"}),
        {
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "NUMBA_CPU_NAME": "haswell",
            "NUMBA_CPU_FEATURES": "+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe",
        },
    ),
    "avx_vnni": Cap(
        frozenset({"avx2", "fma", "avx_vnni"}),
        frozenset({"avx512f"}),
        {
            "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI",
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
}


def caps_of(flags: frozenset[str]) -> dict[str, Cap]:
    """Return the caps that a processor allows, by name, `none` first."""
    return {"none": NO_CAP} | {name: cap for name, cap in CAPS.items() if cap.suits(flags)}


def in_capped_process(cap: Cap, function: Callable[..., _T], *arguments: object) -> _T:
    """Run a function in a separate process, which imports everything under a cap."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cap.environment.items():
            patch.setenv(name, value)
        with _fresh_process() as process:
            return process.submit(function, *arguments).result()


def _fresh_process() -> ProcessPoolExecutor:
    """Return a process whose abort is an error here, not an endless wait."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def speed_rows(file: str, cap: str) -> list[Row]:
    """Measure every case in this process."""
    loop = asyncio.new_event_loop()
    cases = [
        dataclasses.replace(case, genomes=GENOMES[name]) for name, case in cases_of(file).items()
    ]
    contests = {
        dtype: Contest(loop, dataclasses.replace(cases[0], dtype=dtype))
        for dtype in (AUTO, *DTYPES)
    }
    if multiplies_int8():
        contests[INT8] = Contest(loop, dataclasses.replace(cases[0], dtype=AUTO, products=INT8))
    short = _processor_seconds({name: each.one_genome for name, each in contests.items()})
    kept = kept_of(short)
    generates = {dtype: partial(contests[dtype].generate, 1) for dtype in kept}
    best = _fastest(_processor_seconds(generates))
    rows = [row(f"{cap}: one genome's sums, {name}", found, "s") for name, found in short.items()]
    for case in cases:
        for dtype, contest in contests.items():
            contest.ask(dataclasses.replace(case, dtype=AUTO if dtype == INT8 else dtype))
        rows += case_rows(f"{cap}, {case.name}", contests, kept, best)
    for contest in contests.values():
        contest.close()
    return rows


def _processor_seconds(
    functions: Mapping[str, Callable[[], object]],
) -> dict[str, list[float]]:
    """Return processor seconds of functions, by turns, once after a warm-up round."""
    return {name: each.processor for name, each in measured(functions, repeats=1).items()}


def kept_of(short: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the dtypes, of those that took so long, that are not much slower than the other."""
    best = min(short[dtype][0] for dtype in DTYPES)
    return [dtype for dtype in DTYPES if short[dtype][0] <= _MUCH_SLOWER * best]


def _fastest(seconds: Mapping[str, Sequence[float]]) -> str:
    return min(seconds, key=lambda name: statistics.median(seconds[name]))


def case_rows(
    name: str, contests: Mapping[str, Contest], kept: Sequence[str], best: str
) -> list[Row]:
    """Measure the current case of the contests, with kept dtypes, the best one for `generate`."""
    own = [each for each in (AUTO, *kept, INT8) if each in contests]
    populations = {dtype: contests[dtype].population for dtype in own}
    generate = partial(contests[best].generate, _GENERATED)
    floor = Floor(contests[AUTO], _EVERY)
    products = {"the engine's own, float32": (floor.by(multiply, torch.float32), floor.times)}
    for dtype in kept:
        of_dtype = Floor(contests[dtype], _EVERY)
        for kernel, run in of_dtype.kernels().items():
            products[f"{kernel}, {dtype}"] = run, of_dtype.times
    kernels = {kernel: run for kernel, (run, _) in products.items()}
    functions = {**populations, "generate": generate, **kernels, "read": floor.read}
    floor.read()  # the memory that is read is there now
    times = measured(functions, REPEATS, warmups=0)
    spent = {function: each.processor for function, each in times.items()}
    floors = {
        kernel: [
            part * times_run + read for part, read in zip(spent[kernel], spent["read"], strict=True)
        ]
        for kernel, (_, times_run) in products.items()
    }
    clock = {f"{name}: {dtype}": contests[dtype].rates(times[dtype].clock) for dtype in populations}
    return [
        *(row(f"{name}: a generation, {dtype}", spent[dtype], "s") for dtype in populations),
        *(row(f"{what}, by the clock", found, "tokens/s") for what, found in clock.items()),
        *_ratio_rows(name, contests[AUTO].case, spent, kept, best),
        *_share_rows(name, floors, spent[AUTO]),
    ]


def _ratio_rows(
    name: str, case: Case, spent: Mapping[str, Sequence[float]], kept: Sequence[str], best: str
) -> list[Row]:
    auto, better = spent[AUTO], _fastest({dtype: spent[dtype] for dtype in kept})
    generated = [seconds * case.genomes / _GENERATED for seconds in spent["generate"]]
    to_better, to_generate = ratios(spent[better], auto), ratios(generated, auto)
    what = f"{name}: auto / the better of both dtypes, {better}"
    beside = f"{name}: population / generate in {best}"
    rows = [
        row(what, to_better, "x", at_least=_AUTO),
        row(beside, to_generate, "x", at_least=case.generate),
    ]
    if INT8 in spent:
        rows.append(row(f"{name}: int8 / auto", ratios(auto, spent[INT8]), "x"))
    return rows


def _share_rows(
    name: str, floors: Mapping[str, Sequence[float]], auto: Sequence[float]
) -> list[Row]:
    """Return the floor's share of `auto`'s time, by kernel; the fastest has a goal."""
    fastest = _fastest(floors)
    return [
        row(
            f"{name}: share of the floor, products by {kernel}",
            ratios(floor, auto),
            "x",
            at_least=_SHARE if kernel == fastest else None,
        )
        for kernel, floor in floors.items()
    ]


def peak_bytes(file: str, dtype: Literal["auto", "bfloat16"]) -> int:
    """Return this process's peak memory after a short generation and a step."""
    loop = asyncio.new_event_loop()
    builder = TorchEngineBuilder(dtype=dtype)
    engine = loop.run_until_complete(builder(model_name=file, search_space=LowRank(rank=1)))
    prompts_P = cases_of(file)["sums"].prompts(engine.tokenizer, 4)
    params = SamplingParams(max_tokens=8)
    loop.run_until_complete(generation(engine, [mirrored_pairs(2)], prompts_P, params))
    loop.run_until_complete(engine.close())
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line)


def memory_rows(file: str, name: str, cap: Cap) -> list[Row]:
    """Measure the peak memory of `auto` and of bfloat16 products, each in a separate process."""
    auto, narrow = (in_capped_process(cap, peak_bytes, file, dtype) for dtype in (AUTO, "bfloat16"))
    return [
        row(f"{name}: peak memory, auto", [auto / 2**20], "MiB"),
        row(
            f"{name}: peak memory, auto / bfloat16 products",
            [auto / narrow],
            "x",
            at_most=_MEMORY,
        ),
    ]


_llama: dict[str, Any] = {}
"""The server, in the process that runs llama.cpp."""


def start_llama(file: str, slots: int, threads: int) -> str:
    """Load the file into a server with so many slots; returns what llama.cpp was built with."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_parallel, params.n_ctx = slots, slots * SLOT_TOKENS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 1  # errors
    _llama["server"] = xllamacpp.Server(params)
    return xllamacpp.get_system_info()


def ask_llama(prompts_P: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
    """Return wall-clock and processor seconds of greedy tokens for all prompts at once."""
    options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
    requests = [{"prompt": list(prompt), **options} for prompt in prompts_P]
    began, spent = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = list(threads.map(_llama["server"].handle_completions, requests))
    seconds = time.perf_counter() - began, time.process_time() - spent
    assert all(each["usage"]["completion_tokens"] == tokens for each in answers), answers
    return seconds


@contextlib.contextmanager
def llama_processes(file: str, slots: int) -> Generator[dict[str, ProcessPoolExecutor]]:
    """Yield servers of llama.cpp with so many slots: with a thread per core, and with one."""
    with contextlib.ExitStack() as stack:
        processes: dict[str, ProcessPoolExecutor] = {}
        for threads in sorted({1, num_cores()}):
            process = stack.enter_context(_fresh_process())
            built = process.submit(start_llama, file, slots, threads).result()
            kernels = (
                "AVX-512" if "AVX512 = 1" in built else "AVX2" if "AVX2 = 1" in built else built
            )
            processes[f"llama.cpp for {kernels}, {plural(threads, 'thread')}"] = process
        yield processes


def llama_rows(contests: Mapping[str, Contest], file: str, at_once: int, repeats: int) -> list[Row]:
    """Measure so many answers at once of the unperturbed model, by turns, new ones every time."""
    contest = next(iter(contests.values()))
    tokens = contest.case.tokens
    prompts_P = contest.case.prompts(contest.engine.tokenizer, at_once * (repeats + 1))
    rounds = [prompts_P[n * at_once : (n + 1) * at_once] for n in range(repeats + 1)]
    clock: dict[str, list[float]] = defaultdict(list)
    processor: dict[str, list[float]] = defaultdict(list)
    with llama_processes(file, at_once) as processes:
        for each in contests.values():
            each.answer_as_centre(rounds[0])
        for process in processes.values():  # What prompts begin with is then in every slot.
            process.submit(ask_llama, rounds[0], 1).result()
        for prompts in rounds[1:]:
            for name, each in contests.items():
                began, spent = time.perf_counter(), time.process_time()
                each.answer_as_centre(prompts)
                clock[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - spent)
            for name, process in processes.items():
                seconds = process.submit(ask_llama, prompts, tokens).result()
                clock[name].append(seconds[0])
                processor[name].append(seconds[1])
    return [
        found
        for unit, seconds in (("processor second", processor), ("second", clock))
        for found in _beside_llama(at_once, tokens, f"tokens per {unit}", seconds)
    ]


def _beside_llama(
    at_once: int, tokens: int, unit: str, seconds: Mapping[str, Sequence[float]]
) -> list[Row]:
    rows = [
        row(f"{at_once} at once: {name}", [at_once * tokens / each for each in found], unit)
        for name, found in seconds.items()
    ]
    ours = {name: found for name, found in seconds.items() if name.startswith(_TORCH)}
    best = _fastest({name: found for name, found in seconds.items() if name not in ours})
    return [
        *rows,
        *(
            row(
                f"{at_once} at once: {name} / the better of llama.cpp's, {unit}",
                ratios(seconds[best], found),
                "x",
                at_least=_LLAMA if at_once >= _MANY and name == _fastest(ours) else None,
            )
            for name, found in ours.items()
        ),
    ]


def beside_llama(file: str) -> list[Row]:
    """Measure llama.cpp, for each number of answers at once."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise SystemExit("xllamacpp is not installed: pip install 'es-cookbook[compare]'")
    loop = asyncio.new_event_loop()
    case = dataclasses.replace(cases_of(file)["sums"], dtype=AUTO)
    contests = {_TORCH: Contest(loop, case)}
    if multiplies_int8():
        contests[f"{_TORCH}, int8"] = Contest(loop, dataclasses.replace(case, products=INT8))
    try:
        rows = [
            found
            for at_once, repeats in AT_ONCE.items()
            for found in llama_rows(contests, file, at_once, repeats)
        ]
    except BrokenProcessPool as error:
        raise SystemExit("llama.cpp has ended its process: see above") from error
    for contest in contests.values():
        contest.close()
    loop.close()
    return rows


def under_caps(file: str, caps: Mapping[str, Cap]) -> list[Row]:
    """Measure each cap."""
    rows: list[Row] = []
    for name, cap in caps.items():
        rows += in_capped_process(cap, speed_rows, file, name)
        rows += memory_rows(file, name, cap)
    return rows


def main(words: Sequence[str]) -> None:
    """Measure and report."""
    file, *names = words if words and words[0].endswith(".gguf") else [str(CHAT_MODEL), *words]
    if not Path(file).is_file():
        raise SystemExit(f"{file} is not there: make chat-model writes it")
    caps = caps_of(processor_flags())
    if unknown := [name for name in names if name not in (*caps, LLAMA)]:
        raise SystemExit(f"{unknown[0]}: this processor allows {', '.join([*caps, LLAMA])}")
    chosen = [name for name in names if name != LLAMA]
    if LLAMA in names:
        cap = caps[chosen[0]] if chosen else NO_CAP
        rows = in_capped_process(cap, beside_llama, file)
    else:
        rows = under_caps(file, {name: caps[name] for name in chosen or caps})
    report("processors", rows, " ".join(names))


if __name__ == "__main__":
    main(sys.argv[1:])

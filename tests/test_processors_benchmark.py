"""`benchmarks.processors`: which caps there are, what they take away, and what is compared."""

import asyncio
import dataclasses
import importlib.util
import os

import pytest
from torch.backends.cpu import get_cpu_capability

from benchmarks import processors, sampling
from benchmarks.harness import CHAT_MODEL, machine, processor_flags
from benchmarks.processors import CAPS, caps_of, in_capped_process, kept_of
from benchmarks.sampling import Case, Contest, Floor, endless_model
from es_cookbook.engines.torch.processor import has_int8

AVX2 = frozenset({"sse4_2", "avx", "avx2", "fma"})
CASCADE_LAKE = AVX2 | {"avx512f", "avx512_vnni"}
ZEN_5 = CASCADE_LAKE | {"avx512_bf16", "avx_vnni"}


@pytest.mark.parametrize(
    ("flags", "caps"),
    [
        (ZEN_5, ["none", "no_bfloat16", "avx2", "avx_vnni"]),
        (CASCADE_LAKE, ["none", "avx2"]),
        (AVX2, ["none"]),
        (frozenset({"asimd", "bf16"}), ["none"]),
    ],
)
def test_a_processor_stands_for_those_that_can_do_less(
    flags: frozenset[str], caps: list[str]
) -> None:
    assert list(caps_of(flags)) == caps


@pytest.mark.skipif("avx512f" not in processor_flags(), reason="no AVX-512 to be kept from")
def test_a_capped_process_does_without_what_the_processor_has() -> None:
    assert in_capped_process(CAPS["avx2"], get_cpu_capability) == "AVX2"
    assert "ATEN_CPU_CAPABILITY" not in os.environ
    assert "avx512f" in str(machine()["instructions"])


def test_a_dtype_that_is_much_slower_is_left_out() -> None:
    assert kept_of({"auto": [1.0], "float32": [1.1], "bfloat16": [9.0]}) == ["float32"]
    assert kept_of({"auto": [1.0], "float32": [1.9], "bfloat16": [1.0]}) == ["float32", "bfloat16"]


def test_a_case_is_measured_against_both_dtypes_generate_and_the_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "COPIED", 1 << 10)
    loop = asyncio.new_event_loop()
    case = Case("tiny", endless_model, "auto", genomes=4, problems=2, tokens=2, generate=3)
    contests = {
        dtype: Contest(loop, dataclasses.replace(case, dtype=dtype))
        for dtype in ("auto", "float32", "bfloat16")
    }
    if has_int8():
        contests["int8"] = Contest(loop, dataclasses.replace(case, products="int8"))
    rows = processors.case_rows("tiny", contests, ["float32", "bfloat16"], "float32")
    floor = Floor(contests["auto"], every=2)
    for contest in contests.values():
        contest.close()
    loop.close()
    found = {row.name.removeprefix("tiny: "): row for row in rows}
    assert all(row.value > 0 and row.repeats == processors.REPEATS for row in rows)
    assert {"a generation, auto", "bfloat16, by the clock"} <= found.keys()
    assert found["population / generate in float32"].goal == ">= 3"
    assert ("int8 / auto" in found) == has_int8()
    shares = [row for name, row in found.items() if name.startswith("share of the floor")]
    assert {"the engine's own, float32", "MKL, float32", "oneDNN, bfloat16"} <= {
        row.name.partition("products by ")[2] for row in shares
    }
    (asked,) = (row.value for row in shares if row.goal)  # Of the fastest; two may be level.
    assert asked < 1.5 * min(row.value for row in shares)
    assert floor.times == pytest.approx(2, rel=0.2), "every other product stands for two"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.gguf"], "missing.gguf is not there: make chat-model writes it"),
        ([__file__.replace(".py", ".gguf"), "avx2"], "is not there"),
    ],
)
def test_a_file_that_is_missing_is_named(words: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        processors.main(words)


@pytest.mark.skipif(not CHAT_MODEL.is_file(), reason="the chat model is not here")
def test_a_cap_that_this_processor_does_not_allow_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"avx1024: this processor allows none, .*llama_cpp"):
        processors.main(["avx1024"])


@pytest.mark.skipif(not CHAT_MODEL.is_file(), reason="the chat model is not here")
def test_llama_cpp_answers_several_prompts_at_once() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        with pytest.raises(SystemExit, match=r"xllamacpp is not installed: pip install"):
            processors.main(["llama_cpp"])
        return
    with processors.llama_processes(str(CHAT_MODEL), slots=2) as processes:
        for process in processes.values():
            clock, spent = process.submit(processors.ask_llama, [(1, 2), (3,)], 3).result()
            assert clock > 0 and spent > 0

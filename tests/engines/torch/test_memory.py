"""Memory is divided by what is free, and less runs at a time before anything is refused."""

import gc
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch

from es_cookbook import LowRank, TorchEngineBuilder
from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.torch import host
from es_cookbook.engines.torch.memory import CachePlan, CacheSize, Memory, free_bytes
from tests.engines.torch.reference import Reference, request, running_engine, sample_all
from tests.tiny_models import CONTEXT, TinyModel

MIB, GIB = 1 << 20, 1 << 30
QWEN_HALF_B = CacheSize(0, 2 * 24 * 2 * 64 * 2)
"""Bytes of a token of Qwen2.5-0.5B in bfloat16."""


def plan(memory: Memory, **changed: object) -> CachePlan:
    """For the default options, two cores and the vocabulary of Qwen 2.5."""
    wanted = {
        "num_lanes": 2,
        "max_rows": 2048,
        "vocabulary_size": 151_936,
        "context_length": 4096,
        "may_shorten": True,
    }
    return memory.plan(QWEN_HALF_B, **wanted | changed)


def test_a_model_of_half_a_billion_has_its_whole_context_on_a_laptop() -> None:
    found = plan(Memory(16 * GIB, None, None))
    assert (found.num_lanes, found.context_length) == (2, 4096)
    assert found.lane_bytes == 3 * GIB  # of the half, a quarter is for requests that have ended
    # Logits of a row, 8 bytes each, out of a quarter of the memory.
    assert found.max_rows == min(2048, 4 * GIB // (8 * 151_936)) // 2


def test_lanes_then_the_context_go_before_anything_is_refused() -> None:
    context = 8 * 4096 * QWEN_HALF_B.per_token
    assert plan(Memory(4 * context, None, None, 0)).num_lanes == 2
    one = plan(Memory(3 * context, None, None, 0))
    assert (one.num_lanes, one.context_length, one.lane_bytes) == (1, 4096, 3 * context // 2)
    shorter = plan(Memory(context, None, None, 0))
    assert (shorter.num_lanes, shorter.context_length) == (1, 2048)
    assert plan(Memory(context // 4 + 8, None, None, 0)).context_length == 512
    with pytest.raises(ConfigError, match=r"\d.* of the \d.* of free memory holds 50\d tokens"):
        plan(Memory(context // 4 - MIB, None, None, 0))


def test_a_context_that_the_user_asks_for_is_not_shortened() -> None:
    context = 8 * 4096 * QWEN_HALF_B.per_token
    with pytest.raises(ConfigError, match=r"fewer than the context of 4096; raise engine.kv_cache"):
        plan(Memory(context, None, None, 0), may_shorten=False)


def test_given_options_hold_for_any_free_memory() -> None:
    memory = Memory(100 * GIB, 0.5, 0.25)
    assert (memory.cache_bytes, memory.genome_bytes) == (GIB // 2, GIB // 4)
    assert (memory.prefix_bytes, Memory(100 * GIB, 0.5, 0.25, 0.0).prefix_bytes) == (
        100 * GIB // 8,
        0,
    )
    assert plan(memory).lane_bytes == GIB // 2  # in one lane: two blocks of rows do not fit
    with pytest.raises(ConfigError, match=r"engine.kv_cache_gib=0.01 holds \d+ tokens .*at least"):
        plan(Memory(100 * GIB, 0.01, None))


def test_a_share_of_the_cores_has_that_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(available=8 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    whole = free_bytes(torch.device("cpu"))
    assert whole <= 8 * GIB  # less where a container's limit is
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert free_bytes(torch.device("cpu")) == pytest.approx(whole / 4, rel=0.2)


async def test_a_model_larger_than_the_memory_is_refused_before_it_is_loaded(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("es_cookbook.engines.torch.memory.free_bytes", lambda _: 100_000)
    monkeypatch.setattr(host, "load_causal_lm", None)  # would be called
    path = str(tiny_model("llama"))
    sentence = r"does not fit into the 97\.\d KiB .* free on cpu: it needs .*; use engine\.dtype"
    with pytest.raises(ConfigError, match=sentence) as raised:
        await TorchEngineBuilder(device="cpu")(model_name=path, search_space=LowRank())
    assert "\n" not in str(raised.value)


def test_copies_in_int8_are_counted_beside_the_weights(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed copies in bfloat16 replace weights; these do not."""
    counted: list[tuple[int, int, int]] = []
    monkeypatch.setattr(host, "check_weights_fit", lambda _, needed, __: counted.append(needed))
    monkeypatch.setattr(host, "multiplies_int8", lambda: True)
    path = str(tiny_model("llama"))
    for products in ("float32", "int8"):
        model, *_ = host.load(path, LowRank(), "bfloat16", products, "cpu", lambda _: CONTEXT)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    (base, beside, centre), with_int8 = counted
    assert with_int8 == (base, beside + 1.125 * linear, centre)


async def test_one_block_of_rows_in_one_lane_answers_right(tiny_model: TinyModel) -> None:
    reference = Reference(tiny_model("qwen2"), LowRank())
    requests = [request("centre", [5] * n, max_tokens=9) for n in (1, 8, 30, CONTEXT - 9)] * 4
    least = 8 * CONTEXT * 2 * 2 * (8 + 16) * 4 / GIB  # values have columns for whole steps
    async with running_engine(tiny_model("qwen2"), LowRank(), kv_cache_gib=least) as engine:
        assert engine.traits.context_length == CONTEXT
        actions = await sample_all(engine, requests)
    reference.check_targets([], requests, actions)


async def test_a_closed_engine_waits_for_no_garbage_collector(tiny_model: TinyModel) -> None:
    """The collector counts objects: a few of a gigabyte each would pile up."""
    path = tiny_model("qwen2")
    there: list[bool] = []
    for _ in range(2):  # What is imported for the first one may hold it.
        gc.disable()
        try:
            async with running_engine(path, LowRank()) as engine:
                found = weakref.ref(engine)
                await sample_all(engine, [request("centre", (3, 4, 5))])
            del engine
            there.append(found() is not None)
        finally:
            gc.enable()
    assert not there[-1]

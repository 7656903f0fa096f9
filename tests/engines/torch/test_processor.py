"""Products follow the processor, and nothing that is recorded of steps does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from numba.core import config
from transformers import AutoModelForCausalLM

from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.torch import host, processor
from es_cookbook.engines.torch.processor import Rates, products_of, rates
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.low_rank import LowRank
from tests.engines.torch.reference import request, running_engine, sample_all
from tests.tiny_models import TinyModel, save_with_tokenizer

CPU = torch.device("cpu")
NATIVE, SLOW = Rates(100.0, 300.0, packs=True), Rates(100.0, 25.0, packs=False)
LAPTOP = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""What makes of a processor with AVX-512 one with AVX2."""

ANSWERS = """
import asyncio, json, sys
from pathlib import Path
from es_cookbook.common.machine.compiled import features
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.low_rank import LowRank
from tests.engines.torch.reference import request, running_engine, sample_all

async def main():
    async with running_engine(Path(sys.argv[1]), LowRank(), dtype="auto") as engine:
        fingerprint = await engine.apply(Step((Term(1, 0.1),)))
        await engine.load([Genome((Term(7, 0.1),))])
        actions = await sample_all(engine, [request(0, (5, 6, 7)), request("centre", (8,))])
        tokens = [action.tokens_T for action in actions]
        print(json.dumps([engine.traits.base_dtype, engine.traits.products, fingerprint, tokens]))

assert "+avx512f" not in features()
asyncio.run(main())
"""


@pytest.fixture
def bfloat16_model(tiny_model: TinyModel, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"), dtype=torch.bfloat16)
    save_with_tokenizer(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.anyio
async def test_on_avx2_products_of_bfloat16_weights_are_in_float32(bfloat16_model: Path) -> None:
    """In a process of its own: its answers and fingerprint are those of float32 products here."""
    command = [sys.executable, "-c", ANSWERS, str(bfloat16_model)]
    env = {**os.environ, **LAPTOP, "ES_COOKBOOK_CACHE": str(bfloat16_model.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    base_dtype, products, fingerprint, tokens = json.loads(done.stdout)
    assert (base_dtype, products) == ("bfloat16", "float32")
    async with running_engine(
        bfloat16_model, LowRank(), dtype="auto", products="float32"
    ) as engine:
        assert await engine.apply(Step((Term(1, 0.1),))) == fingerprint
        await engine.load([Genome((Term(7, 0.1),))])
        actions = await sample_all(engine, [request(0, (5, 6, 7)), request("centre", (8,))])
    assert [list(action.tokens_T) for action in actions] == tokens


@pytest.mark.anyio
async def test_fingerprints_do_not_depend_on_products(bfloat16_model: Path) -> None:
    steps = [Step((Term(1, 0.1), Term(2, -1e-4))), Step((Term(3, 0.01),), decay=0.1)]
    found: list[list[int]] = []
    for products in ("float32", "bfloat16"):
        async with running_engine(
            bfloat16_model, LowRank(), dtype="auto", products=products
        ) as engine:
            assert engine.traits.products == products
            found.append([await engine.apply(step) for step in steps])
            assert await engine.restore(steps) == found[-1][-1]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("machine", "weights", "products"),
    [
        (NATIVE, torch.bfloat16, torch.bfloat16),
        (SLOW, torch.bfloat16, torch.float32),
        (Rates(100.0, 110.0, packs=True), torch.bfloat16, torch.float32),
        (NATIVE, torch.float16, torch.float32),
        (NATIVE, torch.float32, torch.float32),
    ],
)
def test_products_are_in_what_is_fastest_of_what_is_exact_enough(
    monkeypatch: pytest.MonkeyPatch, machine: Rates, weights: torch.dtype, products: torch.dtype
) -> None:
    monkeypatch.setattr(processor, "rates", lambda: machine)
    assert products_of(weights, CPU) == products


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, of which this process has read nothing."""
    monkeypatch.setenv("ES_COOKBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(processor, "rates", rates.__wrapped__)
    return tmp_path


def test_a_machine_is_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = processor.rates()
    (file,) = cache.iterdir()
    kept = json.loads(file.read_text())
    assert (kept["float32"], kept["bfloat16"]) == (measured.float32, measured.bfloat16)
    monkeypatch.setattr(processor, "measured", None)  # would be called
    assert processor.rates() == measured


@pytest.mark.parametrize(
    ("machine", "features", "names_int8"),
    [(SLOW, "+avx2,+avxvnni", True), (SLOW, "+avx2,-avxvnni", False), (NATIVE, "+avxvnni", False)],
)
def test_what_is_measured_is_said_with_what_is_faster(
    cache: Path, monkeypatch: pytest.MonkeyPatch, machine: Rates, features: str, names_int8: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(processor, "say", said.append)
    monkeypatch.setattr(processor, "measured", lambda: machine)
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    processor.rates()
    (line,) = said
    assert f"{machine.bfloat16:.0f} in bfloat16" in line and str(cache) in line
    assert ("engine.products=int8" in line) == names_int8


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"float32": "x"}', '{"float32": 1}', "[" * 10**5])
def test_a_damaged_file_is_measured_again(cache: Path, text: str) -> None:
    processor.rates()
    (file,) = cache.iterdir()
    file.write_text(text)
    assert processor.rates().float32 > 0
    assert json.loads(file.read_text())["float32"] > 0


def test_other_limits_are_another_machine(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor.rates()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(processor, "measured", lambda: NATIVE)
    assert processor.rates() == NATIVE
    assert len([*cache.iterdir()]) == 2


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ES_COOKBOOK_CACHE", str(tmp_path / "file"))
    assert rates.__wrapped__().float32 > 0


@pytest.mark.parametrize(
    ("dtype", "products", "slow"),
    [
        ("bfloat16", "auto", "engine.dtype=bfloat16: products in bfloat16 take 4.0 times as long"),
        ("auto", "bfloat16", "engine.products=bfloat16: products in bfloat16 take 4.0 times"),
        ("auto", "auto", None),
        ("bfloat16", "float32", None),
    ],
)
def test_bfloat16_that_is_asked_for_says_how_much_slower_it_is(
    monkeypatch: pytest.MonkeyPatch, dtype: str, products: str, slow: str | None
) -> None:
    said: list[str] = []
    monkeypatch.setattr(host, "say_once", said.append)
    monkeypatch.setattr(host, "rates", lambda: SLOW)
    monkeypatch.setattr(processor, "rates", lambda: SLOW)
    chosen = host.Wanted(dtype, products, "cpu").products_of(torch.bfloat16)
    if slow is None:
        assert chosen == torch.float32 and not said
    else:
        assert chosen == torch.bfloat16
        assert said[0].startswith(slow) and "engine.products=float32" in said[0]


def test_products_that_would_round_weights_are_refused() -> None:
    wanted = host.Wanted("auto", "bfloat16", "cpu")
    with pytest.raises(ConfigError, match=r"these are in float32; set engine\.dtype=bfloat16"):
        wanted.products_of(torch.float32)

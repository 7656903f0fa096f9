"""Adapters over a quantised base: real vLLM on a real GPTQ checkpoint, made here."""

import asyncio
import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from es_cookbook.engines.base import Engine, EngineBuilder, LogprobsRequest, Target
from es_cookbook.engines.torch_engine import TorchEngineBuilder
from es_cookbook.engines.vllm_engine import VLLMEngineBuilder
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from tests.integration.vllm_models import make_vllm_model

pytest.importorskip("vllm", reason="vLLM is not installed, and could not be: see the Makefile")
pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.anyio]

GROUP = 32
NUMBERS_A_WORD = 8  # of 4 bits
STEP = Step((Term(5, 0.3),))
GENOMES_G = (Genome((Term(1, 0.5),)), Genome((Term(1, -0.5),)))
TARGETS: tuple[Target, ...] = ("base", "centre", 0, 1)


def pack(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight numbers of 4 bits in an int32, the first in the lowest bits."""
    parts = numbers.unflatten(dim, (-1, NUMBERS_A_WORD)).unbind(dim + 1)
    words = functools.reduce(
        torch.add, (part << (4 * i) for i, part in enumerate(parts)), torch.zeros_like(parts[0])
    )
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def quantise(model: Path, quantised: Path, dequantised: Path) -> None:
    """Write a checkpoint's linear weights as GPTQ's 4 bits, and as what these bits stand for."""
    as_bits: dict[str, torch.Tensor] = {}
    as_numbers: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        as_bits[name] = as_numbers[name] = weight.to(torch.bfloat16)
        if not name.endswith("_proj.weight"):
            continue
        outputs, inputs = weight.shape
        grouped = weight.T.reshape(inputs // GROUP, GROUP, outputs)
        scales = (grouped.abs().amax(1) / 7).to(torch.bfloat16)
        steps = (grouped / scales[:, None].float()).round().clamp(-8, 7)
        as_numbers[name] = (steps * scales[:, None].float()).view(inputs, outputs).T.bfloat16()
        del as_bits[name]
        layer = name.removesuffix(".weight")
        zeros = torch.full((len(scales), outputs), 7, dtype=torch.int64)  # GPTQ stores 8 - 1
        as_bits |= {
            f"{layer}.qweight": pack((steps + 8).long().view(inputs, outputs), 0),
            f"{layer}.qzeros": pack(zeros, 1),
            f"{layer}.scales": scales,
            f"{layer}.g_idx": (torch.arange(inputs) // GROUP).to(torch.int32),
        }
    config = json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16"}
    how = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    for path, tensors, more in (
        (quantised, as_bits, {"quantization_config": how}),
        (dequantised, as_numbers, {}),
    ):
        shutil.copytree(model, path)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path / "model.safetensors",
            {"format": "pt"},
        )
        (path / "config.json").write_text(json.dumps(config | more))


async def answers(builder: EngineBuilder, path: Path) -> tuple[int, torch.Tensor]:
    """Fingerprint after a step, and log-probabilities of fixed tokens for every target."""
    engine: Engine = await builder(model_name=str(path), search_space=Adapter(rank=4))
    try:
        fingerprint = await engine.apply(STEP)
        await engine.load(GENOMES_G)
        requests = [LogprobsRequest(t, (7, 8, 9, 10), tuple(range(11, 30))) for t in TARGETS]
        return fingerprint, torch.tensor(await asyncio.gather(*map(engine.logprobs, requests)))
    finally:
        await engine.close()


async def test_adapters_evolve_over_a_quantised_base(tmp_path: Path) -> None:
    model = make_vllm_model("qwen2", tmp_path / "model")
    quantise(model, tmp_path / "quantised", tmp_path / "dequantised")
    found = await answers(
        VLLMEngineBuilder(max_genomes=4, kv_cache_gib=0.05), tmp_path / "quantised"
    )
    expected = await answers(TorchEngineBuilder(), tmp_path / "dequantised")
    assert found[0] == expected[0], "the centre is the adapter's factors alone"
    off = (found[1] - expected[1]).abs().mean(1)
    apart = (expected[1][0] - expected[1][1:]).abs().mean(1)
    assert off.max() < 0.15 and apart.min() > 1, (off, apart)  # 16-bit arithmetic, twice

"""A rounded copy of a model: every weight the nearest code, read by the quantised search spaces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("compressed_tensors", reason="it comes with vLLM, and with es-cookbook[dev]")

from es_cookbook.checkpoints.models import load_causal_lm, load_tokenizer
from es_cookbook.checkpoints.quantised import quantised_layers
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.plugins.quantised.compression import write_rounded
from es_cookbook.plugins.quantised.spaces import QuantCodes, QuantScales
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "how",
    [{"group_size": 16}, {"group_size": 16, "symmetric": False}, {"bits": 8, "group_size": None}],
    ids=str,
)
def test_a_weight_is_the_nearest_multiple_of_its_groups_scale(
    tiny_model: Callable[[str], Path], tmp_path: Path, how: dict[str, Any]
) -> None:
    bits, symmetric = how.get("bits", 4), how.get("symmetric", True)
    settings = bits, how["group_size"], symmetric
    copy = write_rounded(str(tiny_model("llama")), tmp_path / "copy", *settings)
    original = load_causal_lm(str(tiny_model("llama")), "auto", CPU)
    found = load_causal_lm(str(tmp_path / "copy"), "auto", CPU)
    layers = dict(quantised_layers(found))
    assert set(layers) == set(copy.rounded) and len(layers) == 2 * 7
    assert copy.left == {"lm_head": "the output head"}
    for name, parameter in original.named_parameters():
        other = found.get_parameter(name)
        weight = layers.get(name.removesuffix(".weight"))
        if weight is None:
            assert torch.equal(parameter.to(other.dtype), other), name
            continue
        assert weight.bits == bits and (weight.zeros is None) == symmetric
        scales = weight.scales[:, weight.group_of_input]
        eps = torch.finfo(other.dtype).eps
        # Half a code; another half at a range's end, where zero points are rounded; the scale's own
        # rounding, times the largest code, and the product's.
        steps = 0.501 + 0.5 * (not symmetric) + eps * 2**bits
        assert ((parameter - other.float()).abs() <= scales.float() * steps).all(), name
        assert weight.codes.float().std() > 0.15 * 2**bits, "all of the codes' range is used"
    assert copy.num_bytes[1] < copy.num_bytes[0]
    assert load_tokenizer(str(tmp_path / "copy")).get_vocab()


@pytest.mark.parametrize("space", [QuantScales(), QuantCodes()])
async def test_the_quantised_spaces_evolve_the_bundled_model(
    tmp_path: Path, space: SearchSpaceBuilder
) -> None:
    copy = write_rounded(str(BUNDLED_MODEL), tmp_path / "copy", 4, 32, True)
    assert len(copy.rounded) == 4 * 7 and copy.left == {}, "its head is tied to the embedding"
    engine = await TorchEngineBuilder()(model_name=str(tmp_path / "copy"), search_space=space)
    try:
        step = await engine.apply(Step((Term(5, 0.3),)))
        assert step != await engine.apply(Step((Term(6, 0.3),)))
    finally:
        await engine.close()

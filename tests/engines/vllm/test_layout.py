"""Where weights are found in a model laid out as vLLM does it; real ones are in integration."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from es_cookbook.common.errors import ModelError
from es_cookbook.engines.vllm.layout import find_placements
from es_cookbook.evolution.spaces.base import ParameterInfo

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_EXPERTS = 3
INFOS = [
    ParameterInfo("c_fc.weight", (4, 6), "linear", transposed=True),
    *(ParameterInfo(f"experts.up_proj[{e}]", (10, 4), "linear") for e in range(NUM_EXPERTS)),
    *(
        ParameterInfo(f"experts.down_proj[{e}]", (5, 4), "linear", transposed=True)
        for e in range(NUM_EXPERTS)
    ),
]


class Layers(nn.Module):
    """A transposed linear layer, and experts stored out x in; `up_proj` has its halves swapped."""

    def __init__(self, backend: str = "TRITON") -> None:
        super().__init__()
        self.c_fc = nn.Linear(4, 6, bias=False)
        self.experts = nn.Module()
        self.experts.w13_weight = nn.Parameter(torch.randn(NUM_EXPERTS, 10, 4))
        self.experts.w2_weight = nn.Parameter(torch.randn(NUM_EXPERTS, 4, 5))
        self.experts.quant_method = SimpleNamespace(
            unquantized_backend=SimpleNamespace(name=backend)
        )
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "c_fc.weight":
                self.c_fc.weight.copy_(tensor.T)
            elif name == "experts.up_proj":
                self.experts.w13_weight.copy_(tensor.roll(5, dims=1))
            else:
                self.experts.w2_weight.copy_(tensor.mT)


def tensors(model: Layers) -> Iterator[torch.Tensor]:
    """Each of `INFOS`, as Hugging Face has it."""
    yield model.c_fc.weight.T
    yield from model.experts.w13_weight.roll(5, dims=1)
    yield from model.experts.w2_weight.mT


def test_transposed_weights_and_experts_are_read_and_written_in_place() -> None:
    model = Layers().to(DEVICE)
    before = [parameter.clone() for parameter in model.parameters()]
    names = [info.name for info in INFOS]
    found = find_placements(model, INFOS, names, lambda name, tensor: {name: tensor})
    assert list(found) == names
    assert all(map(torch.equal, before, model.parameters()))
    for place, expected in zip(found.values(), tensors(model), strict=True):
        assert place.part.shape == tuple(expected.shape)
        assert torch.equal(place.read(), expected.cpu())
    new = [torch.randn(info.shape, device=DEVICE) for info in INFOS]
    for place, values in zip(found.values(), new, strict=True):
        place.write(values)
    assert all(map(torch.equal, new, tensors(model)))


def test_only_wanted_parameters_have_to_be_found_if_experts_are_shuffled() -> None:
    model = Layers("FLASHINFER_CUTLASS")

    def find(*names: str) -> list[str]:
        return list(find_placements(model, INFOS, names, lambda name, tensor: {name: tensor}))

    assert find("c_fc.weight") == ["c_fc.weight"]
    with pytest.raises(ModelError, match=r"keeps experts\.down_proj\[1\] in another way than rows"):
        find("c_fc.weight", "experts.down_proj[1]")


def test_a_loader_that_runs_once_only_is_refused() -> None:
    class Once(Layers):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            raise AssertionError("w13 was packed")

    model = Once()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ModelError, match=r"a second time \(w13 was packed\); use engine=torch"):
        find_placements(model, INFOS, ["c_fc.weight"], lambda name, tensor: {name: tensor})
    assert all(map(torch.equal, before, model.parameters()))

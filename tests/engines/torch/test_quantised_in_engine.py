"""Quantised checkpoints in the torch engine: adapters over them, and their own numbers evolving."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from es_cookbook import FullRank, LowRank, VLLMEngineBuilder
from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.base import LogprobsRequest, Target
from es_cookbook.engines.torch.host import TorchEngine
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.plugins.quantised.spaces import QuantCodes, QuantScales
from tests.engines.torch.reference import request, running_engine, sample_all, score_all
from tests.families import sampled
from tests.quantised_models import ByLibrary, How, quantise
from tests.tiny_models import TinyModel

PROMPTS = ((5, 7, 9), (11,), (5, 7, 9, 12, 30))
CONTINUATION = tuple(range(11, 25))
STEPS = (Step((Term(5, 0.1), Term(6, -0.2))), Step((Term(7, 0.15),)), Step())
GENOMES_G = [Genome((Term(7, 0.2),)), Genome((Term(7, -0.2),))]
GENOMES_G.append(Genome((Term(7, 0.1), Term(8, 0.3))))
TARGETS: tuple[Target, ...] = ("base", "centre", 0, 1, 2)
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
HOW: dict[str, How | ByLibrary] = {
    "gptq": How("gptq"),
    "gptq with zeros": How("gptq", symmetric=False, dtype=torch.float16),
    "compressed-tensors": How("compressed-tensors", bits=8, symmetric=False, dtype=torch.float32),
    "awq": How("awq", symmetric=False, dtype=torch.float16),
    "int8": ByLibrary("int-quantized", INT8, INT8 | {"strategy": "token", "dynamic": True}),
    "int8 with zeros": ByLibrary("int-quantized", INT8 | {"symmetric": False}, dtype=torch.float32),
}
STATIC = {"type": "float", "strategy": "tensor"}
FLOATS: list[How | ByLibrary] = [
    How("fp8", bits=8, group=16),
    ByLibrary("float-quantized", INT8 | {"type": "float"}, INT8 | STATIC),
]
SPACES = {
    "scales": QuantScales(),
    "zeros": QuantScales(which="zeros"),
    "both": QuantScales(which="both"),
    "codes": QuantCodes(),
}


@pytest.fixture
def quantised(tiny_model: TinyModel, tmp_path: Path) -> Callable[[How | ByLibrary], Path]:
    """The directory of a quantised tiny model; its plain twin is beside it, as `numbers`."""

    def make(how: How | ByLibrary) -> Path:
        quantise(tiny_model("qwen2"), tmp_path / "bits", tmp_path / "numbers", how)
        return tmp_path / "bits"

    return make


async def scores(engine: TorchEngine, targets: tuple[Target, ...] = TARGETS) -> torch.Tensor:
    """Log-probabilities of fixed tokens, (targets, tokens)."""
    asked = [LogprobsRequest(target, PROMPTS[0], CONTINUATION) for target in targets]
    return torch.tensor(await score_all(engine, asked))


@pytest.mark.daily
@pytest.mark.parametrize("how", [*sampled(HOW.values(), 4), *FLOATS])
async def test_adapters_over_a_quantised_base_answer_as_over_the_same_numbers(
    quantised: Callable[[How | ByLibrary], Path], tmp_path: Path, how: How | ByLibrary
) -> None:
    async def answers(path: Path) -> tuple[int, torch.Tensor]:
        async with running_engine(path, Adapter(rank=2), dtype="auto") as engine:
            fingerprint = await engine.apply(Step((Term(5, 0.03),)))
            await engine.load([Genome((Term(i, 0.03),)) for i in range(3)])
            return fingerprint, await scores(engine)

    found, expected = await answers(quantised(how)), await answers(tmp_path / "numbers")
    assert found[0] == expected[0] and found[1].isfinite().all()
    assert torch.equal(found[1], expected[1])
    assert len({tuple(row.tolist()) for row in found[1]}) == len(TARGETS)


@pytest.mark.daily
@pytest.mark.parametrize(
    ("how", "space"),
    sampled(
        [("gptq", "scales"), ("gptq", "codes"), ("compressed-tensors", "scales")]
        + [("gptq with zeros", space) for space in ("zeros", "both", "codes")]
        + [("compressed-tensors", space) for space in ("both", "codes")]
        + [("awq", "both"), ("awq", "codes"), ("int8 with zeros", "both"), ("int8", "codes")],
        5,
    ),
)
async def test_every_target_answers_and_a_saved_centre_answers_as_the_engine_did(
    quantised: Callable[[How], Path], tmp_path: Path, how: str, space: str
) -> None:
    path = quantised(HOW[how])
    asked = [request("centre", prompt) for prompt in PROMPTS]
    async with running_engine(path, SPACES[space]) as engine:
        await engine.load(GENOMES_G)
        at_base = await scores(engine)
        assert torch.equal(at_base[0], at_base[1]), "the centre starts at the base"
        fingerprint = await engine.apply(STEPS[0])
        await engine.load(GENOMES_G)
        answers, logprobs = await sample_all(engine, asked), await scores(engine)
        assert torch.equal(logprobs[0], at_base[0]), "the base does not move"
        assert len({tuple(row.tolist()) for row in logprobs}) == len(TARGETS)
        await engine.save(tmp_path / "saved")
    async with running_engine(tmp_path / "saved", SPACES[space]) as engine:
        assert await sample_all(engine, asked) == answers
        assert torch.equal((await scores(engine, ("centre",)))[0], logprobs[1])
    async with running_engine(path, SPACES[space]) as engine:
        assert await engine.restore(STEPS[:1]) == fingerprint
        assert await sample_all(engine, asked) == answers


@pytest.mark.parametrize("space", ["scales", "both", "codes"])
async def test_saved_files_differ_only_in_the_parameters_of_the_search_space(
    quantised: Callable[[How], Path], tmp_path: Path, space: str
) -> None:
    path = quantised(HOW["gptq with zeros"])
    async with running_engine(path, SPACES[space]) as engine:
        await engine.apply(STEPS[0])
        await engine.save(tmp_path / "saved")
    before = load_file(path / "model.safetensors")
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: (t.dtype, t.shape) for name, t in before.items()} == {
        name: (t.dtype, t.shape) for name, t in after.items()
    }
    differ = {name.rpartition(".")[2] for name in before if not before[name].equal(after[name])}
    assert (
        differ == {"scales": {"scales"}, "both": {"scales", "qzeros"}, "codes": {"qweight"}}[space]
    )


@pytest.mark.parametrize("space", [LowRank(), FullRank()], ids=["low rank", "full rank"])
@pytest.mark.parametrize("engine", ["torch", "vllm"])
async def test_spaces_that_move_weights_are_refused_over_quantised_ones(
    quantised: Callable[[How], Path], space: SearchSpaceBuilder, engine: str
) -> None:
    path = quantised(HOW["gptq"])
    with pytest.raises(ConfigError, match=r"q_proj.weight is quantised to 4 bits; accepted are"):
        if engine == "vllm":  # before it starts, so nothing of it is needed here
            await VLLMEngineBuilder()(model_name=str(path), search_space=space)
        async with running_engine(path, space):
            pass


async def test_floats_host_adapters_alone(quantised: Callable[[How | ByLibrary], Path]) -> None:
    path = quantised(FLOATS[0])
    for space in (QuantScales(), QuantCodes()):
        with pytest.raises(ConfigError, match="no weight quantised to"):
            async with running_engine(path, space):
                pass
    with pytest.raises(ConfigError, match=r"q_proj.weight is quantised to 8 bits"):
        async with running_engine(path, LowRank()):
            pass

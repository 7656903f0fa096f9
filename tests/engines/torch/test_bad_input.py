"""Whatever cannot work is refused in one sentence that says what, where and what is accepted."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import Phi3Config, Phi3ForCausalLM

from es_cookbook import LowRank, TorchEngineBuilder
from es_cookbook.common.errors import ConfigError, ModelError, RequestError
from es_cookbook.engines.base import LogprobsRequest
from es_cookbook.evolution.genome import Genome, Term
from tests.engines.torch.reference import request, running_engine
from tests.tiny_models import VOCABULARY, TinyModel, save_with_tokenizer


async def _build(model_name: object, **options: object) -> None:
    builder = TorchEngineBuilder(**{"device": "cpu"} | options)
    engine = await builder(model_name=str(model_name), search_space=LowRank())
    await engine.close()


@pytest.mark.parametrize("damaged", ["model.safetensors", "tokenizer.json", "config.json"], ids=str)
async def test_a_damaged_file_is_one_sentence(
    tiny_model: TinyModel, tmp_path: Path, damaged: str
) -> None:
    path = shutil.copytree(tiny_model("qwen2"), tmp_path / "model")
    (path / damaged).write_bytes(b"{]")
    with pytest.raises(ModelError, match="cannot load") as raised:
        await _build(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


async def test_a_checkpoint_that_lacks_a_weight_is_refused_not_made_up(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = shutil.copytree(tiny_model("qwen2"), tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights .*q_proj\.weight and 0 more"):
        await _build(path)


async def test_a_prompt_that_leaves_no_room_is_refused(tiny_model: TinyModel) -> None:
    async with running_engine(tiny_model("qwen2"), LowRank(), max_model_len=20) as engine:
        assert engine.traits.context_length == 20
        await engine.sample(request("centre", [5] * 19))
        sentence = "prompt of 20 tokens leaves no room .* of 20 tokens.*engine.max_model_len"
        with pytest.raises(RequestError, match=sentence):
            await engine.sample(request("centre", [5] * 20))
        await engine.logprobs(LogprobsRequest("centre", (5,) * 10, (5,) * 10))
        with pytest.raises(RequestError, match="21 tokens exceed"):
            await engine.logprobs(LogprobsRequest("centre", (5,) * 10, (5,) * 11))


async def test_requests_that_can_never_be_served_are_refused_and_the_engine_goes_on(
    tiny_model: TinyModel,
) -> None:
    async with running_engine(tiny_model("qwen2"), LowRank()) as engine:
        await engine.load([Genome((Term(1, 0.1),))])
        for bad, sentence in (
            (engine.sample(request("centre", [])), "at least one token"),
            (engine.sample(request("centre", [5, VOCABULARY])), "token 40, .*0 to 39"),
            (engine.sample(request("centre", [5, -1])), "token -1"),
            (engine.sample(request("centre", [5], seed=-1)), "seed .*found -1"),
            (engine.sample(request("centre", [5], seed=2**63)), "63-bit"),
            (engine.sample(request("centre", [5], stop=("x", ""))), "empty stop string"),
            (engine.sample(request(1, [5])), "no genome 1: 1 are loaded"),
            (engine.sample(request(-1, [5])), "no genome -1"),
            (engine.logprobs(LogprobsRequest("base", (), (5,))), "a prompt needs"),
            (engine.logprobs(LogprobsRequest("base", (5,), ())), "a continuation needs"),
            (engine.logprobs(LogprobsRequest("base", (5,), (99,))), "continuation has token 99"),
        ):
            with pytest.raises(RequestError, match=sentence):
                await bad
        assert len((await engine.sample(request(0, [5]))).tokens_T) == 12


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
async def test_a_device_that_is_not_there_is_refused(tiny_model: TinyModel, device: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.device: '{device}' .*accepted are auto, cpu"):
        await _build(tiny_model("qwen2"), device=device)


async def test_a_context_past_where_positions_depend_on_the_batch_is_refused(
    tmp_path: Path,
) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    config = Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters=rope | factors,
        pad_token_id=0,
    )
    save_with_tokenizer(Phi3ForCausalLM(config), tmp_path / "phi")
    async with running_engine(tmp_path / "phi", LowRank()) as engine:
        assert engine.traits.context_length == 64
    sentence = r"max_model_len=100: beyond 64 tokens .* Phi3ForCausalLM depend .*accepted is up to"
    with pytest.raises(ConfigError, match=sentence):
        await _build(tmp_path / "phi", max_model_len=100)

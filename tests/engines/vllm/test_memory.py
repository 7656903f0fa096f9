"""What vLLM may take of memory beside the centre, and what does not fit, on literal sizes."""

import dataclasses
import math

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import GIB
from es_cookbook.engines.vllm.memory import (
    CENTRE_WORK_BYTES,
    Needs,
    Shards,
    cpu_cache_gib,
    share_for_vllm,
    slot_rank,
)
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank

# As in test_plan.py: two layers of q 8x8, k and v 4x8, o 8x8, gate and up 10x8, down 8x10, biases
# 8 + 4 + 4, norms 8 + 8; a norm of 8 and a tied table 20x8.
SMALL = Qwen2Config(
    vocab_size=20,
    hidden_size=8,
    intermediate_size=10,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
)
NEEDS = Needs(
    weights=14 * GIB, cache=2 * GIB, centre=20 * GIB, slot=GIB // 2, max_genomes=64, more_slots=1
)


@pytest.mark.parametrize(
    ("tp", "builder", "elements"),
    [
        (1, LowRank(), 864),
        # Halves, but k and v, which have one head.
        (2, LowRank(), 2 * 248),
        # The table has 64 rows; norms and biases are whole.
        (1, FullRank(), 864 + 72 + 512),
        (2, FullRank(), 2 * 248 + 72 + 256),
        # Factors are whole: A and B of 8 + 8 twice, 8 + 4 twice, 8 + 10 three times; two layers.
        (1, Adapter(rank=3), 3 * 220),
        (2, Adapter(rank=3), 3 * 220),
    ],
)
def test_the_centre_on_each_gpu(tp: int, builder: LowRank | FullRank, elements: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SMALL)
    shards = Shards(model, tp)
    assert shards.centre_elements(builder(parameter_infos(model))) == elements
    assert shards.slot_elements() == (220 if tp == 1 else 2 * 87)


def test_transposed_weights_and_experts_on_each_gpu() -> None:
    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_head=2, n_layer=1))
        config = Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=4,
            num_experts=4,
            moe_intermediate_size=10,
        )
        moe = Qwen3MoeForCausalLM(config)
    sides = {"c_attn": (24, 8), "attn.c_proj": (8, 8), "c_fc": (32, 8), "mlp.c_proj": (8, 32)}
    of_gpt2 = Shards(gpt2, 1)
    assert of_gpt2.slot_elements() == sum(map(sum, sides.values()))
    assert of_gpt2.elements(of_gpt2.body) == sum(map(math.prod, sides.values()))
    # Rows of c_attn and c_fc, and columns of both c_proj, are shared by two.
    halves = [(12, 8), (8, 4), (16, 8), (8, 16)]
    assert Shards(gpt2, 2).slot_elements() == sum(map(sum, halves))
    # Attention alone has slots; each of four experts has 20 x 8 and 8 x 10 elements.
    of_moe = Shards(moe, 1)
    assert of_moe.slot_elements() == 2 * 4 * (8 + 8)
    experts = [i for i in of_moe.body if "experts" in i.name]
    assert of_moe.elements(experts) == 2 * 4 * (20 * 8 + 8 * 10)
    down = [i for i in experts if "down_proj" in i.name]
    assert {Shards(moe, 2).shape(info) for info in down} == {(8, 5)}


def test_vllm_and_the_centre_share_what_the_user_allows() -> None:
    share = share_for_vllm(NEEDS, 0.9, 100 * GIB)
    assert share == pytest.approx(0.9 - 0.2 - 0.005)
    assert share * 100 * GIB + NEEDS.centre + CENTRE_WORK_BYTES == pytest.approx(90 * GIB)
    elsewhere = dataclasses.replace(NEEDS, centre=0)
    assert share_for_vllm(elsewhere, 0.9, 100 * GIB) == 0.9


def test_a_centre_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        share_for_vllm(NEEDS, 0.9, 40 * GIB)
    assert str(raised.value) == (
        "the engine does not fit into 36.00 GiB of each GPU's memory "
        "(engine.gpu_memory_utilization=0.9): the centre, in float32, needs 20.50 GiB, weights "
        "14.00 GiB, the cache 2.00 GiB and a genome 512.0 MiB; perturb fewer parameters "
        "(search_space.include), or use more GPUs (engine.tensor_parallel_size)"
    )
    dense = dataclasses.replace(NEEDS, slot=0, weights=int(13.5 * GIB))
    with pytest.raises(ConfigError, match="does not fit"):
        share_for_vllm(dense, 0.9, 40 * GIB)
    assert share_for_vllm(dense, 0.91, 40 * GIB) > 0


def test_more_genomes_than_memory_for_slots_are_told_how_many_fit() -> None:
    # 33.5 GiB are left: 67 slots, of which one is the centre's.
    for max_genomes in (1, 66):
        fitting = dataclasses.replace(NEEDS, max_genomes=max_genomes)
        fitting.check(int(69.5 * GIB), "a GPU", "buy another")
    with pytest.raises(ConfigError) as raised:
        dataclasses.replace(NEEDS, max_genomes=67).check(int(69.5 * GIB), "a GPU", "buy another")
    assert str(raised.value) == (
        "engine.max_genomes=67 needs 34.00 GiB for LoRA slots, 512.0 MiB each, and of 69.50 GiB of "
        "a GPU 33.50 GiB are left beside weights, cache and centre: "
        "there is room for 66 genomes at most"
    )


def test_a_genome_and_the_slots_beside_it_are_the_least() -> None:
    adapters = dataclasses.replace(NEEDS, max_genomes=1, more_slots=2)
    adapters.check(int(37.5 * GIB), "a GPU", "buy another")
    with pytest.raises(ConfigError, match=r"does not fit into 37\.49 GiB .* or buy another$"):
        adapters.check(int(37.49 * GIB), "a GPU", "buy another")


def test_ranks_and_sizes() -> None:
    assert [slot_rank(rank) for rank in (1, 2, 9, 257, 512)] == [1, 8, 16, 320, 512]
    with pytest.raises(ConfigError, match=r"slots of rank 513 .*terms_per_genome.* at most 512"):
        slot_rank(513)


def test_the_cache_on_a_cpu_holds_some_requests_of_the_whole_context() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, intermediate_size=64, num_hidden_layers=4, vocab_size=64)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    token = 2 * 4 * 64 * 4
    assert cpu_cache_gib(model, 4096, 100 * GIB, "float32") == 1.0
    long = GIB // token  # One request of so many tokens takes 1 GiB.
    assert cpu_cache_gib(model, long, 100 * GIB, "float32") == 16.0
    assert cpu_cache_gib(model, long, 20 * GIB, "float32") == 5.0
    assert cpu_cache_gib(model, long, 4 * GIB, "float32") == 2.0
    narrow = model.to(torch.bfloat16)
    assert cpu_cache_gib(narrow, long, 100 * GIB, "auto") == 8.0
    assert cpu_cache_gib(narrow, long, 100 * GIB, "float32") == 16.0

"""What vLLM may take of memory beside the centre, and what does not fit, on literal sizes."""

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
    Shards,
    check_fits,
    cpu_cache_gib,
    slot_rank,
    slots_for,
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


def test_a_centre_that_leaves_no_room_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SMALL)
    space, shards = FullRank()(parameter_infos(model)), Shards(model, 1)
    # The table of 160 numbers has 64 rows in the centre.
    centre, weights = 4 * (864 + 72 + 512), 2 * (864 + 72 + 160)
    sizes = {"size": 2, "cache": 1000, "on_gpu": False}
    enough = centre + weights + 1001
    assert check_fits(shards, space, {}, memory=enough, **sizes) == centre
    with pytest.raises(ConfigError) as raised:
        check_fits(shards, space, {}, memory=enough - 1, **sizes)
    assert str(raised.value) == (
        "the engine does not fit into 8.8 KiB of this machine's available memory: the centre, in "
        "float32, needs 5.7 KiB, weights 2.1 KiB and the cache 1000 B; perturb fewer parameters "
        "(search_space.include), or use a larger machine"
    )


def test_more_genomes_than_memory_for_slots_are_told_how_many_fit() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SMALL)
    space, shards = LowRank(rank=2)(parameter_infos(model)), Shards(model, 1)
    sizes = {"size": 2, "cache": 0, "on_gpu": False}
    # Numbers of a slot of rank 8: 220 a rank; of five slots, one is the centre's.
    enough = 4 * 864 + 2 * (864 + 72 + 160) + 5 * (2 * 8 * 220)
    slots = slots_for(space, 4, 1)
    assert check_fits(shards, space, slots, memory=enough, **sizes) == 4 * 864
    with pytest.raises(ConfigError) as raised:
        check_fits(shards, space, slots, memory=enough - 1, **sizes)
    assert str(raised.value) == (
        "engine.max_genomes: 5 LoRA slots of 3.4 KiB each do not fit into the 17.2 KiB of this "
        "machine's available memory that are left beside weights, cache and centre; lower it to 3 "
        "or less"
    )


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

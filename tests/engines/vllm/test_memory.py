"""What vLLM may take of memory beside the centre, and what does not fit, on literal sizes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config

from es_cookbook import FullRank, LowRank
from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import GIB
from es_cookbook.engines.vllm.memory import Shards, check_fits, cpu_cache_gib, slots_for
from es_cookbook.evolution.spaces.adapter import Adapter

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


def test_too_many_genomes_for_slots_are_refused_with_the_number_that_fits() -> None:
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

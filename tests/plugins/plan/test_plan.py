"""The planner: each formula on numbers worked out by hand, and against what engines really make."""

import gc
import json
import re
import shlex
import sys
import typing
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from es_cookbook import FullRank, LowRank, TorchEngineBuilder, VLLMEngineBuilder
from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.engines.base import ModelEngineBuilder
from es_cookbook.engines.torch.kernels.attention import STEP
from es_cookbook.engines.torch.memory import flat_cache_size
from es_cookbook.engines.torch.population_layers import ROWS_PER_BLOCK
from es_cookbook.engines.vllm.ranks import LORA_RANKS
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.plugins.plan.plan import (
    Machine,
    Plan,
    PlanConfig,
    check,
    core_rate,
    machine_of,
    read_architecture,
    report,
)
from es_cookbook.plugins.quantised.spaces import QuantCodes
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from tests.engines.torch.reference import request, running_engine, sample_all
from tests.said import after_start, refused, typed
from tests.tiny_models import FAMILIES

GUIDE = Path(__file__).parents[3] / "docs" / "multi_gpu.md"
GIB = 1 << 30

# Two layers of: q 8x8, k 4x8, v 4x8, o 8x8, gate 10x8, up 10x8, down 8x10, biases 8 + 4 + 4, norms
# 8 + 8; a norm of 8 and a tied table 20x8. Linear: 2 x 432 = 864. All: 864 + 32 + 40 + 160 = 1,096.
SMALL = {
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
QWEN_7B = {
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
"""Qwen/Qwen2.5-7B-Instruct's config.json, as far as it matters here."""


def planned(model_name: str, **options: Any) -> Plan:
    return Plan(PlanConfig(model_name=model_name, **options), read_architecture(model_name))


def small_plan(engine: object, space: object = None, **options: Any) -> Plan:
    """Eight genomes on two engines x three problems: 4 genomes and 12 requests an engine."""
    settings: dict[str, Any] = {
        "population_size": 8,
        "machine": "2x80gb",
        "problems_per_generation": 3,
        "prompt_tokens": 5,
        "sampled_tokens": 4,
    }
    config = PlanConfig(
        model_name="small", engine=engine, search_space=space or LowRank(), **settings | options
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config.from_dict(SMALL))
    return Plan(config, model)


def write_config(path: Path, values: Mapping[str, object]) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    return str(path)


TORCH, VLLM = TorchEngineBuilder(), VLLMEngineBuilder()
TWO_GPUS = VLLMEngineBuilder(tensor_parallel_size=2)


# vLLM's table has 64 rows: 864 + 72 + 512 elements. Slots: in + out of a layer are 16 + 12 + 12 +
# 16 + 18 + 18 + 18 = 110, and two tables have 20 + 8. Work: twice 2,048 tokens x the widest layer
# (18) x 2 bytes, and 12 rows x 20 logits x 4 bytes. Two GPUs have halves, but the one head of keys
# and values, norms and biases: 2 x 248 + 72 + 256; of slots 12 + 12 + 12 + 12 + 13 + 13 + 13 = 87.
# torch keeps the linear layers once more for the centre. It computes together: q, k, v:
# 3 x (8 + 16); o 16; gate and up: 2 x (8 + 20); down 18. Nine ranks become 12, and six 8. Copies
# for (12 requests + 4,096 prompt tokens) / 8 blocks, rounded up.
BY_HAND: list[tuple[object, object, dict[str, Any], str]] = [
    (VLLM, LowRank(), {}, "parameters=1096 perturbed=864 weights=2*1448 centre=4*864 genome=552"),
    (VLLM, LowRank(), {}, "base_copy=2*864 residents=65*552 work=2*(73728+960) fixed=191608"),
    (VLLM, LowRank(), {}, "token=32 slots=12 cache=12*9*32"),
    (VLLM, LowRank(), {}, "usable=70389387264 missing=191608+512*32-70389387264"),
    (
        TWO_GPUS,
        LowRank(),
        {"machine": "4x80gb"},
        "weights=2*824 centre=8*248 base_copy=2*864 genome=460 token=32",
    ),
    (VLLM, FullRank(), {}, "centre=4*1448 genome=0 rows=3"),
    (VLLMEngineBuilder(terms_per_genome=9), LowRank(), {}, "slot_rank=16"),
    (VLLMEngineBuilder(max_genomes=3), LowRank(), {}, "at_once=3 rows=9 residents=4*552"),
    (VLLM, LowRank(), {"problems_per_generation": 500, "attempts": 2}, "rows=1024 slots=1024"),
    (VLLMEngineBuilder(kv_cache_gib=7 * 9 * 32 / GIB), LowRank(), {}, "slots=7"),
    (TORCH, LowRank(), {}, "weights=2*(1096+896) centre=4*864 base_copy=0 genome=2*2*162"),
    (TORCH, LowRank(), {}, "rows=12 gathered=514*648 slots=2048 cache=2048*16*32"),
    (TorchEngineBuilder(device="cpu"), LowRank(), {}, "genome=4*2*162 token=80"),
    (TORCH, FullRank(), {}, "weights=2*(1096+1096) residents=4*2192 rows=3 gathered=0"),
    (TORCH, LowRank(rank=3), {}, "genome=4*(12*24+3*16+8*28+3*18)"),
    (TorchEngineBuilder(memory_gib=1296 / GIB), LowRank(), {}, "at_once=2 rows=6 residents=3*648"),
    (TorchEngineBuilder(kv_cache_gib=18 * 512 / GIB), LowRank(), {}, "slots=16"),
]


@pytest.mark.daily
@pytest.mark.parametrize(("engine", "space", "options", "expected"), BY_HAND)
def test_a_formula_gives_what_was_worked_out_by_hand(
    engine: object, space: object, options: dict[str, Any], expected: str
) -> None:
    plan = small_plan(engine, space, **options)
    for each in expected.split():
        name, _, value = each.partition("=")
        assert getattr(plan, name) == eval(value), name


def test_the_time_on_a_cpu_is_that_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.float32: 100e9, torch.bfloat16: 300e9}
    monkeypatch.setattr("es_cookbook.plugins.plan.plan.core_rate", rates.__getitem__)
    monkeypatch.setattr("es_cookbook.plugins.plan.plan.num_cores", lambda: 2)
    # 8 genomes x 3 problems; 1,096 parameters, of which the tied head has 160 and prompts none.
    operations = 2 * 24 * (936 * (5 + 4) + 160 * 4)
    plan = small_plan(TorchEngineBuilder(device="cpu", products="bfloat16"))
    assert plan.seconds == pytest.approx(operations / (0.75 * 2 * 300e9))
    plan = small_plan(TorchEngineBuilder(device="cpu", products="float32"))
    assert plan.seconds == pytest.approx(operations / (0.75 * 2 * 100e9))
    assert "products of a generation on 2 cores of this machine" in report(plan)
    assert "products of a generation" not in report(small_plan(TORCH))


def test_the_rate_of_a_core_is_measured_even_after_pythons_distutils(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "setuptools", None)
    assert all(1e8 < core_rate(products) < 1e14 for products in (torch.float32, torch.bfloat16))


# What engines really make.


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_the_real_models(tiny_model: Callable[[str], Path], family: str) -> None:
    path = tiny_model(family)
    model = AutoModelForCausalLM.from_pretrained(path)
    for engine, on_cpu in ((TORCH, False), (TorchEngineBuilder(device="cpu"), True), (VLLM, False)):
        plan = planned(str(path), engine=engine)
        assert plan.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert plan.token == flat_cache_size(model, plan.context, on_cpu=on_cpu).per_token


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt_neox"])
@pytest.mark.slow
async def test_a_torch_engine_has_the_bytes_that_were_planned(
    tiny_model: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model(family)
    options = {"num_lanes": 1, "memory_gib": 0.001, "kv_cache_gib": 0.02, "prefix_cache_gib": 0}
    plan = planned(
        str(path),
        engine=TorchEngineBuilder(device="cpu", num_lanes=1, memory_gib=0.001, kv_cache_gib=0.02),
        search_space=LowRank(rank=2),
        population_size=4,
        problems_per_generation=2,
        prompt_tokens=50,
        sampled_tokens=40,
    )
    genomes_G = [Genome((Term(g, 0.1),)) for g in range(4)]
    model = AutoModelForCausalLM.from_pretrained(path)
    before = tensors()
    gc.freeze()  # Nor need what there is be looked at again.
    async with running_engine(path, LowRank(rank=2), **options) as engine:
        assert engine.traits.capacity == int(0.001 * GIB) // plan.genome
        await engine.load(genomes_G)
        await sample_all(engine, [request(g, [5] * 50, max_tokens=40) for g in range(4)])
        # The base and the centre also have the rotary embeddings' buffers, which are not planned.
        buffers = 2 * bytes_of(model.buffers())
        block = STEP * plan.token
        cache = int(0.02 * GIB) // block * block + block  # the last one is for unused rows
        assert cache - 2 * ROWS_PER_BLOCK * plan.request_tokens * plan.token < plan.cache < cache
        expected = plan.weights + plan.centre + plan.residents + cache + buffers
        for _ in range(50):  # A lane lets go of what it gathered a moment after its answers.
            made = bytes_of(t for address, t in tensors().items() if address not in before)
            if made == expected:
                break
            await anyio.sleep(0.1)
        assert made == expected


def tensors() -> dict[int, torch.Tensor]:
    """Every tensor of this process that owns memory, by address; without packed ones."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    found = [t for t in found if t.device.type == "cpu" and t.layout == torch.strided]
    found = [t for t in found if not isinstance(t, FakeTensor)]  # what other tests' compilers keep
    return {t.untyped_storage().data_ptr(): t for t in found}


def bytes_of(tensors: typing.Iterable[torch.Tensor]) -> int:
    """Of all that they are, memory that they share counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_the_ranks_of_slots_are_vllms() -> None:
    lora = pytest.importorskip("vllm.config.lora", reason="vLLM is not installed")
    assert typing.get_args(lora.MaxLoRARanks) == LORA_RANKS


# What is read, printed and refused.


@pytest.mark.parametrize("options", [(), ("engine=vllm",), ("search_space=full_rank",)])
def test_it_prints_a_page_that_adds_up(options: tuple[str, ...]) -> None:
    page = typed("plan", f"model_name={BUNDLED_MODEL}", "machine=4x80gb", *options).stdout
    assert max(map(len, page.splitlines())) <= max(100, len(page.splitlines()[0]))
    memory = page.split("Memory of each GPU\n")[1].split("\n\n")[0].splitlines()
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
    sizes = [float(line.split()[-2].replace(",", "")) * units[line.split()[-1]] for line in memory]
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("engine=vlm", "did you mean 'vllm'? Accepted: llama_cpp, torch, vllm"),
        ("attempts=0", "attempts must be above 0, found 0"),
        (
            "engine=vllm engine.tensor_parallel_size=3",
            "engine.tensor_parallel_size=3 does not divide this model's 28 attention heads, 4 key "
            "and value heads .*; accepted: 1, 2, 4",
        ),
        ("sampled_tokens=4096", "= 4108 is more than the engine's context of 4096 tokens"),
        (
            "engine.kv_cache_gib=0.3 sampled_tokens=1024",
            "= 1036 is more than the engine's context of 702 tokens",
        ),
        (
            "engine=vllm machine=26gb",
            "does not fit: each GPU would need .* GiB and can give 20.29 GiB; take a larger "
            r"machine, .*engine.tensor_parallel_size \(accepted: 1, 2, 4\) splits a model",
        ),
        ("machine=8xh100", "machine=8xh100: accepted are here, laptop, the memory of a GPU"),
        ("machine=laptop engine=vllm", "engine=vllm is planned for GPUs only"),
        ("machine=laptop", "does not fit: each CPU would need .* and can give 5.95 GiB"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, options: str, sentence: str) -> None:
    said = refused("plan", f"model_name={write_config(tmp_path, QWEN_7B)}", *options.split())
    assert re.search(sentence.replace("?", r"\?"), said), said


def said_by_engine(model: Path, engine: ModelEngineBuilder, space: SearchSpaceBuilder) -> str:
    """Against starting it; it refuses before anything of it runs."""
    with pytest.raises(ConfigError) as raised:
        anyio.run(partial(engine, model_name=str(model), search_space=space))
    return str(raised.value)


@pytest.mark.parametrize(
    ("engine", "space"),
    [
        (VLLMEngineBuilder(), QuantCodes()),
        (VLLMEngineBuilder(), LowRank(rank=513)),
        (TorchEngineBuilder(device="cpu"), LowRank(partitions=1000)),
        (TorchEngineBuilder(device="cpu", kv_cache_gib=1e-5, max_model_len=100), LowRank()),
    ],
)
def test_what_the_engine_refuses_the_plan_refuses_in_the_same_words(
    tiny_model: Callable[[str], Path], engine: ModelEngineBuilder, space: SearchSpaceBuilder
) -> None:
    path = tiny_model("qwen2")
    assert isinstance(engine, TorchEngineBuilder | VLLMEngineBuilder)
    with pytest.raises(ConfigError) as raised:
        check(planned(str(path), engine=engine, search_space=space))
    assert str(raised.value) == said_by_engine(path, engine, space)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "has quantization_config"),
        ({"model_type": "qwen2_moe", "num_experts": 4}, "has num_experts"),
        ({"model_type": "no-such-model"}, "cannot load"),
        ({"hidden_size": "wide"}, "cannot load"),
    ],
)
def test_a_model_that_is_not_counted_is_refused(
    tmp_path: Path, change: Mapping[str, object], sentence: str
) -> None:
    path = write_config(tmp_path, {**SMALL, **change})
    with pytest.raises(ModelError, match=sentence) as raised:
        read_architecture(path)
    assert "\n" not in str(raised.value)


# Machines.


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24gb", Machine(1, 24)), ("4x16.5gb", Machine(4, 16.5)), ("laptop", Machine(0, 8))],
)
def test_machines_by_name(text: str, expected: Machine) -> None:
    assert machine_of(text) == expected


# The guide.


def blocks(language: str) -> list[str]:
    """The guide's code blocks of a language."""
    text = GUIDE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_guide_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path / "Qwen" / "Qwen2.5-7B-Instruct", QWEN_7B)
    monkeypatch.chdir(tmp_path)
    examples = blocks("console")
    assert len(examples) == 2
    for example in examples:
        command, _, page = re.sub(r" \\\n\s+", " ", example).partition("\n")
        start, options = shlex.split(command)[:5], shlex.split(command)[5:]
        assert start == ["$", "python", "-m", "es_cookbook", "plan"]
        done = typed("plan", *options)
        assert page.strip() == (done.stdout or after_start(done.stderr)).strip()

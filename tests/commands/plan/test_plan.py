"""The planner: each formula on numbers worked out by hand, and against what engines really make."""

import dataclasses
import gc
import json
import random
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
import yaml
from transformers import AutoModelForCausalLM, Qwen2Config

from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.commands.plan.plan import main
from es_cookbook.commands.plan.plan_config import GPUS, PlanConfig
from es_cookbook.commands.plan.plan_numbers import Plan, check, read_architecture, report
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json, trust_of
from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.engines.base import ModelEngineBuilder
from es_cookbook.engines.ray.pool import RayPoolBuilder
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.torch.forward import population_layers
from es_cookbook.engines.torch.forward.cache_size import flat_cache_size
from es_cookbook.engines.torch.forward.population_layers import FLAT
from es_cookbook.engines.torch.resident_weights import ResidentWeights
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.engines.vllm.memory import LORA_RANKS
from es_cookbook.engines.wire import encode_genomes, encode_requests, encode_step
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.evolution.spaces.quantised import QuantCodes, QuantScales
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL, CLIConfig
from es_cookbook.rl.types import Observation, SamplingParams
from es_cookbook.runs.history.format import Record, encode
from tests.engines.torch.reference import request, running_engine, sample_all
from tests.said import after_start
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


def small_plan(engine: object, space: object = None, **options: Any) -> Plan:
    """Eight genomes on two engines x three problems: 4 genomes and 12 requests an engine."""
    settings: dict[str, Any] = {
        "population_size": 8,
        "num_engines": 2,
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


def test_weights_by_hand() -> None:
    assert small_plan(VLLM).parameters == 1096
    # The base, and the linear layers once more for the centre: the tied table is one of them, norms
    # are not. Dense genomes perturb all of it.
    assert small_plan(TORCH).weight_bytes() == 2 * (1096 + 1056)
    assert small_plan(TORCH, FullRank()).weight_bytes() == 2 * (1096 + 1096)
    # The table has 64 rows in vLLM: 864 + 72 + 512.
    assert small_plan(VLLM).weight_bytes() == 2 * 1448
    assert small_plan(VLLMEngineBuilder(dtype="float32")).weight_bytes() == 4 * 1448
    # Halves, but the one head of keys and values, norms and biases: 2 x 248 + 72 + 256.
    assert small_plan(TWO_GPUS).weight_bytes() == 2 * 824


def test_a_gpu_holds_a_float32_centre_and_vllms_machine_a_copy_of_the_base() -> None:
    assert small_plan(VLLM).perturbed == 864
    assert small_plan(VLLM).centre_bytes() == small_plan(TORCH).centre_bytes() == 4 * 864
    assert small_plan(TWO_GPUS).centre_bytes() == 4 * 2 * 248
    assert small_plan(TORCH, FullRank()).centre_bytes() == 4 * 1096
    assert small_plan(VLLM, FullRank()).centre_bytes() == 4 * 1448
    assert small_plan(VLLM).base_copy_bytes() == small_plan(TWO_GPUS).base_copy_bytes() == 2 * 864
    assert small_plan(TORCH).base_copy_bytes() == 0


@pytest.mark.parametrize(
    ("rank", "terms", "slot_rank"), [(1, 1, 1), (2, 1, 8), (1, 9, 16), (257, 1, 320), (64, 8, 512)]
)
def test_slots_come_in_ranks_that_vllm_has(rank: int, terms: int, slot_rank: int) -> None:
    engine = VLLMEngineBuilder(terms_per_genome=terms)
    assert small_plan(engine, LowRank(rank=rank)).slot_rank == slot_rank


def test_genomes_by_hand() -> None:
    # in + out of a layer: 16 + 12 + 12 + 16 + 18 + 18 + 18 = 110; two tables of 20 + 8.
    assert small_plan(VLLM).genome_bytes() == 2 * (2 * 110 + 56)
    assert small_plan(VLLM, LowRank(rank=2)).genome_bytes() == 8 * 2 * (2 * 110 + 56)
    # On one of two GPUs: 12 + 12 + 12 + 12 + 13 + 13 + 13 = 87, and the tables whole.
    assert small_plan(TWO_GPUS).genome_bytes() == 2 * (2 * 87 + 56)
    # Computed together: q, k, v: 3 x (8 + 16); o 16; gate and up: 2 x (8 + 20); down 18.
    assert small_plan(TORCH).genome_bytes() == 2 * 2 * 162
    # Nine ranks become 12, and six 8: 12 x 24, 3 x 16, 8 x 28, 3 x 18.
    assert small_plan(TORCH, LowRank(rank=3)).genome_bytes() == 2 * 2 * 614
    assert small_plan(TORCH, FullRank()).genome_bytes() == 2 * 1096
    assert small_plan(VLLM, FullRank()).genome_bytes() == 0


def test_genomes_that_do_not_fit_at_once_go_in_blocks() -> None:
    for_two = TorchEngineBuilder(memory_gib=2 * 648 / GIB)
    for_three = VLLMEngineBuilder(max_genomes=3)
    for engine, space, resident, blocks, requests in (
        (TORCH, LowRank(), 4, 1, 12),
        (for_two, LowRank(), 2, 2, 6),
        (for_three, LowRank(), 3, 2, 9),
        (VLLM, FullRank(), 1, 4, 3),
        (TORCH, FullRank(), 4, 4, 3),
    ):
        plan = small_plan(engine, space)
        assert plan.share == 4
        assert plan.resident() == resident
        # Prompts are sent once a block, to either engine.
        assert plan.prompt_message_bytes() == 2 * blocks * (300 + 3 * (20 + 20 + 5 * 5))
        assert plan.rows() == requests
    # Always one more than genomes, for the centre; vLLM's slots are all made.
    assert small_plan(for_two).resident_bytes() == 3 * 648
    assert small_plan(for_three).resident_bytes() == 4 * 552
    assert small_plan(TORCH, FullRank()).resident_bytes() == 4 * 2192
    assert small_plan(VLLM, FullRank()).resident_bytes() == 0
    assert small_plan(VLLM, FullRank()).block_genomes() == 1
    assert small_plan(VLLM, attempts=2).rows() == 24


def test_the_cache_by_hand() -> None:
    # Keys and values of one head of 4 in two layers; a head cannot be halved.
    assert small_plan(VLLM).kv_bytes() == small_plan(TWO_GPUS).kv_bytes() == 2 * 2 * 4 * 2
    assert small_plan(VLLM).request_tokens == 9
    assert small_plan(TORCH).request_tokens == 16
    assert small_plan(TORCH, prompt_tokens=61).request_tokens == 80
    assert small_plan(VLLM).context_bytes() == 512 * 32
    assert small_plan(TORCH).context_bytes() == 8 * 512 * 32
    assert small_plan(VLLM).slots() == 12
    assert small_plan(VLLM).cache_bytes() == 12 * 9 * 32
    # Memory holds far more requests of 16 tokens; max_batch_size of them are made.
    assert small_plan(TORCH).slots() == 2048
    assert small_plan(TORCH).cache_bytes() == 2048 * 16 * 32
    holds_18 = TorchEngineBuilder(kv_cache_gib=18 * 16 * 32 / GIB)
    assert small_plan(holds_18).slots() == 16
    assert small_plan(VLLMEngineBuilder(extra={"max_num_seqs": 5})).slots() == 5
    holds_7 = VLLMEngineBuilder(kv_cache_gib=7 * 9 * 32 / GIB)
    assert small_plan(holds_7).slots() == 7
    many = small_plan(VLLM, problems_per_generation=500)
    assert many.rows() == many.slots() == many.max_rows == 1024
    assert small_plan(VLLM).pass_tokens == 2048
    few_tokens = VLLMEngineBuilder(extra={"max_num_batched_tokens": 16})
    assert small_plan(few_tokens).pass_tokens == 16
    assert small_plan(TORCH).pass_tokens == 4096


def test_what_remains_of_a_gpu_by_hand() -> None:
    plan = small_plan(VLLM)
    # Twice: 2,048 tokens x the widest layer (18) x 2 bytes, and 12 rows x 20 logits x 4 bytes.
    assert plan.work_bytes() == 2 * (73_728 + 960)
    assert plan.gathered_bytes() == 0
    assert plan.usable_bytes() == 72_000_000_000 - GIB - GIB // 2 == 70_389_387_264
    assert plan.fixed_bytes() == 2896 + 4 * 864 + 65 * 552 + 149_376 == 191_608
    assert plan.cache_room() == 70_389_387_264 - 191_608
    assert plan.remaining_bytes() == 70_389_387_264 - 191_608 - 3456
    assert plan.genomes_that_fit() == 64 + 127_516_652
    assert plan.shortfall_bytes() == 191_608 + 16_384 - 70_389_387_264
    given = small_plan(VLLMEngineBuilder(kv_cache_gib=1.0))
    assert given.cache_room() == GIB
    assert given.shortfall_bytes() == 191_608 + GIB - 70_389_387_264
    assert small_plan(VLLM, FullRank()).genomes_that_fit() == 1
    in_torch = small_plan(TORCH)
    assert in_torch.usable_bytes() == 80_000_000_000 - GIB - GIB // 2
    # Blocks of 8 rows: (12 requests + 4,096 prompt tokens) / 8, rounded up.
    assert in_torch.gathered_bytes() == 514 * 648
    assert small_plan(TORCH, FullRank()).gathered_bytes() == 0


def test_tokens_and_bytes_by_hand() -> None:
    config = PlanConfig(model_name=str(BUNDLED_MODEL), attempts=2, prompt_tokens=10)
    page = report(Plan(config, read_architecture(config.model_name)))
    rollouts = 64 * 32 * 2
    assert re.search(rf"tokens of prompts, all engines +{rollouts * 10:,}\n", page)
    assert re.search(rf"tokens sampled, all engines +{rollouts * 32:,}\n", page)
    plan = small_plan(VLLM, population_size=64, num_engines=8, problems_per_generation=200)
    assert plan.terms == 32
    assert plan.genome_message_bytes() == 32 + 64 * 20
    assert plan.step_message_bytes() == 8 * (16 + 512)
    assert plan.prompt_message_bytes() == 8 * (300 + 200 * (20 + 20 + 25))
    assert plan.history_bytes() == 150 + 1248 + 1280


def test_a_gpu_is_the_tables_where_nothing_else_is_said() -> None:
    assert small_plan(VLLM).gpu_bytes == 80_000_000_000
    assert small_plan(VLLM, gpu="h200").gpu_bytes == 141_000_000_000
    assert small_plan(VLLM, gpu="h200", gpu_memory=16.0).gpu_bytes == 16_000_000_000


# What engines really make.


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_the_real_models(tiny_model: Callable[[str], Path], family: str) -> None:
    path = tiny_model(family)
    model = AutoModelForCausalLM.from_pretrained(path)
    architecture = read_architecture(str(path))
    plan = Plan(PlanConfig(model_name=str(path)), architecture)
    assert plan.parameters == sum(parameter.numel() for parameter in model.parameters())
    here = PlanConfig(model_name=str(path), engine=TorchEngineBuilder(device="cpu"))
    for each, on_cpu in ((plan, False), (Plan(here, architecture), True)):
        kept = flat_cache_size(model, plan.context, on_cpu=on_cpu)
        assert each.kv_bytes() == kept.per_token


@pytest.mark.anyio
@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt_neox"])
async def test_a_torch_engine_has_the_bytes_that_were_planned(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    path = tiny_model(family)
    options = {"num_lanes": 1, "memory_gib": 0.001, "kv_cache_gib": 0.02, "prefix_cache_gib": 0}
    config = PlanConfig(
        model_name=str(path),
        engine=TorchEngineBuilder(device="cpu", num_lanes=1, memory_gib=0.001, kv_cache_gib=0.02),
        search_space=LowRank(rank=2),
        population_size=4,
        problems_per_generation=2,
        prompt_tokens=50,
        sampled_tokens=40,
    )
    plan = Plan(config, read_architecture(str(path)))
    genomes_G = [Genome((Term(g, 0.1),)) for g in range(4)]
    model = AutoModelForCausalLM.from_pretrained(path)
    before = tensors()
    async with running_engine(path, LowRank(rank=2), **options) as engine:
        assert engine.traits.capacity == int(0.001 * GIB) // plan.genome_bytes()
        await engine.load(genomes_G)
        await sample_all(engine, [request(g, [5] * 50, max_tokens=40) for g in range(4)])
        # The base and the centre also have the rotary embeddings' buffers, which nobody plans.
        planned = plan.weight_bytes() + plan.centre_bytes() + plan.resident_bytes()
        planned += plan.cache_bytes() + 2 * bytes_of(model.buffers())
        for _ in range(50):  # A lane lets go of what it gathered a moment after its answers.
            made = bytes_of(t for address, t in tensors().items() if address not in before)
            if made == planned:
                break
            await anyio.sleep(0.1)
        assert made == planned


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt_neox"])
def test_what_a_torch_engine_holds_has_the_bytes_that_were_planned(
    tiny_model: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(population_layers, "suits_kernels", lambda _: False)  # as on a GPU
    path = tiny_model(family)
    config = PlanConfig(model_name=str(path), search_space=LowRank(rank=2), population_size=4)
    plan = Plan(config, read_architecture(str(path)))
    base = AutoModelForCausalLM.from_pretrained(path)
    weights = ResidentWeights(base, config.search_space(parameter_infos(base)), 1, FLAT)
    weights.memory_bytes = GIB
    weights.load([Genome((Term(g, 0.1),)) for g in range(4)])
    tables = [table for table in weights.model.tables or [] if table is not None]
    pairs = [tensor for table in tables for tensor in (table.a_G_R_N, table.b_G_N_R)]
    assert bytes_of(pairs) == plan.resident_bytes()
    of_a_batch = weights.model.gather(torch.zeros(3, dtype=torch.int64))
    rows = [each for each in of_a_batch or [] if isinstance(each, population_layers.LowRankRows)]
    gathered = [tensor for each in rows for tensor in each.gathered or ()]
    assert bytes_of(gathered) == 3 * plan.genome_bytes()
    parameters = [*base.parameters(), *weights.model.module.parameters()]
    assert bytes_of(parameters) == plan.weight_bytes()
    assert bytes_of(weights.centre.weights.values()) == plan.centre_bytes()


def tensors() -> dict[int, torch.Tensor]:
    """Every tensor of this process with memory of its own, by its address; none that is packed."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    found = [t for t in found if t.device.type == "cpu" and t.layout == torch.strided]
    return {t.untyped_storage().data_ptr(): t for t in found}


def bytes_of(tensors: typing.Iterable[torch.Tensor]) -> int:
    """Of all that they are, memory that they share counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def slots_of_rank(worker: Any) -> tuple[int, int, float, int, int]:
    """Run in vLLM's worker: bytes of slots, of weights, of a token's cache; rows and tokens."""
    stacked = ("lora_a_stacked", "lora_b_stacked")
    model, cache = worker.model_runner.model, worker.model_runner.kv_caches
    found = [getattr(m, name) for m in model.modules() for name in stacked if hasattr(m, name)]
    slots = [t for entry in found for t in ([entry] if torch.is_tensor(entry) else entry)]
    tokens = worker.cache_config.num_gpu_blocks * worker.cache_config.block_size
    scheduler = worker.model_runner.scheduler_config
    sizes = [
        sum(t.numel() * t.element_size() for t in of_kind)
        for of_kind in (slots, list(model.parameters()), cache)
    ]
    rows = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    return sizes[0], sizes[1], sizes[2] / tokens, *rows


@pytest.mark.anyio
@pytest.mark.xdist_group("vllm")
@pytest.mark.usefixtures("warm_vllm")
async def test_vllm_has_the_slots_weights_and_cache_that_were_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed, and could not be: see the Makefile")
    import cloudpickle
    from vllm.v1.engine.async_llm import AsyncLLM

    from tests.integration.vllm_models import make_vllm_model

    path = make_vllm_model("llama", tmp_path / "llama")
    builder = VLLMEngineBuilder(
        max_genomes=3,
        tensor_parallel_size=2,
        kv_cache_gib=0.05,
        gpu_memory_utilization=0.3,
        extra={"block_size": 32},
    )
    config = PlanConfig(
        model_name=str(path), engine=builder, population_size=4, search_space=LowRank(rank=2)
    )
    plan = Plan(config, read_architecture(str(path)))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    started = []
    start = AsyncLLM.from_engine_args

    def start_and_keep(*arguments: Any) -> AsyncLLM:
        started.append(start(*arguments))
        return started[-1]

    monkeypatch.setattr(AsyncLLM, "from_engine_args", start_and_keep)
    engine = await builder(model_name=str(path), search_space=LowRank(rank=2))
    try:
        ranks = await started[0].collective_rpc(slots_of_rank)
    finally:
        await engine.close()
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    expected = (
        *(plan.resident_bytes(), plan.weight_bytes(), plan.kv_bytes()),
        *(plan.max_rows, plan.pass_tokens),
    )
    assert [tuple(rank) for rank in ranks] == [expected, expected]


def test_the_ranks_of_slots_are_vllms() -> None:
    lora = pytest.importorskip("vllm.config.lora", reason="vLLM is not installed")
    assert typing.get_args(lora.MaxLoRARanks) == LORA_RANKS


def test_messages_have_the_bytes_that_were_planned() -> None:
    genomes_G = [Genome((Term(derive_seed(0, "x", g), 0.1),)) for g in range(64)]
    sent = sum(len(encode_genomes(genomes_G[e * 8 : e * 8 + 8])) for e in range(8))
    plan = small_plan(VLLM, population_size=64, num_engines=8)
    assert sent == plan.genome_message_bytes()
    step = Step(tuple(genome.terms[0] for genome in genomes_G[:32]))
    assert 8 * len(encode_step(step)) == plan.step_message_bytes()
    rng = random.Random(0)
    for problems, attempts, tokens in ((1, 1, 12), (32, 1, 12), (50, 4, 150)):
        batch, _ = encode_requests(
            [
                request_
                for p in range(problems)
                for prompt in [Observation(tuple(rng.randrange(150_000) for _ in range(tokens)))]
                for k in range(attempts)
                for request_ in _asked_of_eight(prompt, derive_seed(0, "seed", p, k))
            ]
        )
        planned = small_plan(
            VLLM,
            num_engines=1,
            problems_per_generation=problems,
            attempts=attempts,
            prompt_tokens=tokens,
        ).prompt_message_bytes()
        assert 0.6 * planned < len(batch.samples) + len(batch.who) <= planned


_SAMPLING = SamplingParams(max_tokens=32)


def _asked_of_eight(prompt: Observation, seed: int) -> list[Any]:
    return [
        dataclasses.replace(request(g, [1]), observation=prompt, params=_SAMPLING, seed=seed)
        for g in range(8)
    ]


@pytest.mark.parametrize("genomes", [30, 64])
def test_a_line_of_the_history_is_as_long_as_planned(genomes: int) -> None:
    rng = random.Random(1)
    seeds = [derive_seed(0, "genome", g) for g in range(genomes // 2)]
    step = Step(tuple(Term(seed, 0.02 / genomes * rng.gauss(0, 1.4)) for seed in seeds))
    fitness_G = tuple(rng.gauss(0, 1) for _ in range(genomes))
    line = encode(Record(7, step, fitness_G, 2**63 + 5))
    plan = small_plan(VLLM, population_size=genomes)
    assert plan.history_bytes() == pytest.approx(len(line), rel=0.02)


def test_what_is_not_given_is_the_main_job() -> None:
    config, job = PlanConfig(model_name=str(BUNDLED_MODEL)), CLIConfig()
    assert isinstance(job.optimizer, ES) and isinstance(job.dataset, CountdownDatasetBuilder)
    assert config.engine == job.engine
    assert config.search_space == job.search_space
    assert config.population_size == job.optimizer.population_size
    assert config.problems_per_generation == job.dataset.problems_per_generation
    assert config.attempts == job.attempts
    assert config.sampled_tokens == job.sampling.max_tokens
    assert job.optimizer.antithetic, "a mirrored pair is one term"


# What is read, printed and refused.


def test_a_directory_needs_no_more_than_its_config(tmp_path: Path) -> None:
    assert (
        Plan(
            PlanConfig(model_name="x"), read_architecture(write_config(tmp_path, SMALL))
        ).parameters
        == 1096
    )


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    """The exit code, and what was printed and said, but for what is read."""
    code = 0
    try:
        run_cli(main, PlanConfig, options)
    except SystemExit as stop:
        code = typing.cast(int, stop.code)
    page, said = capsys.readouterr()
    return code, page, after_start(said)


@pytest.mark.parametrize("options", [(), ("engine=vllm",), ("search_space=full_rank",)])
def test_it_prints_a_page_that_adds_up(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    code, page, said = run(capsys, f"model_name={BUNDLED_MODEL}", "num_engines=4", *options)
    assert (code, said) == (0, "")
    assert max(map(len, page.splitlines())) <= max(100, len(page.splitlines()[0]))
    memory = page.split("Memory of each GPU\n")[1].split("\n\n")[0].splitlines()
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
    sizes = [float(line.split()[-2].replace(",", "")) * units[line.split()[-1]] for line in memory]
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        ("gpu=h10", 1, "gpu=h10 is not in the table: did you mean 'h100'?.*gpu_memory"),
        ("engine=vlm", 2, "did you mean 'vllm'? Accepted: torch, vllm"),
        ("engine=ray", 2, "unknown name 'ray': accepted: torch, vllm"),
        ("search_space=lowrank", 2, "did you mean 'low_rank'? Accepted: full_rank, low_rank"),
        ("num_engine=8", 2, "did you mean 'num_engines'?"),
        ("attempts=0", 1, "attempts must be above 0, found 0"),
        ("gpu_memory=-1", 1, "gpu_memory must be above 0, found -1.0"),
        ("num_engines=65", 1, "num_engines=65 is more than population_size=64"),
        (
            "engine=vllm engine.tensor_parallel_size=3",
            1,
            "engine.tensor_parallel_size=3 does not divide this model's 28 attention heads, 4 key "
            "and value heads .*; accepted: 1, 2, 4",
        ),
        ("sampled_tokens=4096", 1, "= 4108 is more than the engine's context of 4096 tokens"),
        (
            "engine.kv_cache_gib=0.1 engine.max_model_len=1024",
            1,
            "engine.kv_cache_gib=0.1 holds 234 tokens a request, fewer than the context of 1024; "
            "raise engine.kv_cache_gib to at least 0.438 or lower engine.max_model_len",
        ),
        (
            "engine=vllm engine.kv_cache_gib=0.05 engine.max_model_len=1024",
            1,
            "engine.kv_cache_gib=0.05 is too little for a context of 1024 tokens; raise it to "
            "0.055,.*this plan needs 44",
        ),
        (
            "engine.max_model_len=32768",
            1,
            "GiB of the .* GiB of free memory holds .* tokens a request, fewer than the context "
            "of 32768; raise engine.kv_cache_gib to at least 14",
        ),
        (
            "engine.kv_cache_gib=0.3 sampled_tokens=1024",
            1,
            "= 1036 is more than the engine's context of 702 tokens",
        ),
        ("population_size=7", 1, "population_size must be even with antithetic=True, .* found 7"),
        ("engine=vllm search_space.rank=513", 1, "slots of rank 513 .* a rank of at most 512"),
        ("engine=vllm engine.quantization=awq", 1, "engine.quantization: quantised weights"),
        ("search_space.exclude=nothing*", 1, "search_space.exclude pattern 'nothing*' matches no"),
        (
            "engine=vllm gpu_memory=26",
            1,
            "does not fit: each GPU would need .* GiB and can give 20.29 GiB, .* GiB too "
            "little; what would do: engine.tensor_parallel_size=4, or gpu=a100-80gb$",
        ),
        (
            "engine=vllm engine.max_genomes=10000 population_size=10000 num_engines=100",
            1,
            "does not fit: .*what would do: .*engine.max_genomes=100$",
        ),
        ("engine=vllm gpu_memory=1", 1, "and can give 0 B, .* what would do: gpu=a100-80gb$"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: str,
    code: int,
    sentence: str,
) -> None:
    path = write_config(tmp_path, QWEN_7B)
    found, page, said = run(capsys, f"model_name={path}", *options.split())
    assert (found, page, said.count("\n")) == (code, "", 1)
    assert re.search(sentence.replace("?", r"\?").replace("*' ", r"\*' "), said), said


def said_by_engine(model: Path, engine: ModelEngineBuilder, space: SearchSpaceBuilder) -> str:
    """Against starting it; it refuses before anything of it runs."""
    with pytest.raises(ConfigError) as raised:
        anyio.run(partial(engine, model_name=str(model), search_space=space))
    return str(raised.value)


@pytest.mark.parametrize(
    ("engine", "space"),
    [
        (VLLMEngineBuilder(), QuantCodes()),
        (VLLMEngineBuilder(), QuantScales()),
        (VLLMEngineBuilder(), LowRank(rank=513)),
        (VLLMEngineBuilder(terms_per_genome=300), LowRank(rank=2)),
        (VLLMEngineBuilder(), LowRank(exclude=("nothing*",))),
        (TorchEngineBuilder(device="cpu"), LowRank(num_blocks=1000)),
        (TorchEngineBuilder(device="cpu", kv_cache_gib=1e-5), FullRank()),
        (TorchEngineBuilder(device="cpu", kv_cache_gib=1e-5, max_model_len=100), LowRank()),
    ],
)
def test_what_the_engine_refuses_the_plan_refuses_in_the_same_words(
    tiny_model: Callable[[str], Path], engine: ModelEngineBuilder, space: SearchSpaceBuilder
) -> None:
    path = tiny_model("qwen2")
    assert isinstance(engine, TorchEngineBuilder | VLLMEngineBuilder)
    with pytest.raises(ConfigError) as raised:
        config = PlanConfig(model_name=str(path), engine=engine, search_space=space)
        check(Plan(config, read_architecture(str(path))))
    assert str(raised.value) == said_by_engine(path, engine, space)


def test_a_context_that_positions_do_not_reach_is_refused_by_both(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 256}
    path = write_config(tmp_path, {**SMALL, "rope_parameters": {**rope, "rope_theta": 1e4}})
    model, engine = read_architecture(path), TorchEngineBuilder(max_model_len=500)
    with pytest.raises(ConfigError, match="beyond 256 tokens the positions of") as raised:
        engine.context_length(model)
    with pytest.raises(ConfigError, match=re.escape(str(raised.value))):
        Plan(PlanConfig(model_name=path, engine=engine), model)


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


def test_a_model_that_keeps_more_than_keys_and_values_is_refused(tmp_path: Path) -> None:
    bloom = {"model_type": "bloom", "vocab_size": 20, "hidden_size": 8, "n_layer": 1, "n_head": 2}
    path = write_config(tmp_path, bloom)
    plan = Plan(PlanConfig(model_name=path), read_architecture(path))
    with pytest.raises(ModelError, match="no attention hook"):
        check(plan)


def test_a_directory_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = run(capsys, "model_name=./nowhere")
    assert (code, said) == (1, "model_name: there is no directory './nowhere'\n")


def test_the_config_round_trips_through_json() -> None:
    config = PlanConfig(model_name="x", engine=TWO_GPUS, gpu="h200")
    text = config_to_json(config)
    assert config_from_json(text, trust_of(text)) == config  # No run is made of it.


def test_planning_takes_no_memory_for_weights(tmp_path: Path) -> None:
    model = read_architecture(write_config(tmp_path, QWEN_7B))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    config = PlanConfig(model_name="x", engine=VLLM)
    assert "7,615,616,512 parameters in bfloat16" in report(Plan(config, model))
    check(Plan(config, model))


def test_the_table_is_in_gigabytes() -> None:
    assert all(24 <= memory <= 180 for memory in GPUS.values())


# The guide.

RAY_JOB_FIELDS = {
    *("activeDeadlineSeconds", "backoffLimit", "clusterSelector", "deletionStrategy", "entrypoint"),
    *("entrypointNumCpus", "entrypointNumGpus", "entrypointResources", "jobId", "managedBy"),
    *("metadata", "rayClusterSpec", "runtimeEnvYAML", "shutdownAfterJobFinishes"),
    *("submissionMode", "submitterConfig", "submitterPodTemplate", "suspend"),
    "ttlSecondsAfterFinished",
}
"""`spec` of ray.io/v1 RayJob, as ray-operator/apis/ray/v1/rayjob_types.go of KubeRay has it."""
CLUSTER_FIELDS = {
    *("autoscalerOptions", "enableInTreeAutoscaling", "headGroupSpec", "headServiceAnnotations"),
    *("rayVersion", "suspend", "workerGroupSpecs"),
}
HEAD_FIELDS = {"enableIngress", "headService", "rayStartParams", "serviceType", "template"}
WORKER_FIELDS = {
    *("groupName", "maxReplicas", "minReplicas", "numOfHosts", "rayStartParams", "replicas"),
    *("scaleStrategy", "template"),
}
"""The same of raycluster_types.go."""


def blocks(language: str) -> list[str]:
    """The guide's code blocks of a language."""
    text = GUIDE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_guide_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path / "Qwen" / "Qwen2.5-7B-Instruct", QWEN_7B)
    monkeypatch.chdir(tmp_path)
    examples = blocks("console")
    assert len(examples) == 2
    for example in examples:
        command, _, page = re.sub(r" \\\n\s+", " ", example).partition("\n")
        start, options = shlex.split(command)[:5], shlex.split(command)[5:]
        assert start == ["$", "python", "-m", "es_cookbook", "plan"]
        _, printed, said = run(capsys, *options)
        assert page.strip() == (printed or said).strip()


def recipe_options(script: str) -> list[list[str]]:
    joined = re.sub(r" \\\n\s+", " ", script)
    found = re.findall(r"-m es_cookbook\.recipes\.countdown\.train_cli (.*)$", joined, re.MULTILINE)
    return [shlex.split(options) for options in found]


def parsed(options: list[str]) -> RayPoolBuilder:
    """The pool of one of the guide's commands, each option of which the recipe has to know."""
    seen: list[CLIConfig] = []
    run_cli(seen.append, CLIConfig, options)
    assert isinstance(seen[0].engine, RayPoolBuilder)
    return seen[0].engine


def test_the_guides_commands_are_runs_that_divide_their_gpus() -> None:
    pools = [parsed(options) for options in recipe_options("\n".join(blocks("sh")))]
    assert len(pools) == 3
    for pool in pools:
        assert isinstance(pool.engine, VLLMEngineBuilder)
        assert pool.num_gpus == pool.engine.tensor_parallel_size
        assert pool.num_engines * pool.engine.max_genomes == 64, "the population, and no empty slot"
        assert (pool.num_engines * pool.num_gpus) % 8 == 0


def test_the_manifest_has_kuberays_fields_and_room_for_its_engines() -> None:
    (manifest,) = map(yaml.safe_load, blocks("yaml"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
    job, cluster = manifest["spec"], manifest["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert job.keys() <= RAY_JOB_FIELDS
    assert cluster.keys() <= CLUSTER_FIELDS
    assert head.keys() <= HEAD_FIELDS and {"rayStartParams", "template"} <= head.keys()
    assert workers.keys() <= WORKER_FIELDS and {"groupName", "template"} <= workers.keys()
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container.keys() == {"name", "image", "resources", "volumeMounts"}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    constraints = (GUIDE.parents[1] / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nray=={cluster['rayVersion']}\n" in constraints

    (options,) = recipe_options(f"{job['entrypoint']}\n")
    pool = parsed(options)
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    engines = pool.num_engines // workers["replicas"]
    assert pool.address == "auto"
    assert engines * (pool.num_gpus or 0) == int(limits["nvidia.com/gpu"])
    assert engines * (pool.num_cpus or 0) <= int(limits["cpu"])
    assert engines * 12.2 < int(limits["memory"].removesuffix("Gi")), "base copies"


def test_the_guide_names_what_there_is() -> None:
    formulas = GUIDE.read_text(encoding="utf-8").split("## Memory and bytes, by formula")[1]
    rows = re.findall(r"^\|.*\| ([^|]*) \|$", formulas, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(named) >= 15
    assert [name for name in named if not hasattr(small_plan(VLLM), name)] == []
    for path in re.findall(r"`((?:es_cookbook|tests|docs)/[\w/.]+)`", formulas):
        assert (GUIDE.parents[1] / path).exists()

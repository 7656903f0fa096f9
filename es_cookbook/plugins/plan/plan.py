"""Print what a run needs before it begins: memory, rollouts, tokens, and seconds on a CPU.

    python -m es_cookbook plan model_name=Qwen/Qwen2.5-7B-Instruct machine=8x80gb engine=vllm
    ... machine=laptop

Only the model's config.json is read, and no GPU is needed. Options default to the main job's.
docs/multi_gpu.md is the guide. An engine takes one GPU, or `engine.tensor_parallel_size` of them,
and the population is divided among the engines.

`Plan` has a formula per line, and the tests compare them with real engines. Left out: time on GPUs,
experts, compressed keys, quantised weights, messages, Envs and evaluations.
"""

import asyncio
import copy
import dataclasses
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

import chz

from es_cookbook import ES, TorchEngineBuilder, VLLMEngineBuilder
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.common.names import Names
from es_cookbook.common.terminal import GIB, plural, say, show_bytes
from es_cookbook.engines.base import ENGINE_NAMES, EngineBuilder, Requests
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SEARCH_SPACE_NAMES, SearchSpaceBuilder
from es_cookbook.runs.tracking.jsonl import duration_in_words

# Modules that need torch are imported where they are used, so that --help is fast.
if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from es_cookbook.engines.torch.memory import CacheSize

_COUNTED = TorchEngineBuilder, VLLMEngineBuilder
"""Engines whose needs are counted here; others measure theirs (`EngineBuilder.needs`)."""
_ENGINES = Names({n: ENGINE_NAMES[n] for n in ENGINE_NAMES if n != "ray"}, default="torch")
_SEARCH_SPACES = Names(
    {name: SEARCH_SPACE_NAMES[name] for name in ("low_rank", "full_rank", "adapter")},
    default="low_rank",
)

_LAPTOP = 8
"""GB of a laptop's memory that a run may use."""
_SHARE_OF_RATE = 0.75
"""Share of the peak rate of matrix products that a generation reaches on a CPU."""
_ROWS, _IN, _OUT = 128, 576, 1024
"""Shape of the product whose rate is measured."""


class Machine(NamedTuple):
    """GPUs with so many GB (10⁹ bytes) each; without GPUs, the memory of the machine."""

    num_gpus: int
    gigabytes: float


def machine_of(text: str) -> Machine:
    """Parse the option `machine`: "here", "laptop", "80gb" or "8x80gb".

    Raises:
        ConfigError: It is written differently.
    """
    if text == "here":
        return _this_machine()
    if text == "laptop":
        return Machine(0, _LAPTOP)
    found = re.fullmatch(r"(?:([1-9]\d{0,4})x)?(\d+(?:\.\d+)?)gb", text)
    if not found or not float(found[2]):
        raise ConfigError(
            f"machine={text}: accepted are here, laptop, the memory of a GPU (80gb), or several "
            "(8x80gb)"
        )
    return Machine(int(found[1] or 1), float(found[2]))


def _this_machine() -> Machine:
    import torch

    from es_cookbook.engines.torch.memory import free_bytes

    if not (count := torch.cuda.device_count()):
        return Machine(0, free_bytes(torch.device("cpu")) / 1e9)
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
    return Machine(count, min(sizes) / 1e9)


@chz.chz
class PlanConfig:
    """Print what a run needs: memory, rollouts, tokens, and seconds on a CPU."""

    model_name: str = chz.field(doc="model directory (config.json is enough) or Hub name")
    machine: str = chz.field(default="80gb", doc="here, laptop, a GPU (24gb) or several (8x80gb)")
    engine: EngineBuilder = _ENGINES.field("kind of engine")
    search_space: SearchSpaceBuilder = _SEARCH_SPACES.field("which parameters genomes perturb")
    population_size: int = chz.field(default=64, doc="genomes per generation, in mirrored pairs")
    problems_per_generation: int = chz.field(default=32, doc="problems that each genome attempts")
    attempts: int = chz.field(default=1, doc="rollouts of one genome at one problem")
    prompt_tokens: int = chz.field(default=12, doc="tokens per prompt")
    sampled_tokens: int = chz.field(default=32, doc="tokens sampled per rollout")

    @chz.validate
    def _fields(self) -> None:
        fields = chz.chz_fields(self)
        numbers = [name for name in fields if isinstance(getattr(self, name), int | float)]
        check_range(self, *numbers, above=0)
        machine = machine_of(self.machine)
        if isinstance(self.engine, VLLMEngineBuilder):
            self.engine.check_space(self.search_space)
            if not machine.num_gpus:
                raise ConfigError(
                    "engine=vllm is planned for GPUs only: leave it out, or name a GPU"
                )
        is_counted = isinstance(self.engine, _COUNTED)
        if is_counted and isinstance(self.search_space, Adapter):
            raise ConfigError(
                f"search_space=adapter is not counted for engine={self.engine.name}; accepted: "
                "low_rank and full_rank, or an engine that measures, as llama_cpp"
            )
        ES(population_size=self.population_size)  # Refuses an odd one: pairs are mirrored.


def read_architecture(model_name: str) -> "PreTrainedModel":
    """Build the model on the meta device, without memory; its directory needs no weights.

    Raises:
        ModelError: It cannot be read, or has parts that are not counted.
    """
    from es_cookbook.checkpoints.models import load_architecture

    model = load_architecture(model_name, weights=False)
    for field in ("num_experts", "num_local_experts", "kv_lora_rank", "quantization_config"):
        if getattr(model.config.get_text_config(), field, None):
            raise ModelError(
                f"model_name: {model_name!r} has {field} in its config.json; experts, compressed "
                "keys and quantised weights are not counted here"
            )
    return model


class Plan:
    """The needs of a run, in bytes of one GPU's memory unless a line says otherwise.

    An engine samples a *block* at a time: its resident genomes, or one dense genome. *Rows* are
    requests that decode together; a *pass* is one forward pass over prompts.

    Raises:
        ConfigError: vLLM has no slots for such genomes.
        ModelError: The torch engine cannot run the model.
    """

    def __init__(self, config: PlanConfig, model: "PreTrainedModel") -> None:
        from es_cookbook.engines.vllm.memory import Shards

        engine, machine = config.engine, machine_of(config.machine)
        assert isinstance(engine, _COUNTED)
        self.config, self.model, self.engine = config, model, engine
        self.vllm = engine if isinstance(engine, VLLMEngineBuilder) else None
        self.on_cpu = not machine.num_gpus or getattr(engine, "device", "") == "cpu"
        self.device = "CPU" if self.on_cpu else "GPU"
        self.tp = self.vllm.tensor_parallel_size if self.vllm else 1
        self.num_engines = min(max(1, machine.num_gpus // self.tp), config.population_size)
        self.shards = Shards(model, self.tp)
        self.space = config.search_space(self.shards.infos)
        self.rank = self.space.rank or 0  # 0: dense genomes
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.perturbed = sum(math.prod(shape) for shape in self.space.shapes.values())
        head = cast("nn.Linear", model.get_output_embeddings()).weight
        self.vocabulary, self.hidden = head.shape
        own_dtype = str(model.config.dtype or "float32").removeprefix("torch.")
        self.dtype = own_dtype if engine.dtype == "auto" else engine.dtype
        self.size = 4 if self.dtype == "float32" else 2  # bytes of a weight
        self.context = engine.context_length(model)
        self.length = config.prompt_tokens + config.sampled_tokens
        self.share = math.ceil(config.population_size / self.num_engines)  # genomes of an engine
        self.attempted = config.problems_per_generation * config.attempts
        self.memory_bytes = int(machine.gigabytes * 1e9)
        if isinstance(engine, VLLMEngineBuilder):
            self._on_vllm(engine)
        else:
            self._on_torch(engine)

    def _on_vllm(self, engine: VLLMEngineBuilder) -> None:
        from es_cookbook.engines.vllm.memory import slots_for

        text = self.model.config.get_text_config()
        self.request_tokens = self.length
        self.pass_tokens = int(engine.extra.get("max_num_batched_tokens", 2048))
        self.usable = self._usable(engine.gpu_memory_utilization)
        self.weights = self.size * self.shards.elements(self.shards.infos)  # size · Σ out · in
        self.centre = 4 * self.shards.centre_elements(self.space)  # float32, beside the weights
        self.base_copy = self.size * self.perturbed  # in the machine's memory, to restore from
        slots = slots_for(self.space, engine.max_genomes, engine.terms_per_genome)
        # The least of 1, 8, 16, 32, ... for rank · terms_per_genome.
        self.slot_rank = slots.get("max_lora_rank", 0)
        # size · slot rank · Σ (out + in), embedding and output head whole: some models, as Qwen2,
        # have no slots of those two. A dense genome takes the model's place.
        sides = self.shards.slot_elements() + 2 * (self.vocabulary + self.hidden)
        self.genome = self.size * self.slot_rank * sides
        self.at_once = min(self.share, engine.max_genomes) if self.rank else 1
        self.residents = self.genome * slots.get("max_loras", 0)  # the centre's slot, too
        self._rows(int(engine.extra.get("max_num_seqs", 1024)))
        self.gathered = self.prefixes = 0
        # 2 · layers · (kv heads / tp, at least 1) · head width · size
        heads = int(text.num_hidden_layers) * max(1, self.shards.kv_heads // self.tp)
        width = int(getattr(text, "head_dim", None) or self.hidden // self.shards.heads)
        self.token = 2 * heads * width * self.size
        given = engine.kv_cache_gib
        room = self.usable - self.fixed if given is None else int(given * GIB)
        self.slots = max(1, min(self.rows, room // (self.token * self.request_tokens)))
        # vLLM starts with the given cache, or one that holds a request of the whole context.
        least = self.context * self.token if given is None else room
        self.missing = self.fixed + least - self.usable

    def _on_torch(self, engine: TorchEngineBuilder) -> None:
        from es_cookbook.engines.torch.attention import round_up
        from es_cookbook.engines.torch.kernels.attention import STEP
        from es_cookbook.engines.torch.memory import Memory, weight_bytes
        from es_cookbook.engines.torch.population_layers import ROWS_PER_BLOCK

        self.request_tokens = round_up(self.length, STEP)
        self.pass_tokens = engine.pass_tokens(on_cpu=self.on_cpu)
        self.usable = self._usable(1.0)
        # size · parameters, the base; size · (linear and perturbed), what samples beside it.
        base, own, self.centre = weight_bytes(self.model, self.space, self.size)
        self.weights = base + own
        self.base_copy = self.slot_rank = 0
        left = max(0, self.usable - self.weights - self.centre)
        self.memory = Memory(left, engine.kv_cache_gib, engine.memory_gib, engine.prefix_cache_gib)
        is_wide = self.on_cpu and self.size == 2  # float32 around its products
        self.genome = self._table_row(4 if is_wide else self.size) if self.rank else own
        self.at_once = min(self.share, max(1, self.memory.genome_bytes // self.genome))
        self.residents = self.genome * (self.at_once + bool(self.rank))  # the centre's row, too
        self._rows(engine.max_batch_size)
        # Rows of tables are copied for blocks of 8 rows.
        blocks = math.ceil((self.rows + self.pass_tokens) / ROWS_PER_BLOCK)
        self.gathered = self.genome * blocks if self.rank else 0
        self.prefixes = self.memory.prefix_bytes
        kept = 4 if self.on_cpu else self.model.dtype.itemsize  # on the CPU float32 is counted
        size = self.size if self.dtype == "bfloat16" or not self.on_cpu else 4
        found = self._cache_size()
        self.token = found.per_token * size // kept
        self.cache_size = dataclasses.replace(found, per_token=self.token)
        request = self.token * self.request_tokens
        held = min(engine.max_batch_size, self.memory.cache_bytes // request)
        self.slots = max(ROWS_PER_BLOCK, held // ROWS_PER_BLOCK * ROWS_PER_BLOCK)
        self.missing = -self.remaining

    def _usable(self, part: float) -> int:
        """Return memory without temporaries and 1 GiB for CUDA, libraries and graphs."""
        from es_cookbook.engines.vllm.memory import CENTRE_WORK_BYTES

        return max(0, int(self.memory_bytes * part) - GIB - CENTRE_WORK_BYTES)

    def _rows(self, max_rows: int) -> None:
        """Set the requests of a block, and an estimate of the work space of a pass over them."""
        self.max_rows = max_rows
        self.rows = min((self.at_once if self.rank else 1) * self.attempted, max_rows)
        widest = max(sum(info.shape) for info in self.shards.body)
        activations = self.pass_tokens * widest * self.size // self.tp
        self.work = 2 * (activations + self.rows * self.vocabulary * 4)

    def _table_row(self, size: int) -> int:
        """Return the bytes of a row: size · Σ ranks · (in + out) over matmuls."""
        from es_cookbook.engines.torch.population_layers import PopulationModel
        from es_cookbook.engines.torch.resident_weights import elements_of_row

        members = PopulationModel(copy.deepcopy(self.model)).group_members()
        perturbed = Counter(group for name, group, _ in members if name in self.space.shapes)
        return size * sum(
            elements_of_row(group, self.rank, layers) for group, layers in perturbed.items()
        )

    def _cache_size(self) -> "CacheSize":
        from es_cookbook.engines.torch.memory import Unfit, flat_cache_size

        try:
            return flat_cache_size(self.model, self.context, on_cpu=self.on_cpu)
        except (Unfit, RuntimeError) as error:  # RuntimeError: weights would have to tell.
            raise ModelError(
                f"model_name: {type(self.model).__name__} is not counted for the torch engine, "
                f"which may run it all the same: {error}"
            ) from error

    @property
    def fixed(self) -> int:
        """Memory of everything except the cache."""
        weights = self.weights + self.centre + self.residents
        return weights + self.gathered + self.work + self.prefixes

    @property
    def cache(self) -> int:
        """Keys and values of the requests that fit."""
        return self.slots * self.request_tokens * self.token

    @property
    def remaining(self) -> int:
        """Memory free for more genomes or longer answers."""
        return self.usable - self.fixed - self.cache

    @property
    def seconds(self) -> float:
        """Time of a generation's products on this machine's cores.

        A prompt token takes 2 · parameters operations without the head, a sampled one with it.
        """
        import torch

        from es_cookbook.engines.torch.host import chosen_products

        engine, weights = self.engine, cast("torch.dtype", getattr(torch, self.dtype))
        products = getattr(engine, "products", "auto")
        chosen = chosen_products(products, engine.dtype, weights, torch.device("cpu"))
        head = self.vocabulary * self.hidden
        is_tied = bool(self.model.config.get_text_config().tie_word_embeddings)
        body = self.parameters - (1 if is_tied else 2) * head
        rollouts = self.config.population_size * self.attempted
        operations = 2 * rollouts * (body * self.length + head * self.config.sampled_tokens)
        return operations / (_SHARE_OF_RATE * num_cores() * core_rate(chosen))


def core_rate(products: "torch.dtype") -> float:
    """Measure operations per second of a core in products of a dtype; int8 as float32."""
    import torch

    from es_cookbook.engines.torch.kernels.products import multiply, one_thread

    is_bfloat16 = products == torch.bfloat16
    rows = torch.ones(_ROWS, _IN, dtype=torch.bfloat16 if is_bfloat16 else torch.float32)
    weight = torch.ones(_OUT, _IN, dtype=torch.bfloat16)
    product = torch.nn.functional.linear if is_bfloat16 else multiply
    shortest = math.inf
    # By hand: torch's own timer imports setuptools, which fails after Python's distutils.
    with torch.inference_mode(), one_thread():
        for _ in range(20):
            began = time.thread_time()
            product(rows, weight)
            shortest = min(shortest, time.thread_time() - began)
    return 2 * _ROWS * _IN * _OUT / max(shortest, 1e-9)


def check(plan: Plan) -> None:
    """Refuse settings that no engine would accept.

    Raises:
        ConfigError: The model cannot be split over so many GPUs, the requests are too long, or the
            memory is too small.
    """
    if plan.vllm and plan.vllm.quantization:
        raise ConfigError(
            "engine.quantization: quantised weights are not counted here; leave it out"
        )
    if plan.tp not in (accepted := plan.shards.accepted_tp()):
        raise ConfigError(
            f"engine.tensor_parallel_size={plan.tp} does not divide this model's "
            f"{plan.shards.heads} attention heads, {plan.shards.kv_heads} key and value heads and "
            f"the sides of its weights; accepted: {', '.join(map(str, accepted))}"
        )
    _check_length(plan, plan.context)
    if plan.missing > 0:
        raise ConfigError(
            f"model_name: {plan.config.model_name} does not fit: each {plan.device} would need "
            f"{show_bytes(plan.usable + plan.missing)} and can give {show_bytes(plan.usable)}; "
            "take a larger machine, or lower engine.max_model_len, engine.max_genomes or the "
            "perturbed parameters (search_space.include); with engine=vllm, "
            f"engine.tensor_parallel_size (accepted: {', '.join(map(str, accepted))}) splits a "
            "model over GPUs"
        )
    if not plan.vllm:  # The torch engine shortens the context if memory holds no more.
        cache = plan.memory.plan(
            plan.cache_size,
            num_lanes=1,
            max_rows=plan.max_rows,
            vocabulary_size=plan.vocabulary,
            context_length=plan.context,
            may_shorten=plan.engine.max_model_len is None,
        )
        _check_length(plan, cache.context_length)


def _check_length(plan: Plan, most: int) -> None:
    if plan.length > most:
        raise ConfigError(
            f"prompt_tokens + sampled_tokens = {plan.length} is more than the engine's context of "
            f"{most} tokens; lower them, or raise engine.max_model_len as far as the model goes"
        )


def report(plan: Plan) -> str:
    """Return the page that is printed."""
    return as_lines(_rows(plan))


def as_lines(rows: Iterable[tuple[str, int | str]]) -> str:
    """Return labels with their bytes or text as lines."""
    lines: list[str] = []
    for label, number in rows:
        value = show_bytes(number) if isinstance(number, int) else number
        lines += [f"  {label:<72}{value:>14}"] if value else ["", label]
    return "\n".join(lines).strip()


def _rows(plan: Plan) -> Iterator[tuple[str, int | str]]:
    """Yield labels with bytes or text; labels without text are titles."""
    config, vllm = plan.config, plan.vllm
    rollouts = config.population_size * plan.attempted
    yield f"{config.model_name}: {plan.parameters:,} parameters in {plan.dtype}", ""
    space = f"low rank, rank {plan.rank}" if plan.rank else "full rank"
    yield f"of which genomes perturb ({space})", f"{plan.perturbed:,}"
    each = f"{'vllm' if vllm else 'torch'} with {plan.tp} x {plan.device}"
    yield f"engines: {each}, {plan.memory_bytes / 1e9:g} GB", f"{plan.num_engines:,}"
    yield f"genomes of an engine, of {config.population_size:,}", f"{plan.share:,}"
    yield "genomes of an engine at once", f"{plan.at_once:,}"
    yield f"rollouts of an engine, of {rollouts:,}", f"{plan.share * plan.attempted:,}"
    yield "tokens of prompts, all engines", f"{rollouts * config.prompt_tokens:,}"
    yield "tokens sampled, all engines", f"{rollouts * config.sampled_tokens:,}"
    if plan.on_cpu:
        seconds, cores = plan.seconds, plural(num_cores(), "core")
        took = duration_in_words(seconds) if seconds >= 10 else f"{seconds:.2g} s"
        yield f"products of a generation on {cores} of this machine, about", took
    yield f"Memory of each {plan.device}", ""
    yield "weights" if vllm else "weights, the base's and the centre's", plan.weights
    yield "centre, float32", plan.centre
    residents = "one at a time, in the weights' place"
    if plan.genome:
        kind = f"LoRA slots of rank {plan.slot_rank}" if vllm else "rows of tables"
        kind = kind if plan.rank else "sets of weights"
        residents = f"{plan.residents // plan.genome:,} {kind}, {show_bytes(plan.genome)} each"
    yield f"genomes: {residents}", plan.residents
    if plan.gathered:
        yield "copies of these rows for a batch", plan.gathered
    yield "work space, an estimate", plan.work
    token = show_bytes(plan.token)
    of_requests = f"{plan.slots:,} requests of {plan.request_tokens:,} tokens, {token} a token"
    yield f"keys and values of {of_requests}", plan.cache
    if plan.prefixes:
        yield "at most: keys and values of shared prefixes and kept answers", plan.prefixes
    left = ", and what engine.gpu_memory_utilization leaves" if vllm else ""
    yield f"CUDA and temporaries{left}", plan.memory_bytes - plan.usable
    added = ", which vLLM adds to the cache" if vllm and not vllm.kv_cache_gib else ""
    yield f"remains{added}", plan.remaining
    yield "total", plan.memory_bytes
    if vllm:
        yield "Memory of an engine's machine", ""
        yield f"base copy, {plan.dtype}", plan.base_copy


def main(config: PlanConfig) -> None:
    if not isinstance(config.engine, _COUNTED):
        attempted = config.problems_per_generation * config.attempts
        lengths = config.prompt_tokens, config.sampled_tokens
        requests = Requests(config.population_size, attempted, *lengths)
        space = config.search_space
        print(as_lines(asyncio.run(config.engine.needs(config.model_name, space, requests))))
        return
    say(f"reading the config.json of {config.model_name}")
    plan = Plan(config, read_architecture(config.model_name))
    check(plan)
    print(report(plan))


def cli() -> None:
    run_cli(main, PlanConfig)

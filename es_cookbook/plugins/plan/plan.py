"""Print what a run needs, before anybody pays for GPUs: memory, tokens, and bytes sent and kept.

    python -m es_cookbook plan model_name=Qwen/Qwen2.5-7B-Instruct num_engines=8 engine=vllm

Only the model's config.json is read, and no GPU is needed. Options default to the main job's.
docs/multi_gpu.md is the guide. For a machine it suggests how to divide it among engines, as a
command to paste:

    ... machine=here
    ... machine=8xh100 engine=vllm prompt_tokens=150 sampled_tokens=1024

It follows from the bytes alone (`suggested`); no number is from experience.

`Plan` has a formula a line, and the tests compare them with real engines. Left out: time on GPUs,
experts, compressed keys, quantised weights, communication between GPUs of one model, Envs and
evaluations.
"""

import copy
import dataclasses
import functools
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import changed, run_cli
from es_cookbook.common.errors import ConfigError, ModelError, nearest
from es_cookbook.common.fields.options import options_of
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.common.names import Names
from es_cookbook.common.terminal import GIB, command, plural, say, show_bytes
from es_cookbook.engines.base import ENGINE_NAMES
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.spaces.base import SEARCH_SPACE_NAMES, SearchSpaceBuilder
from es_cookbook.plugins.plan.machines import GPUS, machine_of
from es_cookbook.runs.tracking.result import duration_in_words

# What needs torch, which the options do without, is imported where it is used.
if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from es_cookbook.engines.torch.forward.cache_size import CacheSize

_ENGINES = Names(ENGINE_NAMES, default="torch", only=("torch", "vllm"))
_SEARCH_SPACES = Names(SEARCH_SPACE_NAMES, default="low_rank", only=("low_rank", "full_rank"))
_SHARE_OF_RATE = 0.75
"""Of the rate of products, that a generation comes to on a CPU (`benchmarks.processors`)."""
_IN_A_RUN = {
    "model_name": "model_name",
    "population_size": "optimizer.population_size",
    "problems_per_generation": "dataset.problems_per_generation",
    "attempts": "attempts",
    "sampled_tokens": "sampling.max_tokens",
}
"""Options of a plan -> those of a run."""


@chz.chz
class PlanConfig:
    """Print what a run needs of its GPUs: memory, tokens, bytes sent and kept."""

    model_name: str = chz.field(doc="model directory (config.json is enough) or Hub name")
    num_engines: int = chz.field(default=1, doc="engines that share the population")
    engine: TorchEngineBuilder | VLLMEngineBuilder = _ENGINES.field("kind of engine")
    search_space: SearchSpaceBuilder = _SEARCH_SPACES.field(
        "which parameters genomes perturb, and how"
    )
    population_size: int = chz.field(default=64, doc="genomes per generation, in mirrored pairs")
    problems_per_generation: int = chz.field(default=32, doc="problems that each genome attempts")
    attempts: int = chz.field(default=1, doc="rollouts of one genome at one problem")
    prompt_tokens: int = chz.field(default=12, doc="tokens per prompt")
    sampled_tokens: int = chz.field(
        default=32, doc="tokens sampled per rollout, at most sampling.max_tokens"
    )
    gpu: str = chz.field(default="h100", doc=f"one of {', '.join(GPUS)}")
    gpu_memory: float | None = chz.field(
        default=None, doc="memory per GPU in GB, for a GPU that is not listed"
    )
    machine: str | None = chz.field(
        default=None,
        doc="suggests engines for here, laptop, a GPU (h100, 24gb) or several (8xh100, 8x80gb)",
    )

    @chz.validate
    def _fields(self) -> None:
        fields = chz.chz_fields(self)
        numbers = [name for name in fields if isinstance(getattr(self, name), int | float)]
        check_range(self, *numbers, above=0)
        if isinstance(self.engine, VLLMEngineBuilder):
            self.engine.check_space(self.search_space)
        ES(population_size=self.population_size)  # Refuses an odd one: pairs are mirrored.
        if self.gpu not in GPUS:
            raise ConfigError(
                f"gpu={self.gpu} is not in the table: {nearest(self.gpu, GPUS)}; describe another "
                "one with gpu_memory"
            )
        if self.machine is not None:
            machine_of(self.machine)
            if (self.num_engines, self.gpu, self.gpu_memory) != (1, "h100", None):
                raise ConfigError(
                    "machine says how much memory there is, and num_engines is then suggested: "
                    "leave num_engines, gpu and gpu_memory out"
                )
        if self.num_engines > self.population_size:
            raise ConfigError(
                f"num_engines={self.num_engines} is more than population_size="
                f"{self.population_size}: some would have no genome"
            )


def read_architecture(model_name: str) -> "PreTrainedModel":
    """The model on the meta device, which takes no memory; a directory needs no weights.

    Raises:
        ModelError: It cannot be read, or is of a kind that is not counted.
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
    """What a run needs: bytes of one GPU's memory, unless a line says otherwise.

    An engine samples a *block* at a time: its resident genomes, or one dense genome. *Rows* are
    requests that decode together, a *pass* is one forward pass over prompts.

    Raises:
        ConfigError: vLLM has no slots for such genomes.
        ModelError: The torch engine cannot run the model.
    """

    def __init__(self, config: PlanConfig, model: "PreTrainedModel") -> None:
        from es_cookbook.engines.vllm.memory import Shards

        engine = config.engine
        self.config, self.model = config, model
        self.vllm = engine if isinstance(engine, VLLMEngineBuilder) else None
        self.tp = self.vllm.tensor_parallel_size if self.vllm else 1
        self.shards = Shards(model, self.tp)
        self.space = config.search_space(self.shards.infos)
        self.rank = self.space.rank or 0  # 0: dense genomes
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.perturbed = sum(math.prod(shape) for shape in self.space.shapes.values())
        head = cast("nn.Linear", model.get_output_embeddings()).weight
        self.vocabulary, self.hidden = head.shape
        own_dtype = str(model.config.dtype or "float32").removeprefix("torch.")
        self.dtype = own_dtype if engine.dtype == "auto" else engine.dtype
        self.size = 4 if self.dtype == "float32" else 2  # of a weight
        self.context = engine.context_length(model)
        self.length = config.prompt_tokens + config.sampled_tokens
        self.share = math.ceil(config.population_size / config.num_engines)  # of an engine
        self.terms = math.ceil(config.population_size / 2)  # of a step, one per mirrored pair
        self.gpu_bytes = int((config.gpu_memory or GPUS[config.gpu]) * 1e9)
        if isinstance(engine, VLLMEngineBuilder):
            self._on_vllm(engine)
        else:
            self._on_torch(engine)
        self._messages()

    def _on_vllm(self, engine: VLLMEngineBuilder) -> None:
        from es_cookbook.engines.vllm.memory import slots_for

        text = self.model.config.get_text_config()
        self.request_tokens = self.length
        max_rows = int(engine.extra.get("max_num_seqs", 1024))
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
        self._rows(max_rows)
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
        from es_cookbook.engines.torch.forward.attention import round_up
        from es_cookbook.engines.torch.forward.population_layers import ROWS_PER_BLOCK
        from es_cookbook.engines.torch.kernels.attention import STEP
        from es_cookbook.engines.torch.memory import Memory, weight_bytes

        self.request_tokens = round_up(self.length, STEP)
        on_cpu = engine.device == "cpu"
        self.pass_tokens = engine.pass_tokens(on_cpu=on_cpu)
        self.usable = self._usable(1.0)
        # size · parameters, the base; size · (linear and perturbed), what samples beside it.
        base, own, self.centre = weight_bytes(self.model, self.space, self.size)
        self.weights = base + own
        self.base_copy = self.slot_rank = 0
        left = max(0, self.usable - self.weights - self.centre)
        self.memory = Memory(left, engine.kv_cache_gib, engine.memory_gib, engine.prefix_cache_gib)
        is_wide = on_cpu and self.size == 2  # float32 around its products
        self.genome = self._table_row(4 if is_wide else self.size) if self.rank else own
        self.at_once = min(self.share, max(1, self.memory.genome_bytes // self.genome))
        self.residents = self.genome * (self.at_once + bool(self.rank))  # the centre's row, too
        self._rows(engine.max_batch_size)
        # Rows of tables are copied for blocks of 8 rows.
        blocks = math.ceil((self.rows + self.pass_tokens) / ROWS_PER_BLOCK)
        self.gathered = self.genome * blocks if self.rank else 0
        self.prefixes = self.memory.prefix_bytes
        kept = 4 if on_cpu else self.model.dtype.itemsize  # on the CPU the probe counts float32
        size = self.size if self.dtype == "bfloat16" or not on_cpu else 4
        found = self._cache_size(on_cpu)
        self.token = found.per_token * size // kept
        self.cache_size = dataclasses.replace(found, per_token=self.token)
        held = min(
            engine.max_batch_size, self.memory.cache_bytes // (self.token * self.request_tokens)
        )
        self.slots = max(ROWS_PER_BLOCK, held // ROWS_PER_BLOCK * ROWS_PER_BLOCK)
        self.missing = -self.remaining

    def _usable(self, part: float) -> int:
        """But 1 GiB, a guess at CUDA's context, libraries and captured graphs, and temporaries."""
        from es_cookbook.engines.vllm.memory import CENTRE_WORK_BYTES

        return max(0, int(self.gpu_bytes * part) - GIB - CENTRE_WORK_BYTES)

    def _rows(self, max_rows: int) -> None:
        """Requests of a block, and the work space of a pass over them, a guess."""
        self.max_rows = max_rows
        self.attempted = self.config.problems_per_generation * self.config.attempts
        self.block_genomes = self.at_once if self.rank else 1
        self.rows = min(self.block_genomes * self.attempted, max_rows)
        widest = max(sum(info.shape) for info in self.shards.body)
        activations = self.pass_tokens * widest * self.size // self.tp
        self.work = 2 * (activations + self.rows * self.vocabulary * 4)

    def _table_row(self, size: int) -> int:
        """Size · Σ ranks · (in + out) over matmuls, of all that one computes, as q, k and v."""
        from es_cookbook.engines.torch.forward.low_rank_tables import elements_of_row
        from es_cookbook.engines.torch.forward.population_layers import PopulationModel

        members = PopulationModel(copy.deepcopy(self.model)).group_members()
        perturbed = Counter(group for name, group, _ in members if name in self.space.shapes)
        return size * sum(
            elements_of_row(group, self.rank, layers) for group, layers in perturbed.items()
        )

    def _cache_size(self, on_cpu: bool) -> "CacheSize":
        from es_cookbook.engines.torch.forward.cache_size import Unfit, flat_cache_size

        try:
            return flat_cache_size(self.model, self.context, on_cpu=on_cpu)
        except (Unfit, RuntimeError) as error:  # RuntimeError: weights would have to tell.
            raise ModelError(
                f"model_name: {type(self.model).__name__} is not counted for the torch engine, "
                f"which may run it all the same: {error}"
            ) from error

    @property
    def fixed(self) -> int:
        """All but the cache."""
        weights = self.weights + self.centre + self.residents
        return weights + self.gathered + self.work + self.prefixes

    @property
    def cache(self) -> int:
        """Keys and values of the requests for which there is room."""
        return self.slots * self.request_tokens * self.token

    @property
    def device(self) -> str:
        engine = self.config.engine
        is_cpu = isinstance(engine, TorchEngineBuilder) and engine.device == "cpu"
        return "CPU" if is_cpu else "GPU"

    @property
    def in_flight(self) -> int:
        """Requests of an engine that decode together."""
        return min(self.slots, self.rows)

    @property
    def remaining(self) -> int:
        """For more genomes or longer answers."""
        return self.usable - self.fixed - self.cache

    @property
    def genomes_that_fit(self) -> int:
        """Beside the same requests; vLLM's dense genome takes no memory."""
        if not self.genome:
            return self.at_once
        return (self.residents + self.remaining) // self.genome - bool(self.rank)

    @property
    def seconds(self) -> float:
        """Of a generation on this machine's cores: its products, at the share of their rate.

        A token of a prompt takes 2 · parameters operations without the head, a sampled one with it.
        """
        import torch

        from es_cookbook.engines.torch.processor import products_of, rates

        options = self.config.engine
        asked = options.products if isinstance(options, TorchEngineBuilder) else "auto"
        weights = cast(torch.dtype, getattr(torch, self.dtype))
        chosen = products_of(weights, torch.device("cpu"))
        products = str(chosen).removeprefix("torch.") if asked == "auto" else asked
        head = self.vocabulary * self.hidden
        is_tied = bool(self.model.config.get_text_config().tie_word_embeddings)
        body = self.parameters - (1 if is_tied else 2) * head
        rollouts = self.config.population_size * self.attempted
        operations = 2 * rollouts * (body * self.length + head * self.config.sampled_tokens)
        rate = 1e9 * (rates().bfloat16 if products == "bfloat16" else rates().float32)
        return operations / (_SHARE_OF_RATE * num_cores() * rate)

    def _messages(self) -> None:
        """Bytes of a generation, of all engines."""
        engines, population = self.config.num_engines, self.config.population_size
        # A count, and for each genome its length, seed and coefficient; it goes to one engine.
        self.genome_message = engines * 4 + population * (4 + 8 + 8)
        # Lengths, decay, and for each term its seed and coefficient; it goes to all engines.
        self.step_message = engines * (8 + 8 + self.terms * (8 + 8))
        # At most, pickled: an engine gets all prompts for each block.
        problem = 20 + self.config.attempts * 20 + self.config.prompt_tokens * 5
        block = 300 + self.config.problems_per_generation * problem
        self.prompt_message = engines * math.ceil(self.share / self.block_genomes) * block
        # Hexadecimal seeds, shortest decimals.
        self.history = 150 + self.terms * 39 + population * 20


def check(plan: Plan) -> None:
    """Refuse what no engine would start with.

    Raises:
        ConfigError: What cannot be divided, is too long, or does not fit.
    """
    if plan.vllm and plan.vllm.quantization:
        raise ConfigError("engine.quantization: quantised weights are not counted here; leave it")
    if plan.tp not in (accepted := plan.shards.accepted_tp()):
        raise ConfigError(
            f"engine.tensor_parallel_size={plan.tp} does not divide this model's "
            f"{plan.shards.heads} attention heads, {plan.shards.kv_heads} key and value heads and "
            f"the sides of its weights; accepted: {', '.join(map(str, accepted))}"
        )
    _check_length(plan, plan.context)
    cache_gib = plan.vllm.kv_cache_gib if plan.vllm else None
    if cache_gib is not None and plan.context * plan.token > cache_gib * GIB:
        least = math.ceil(plan.context * plan.token / GIB * 1000) / 1000
        raise ConfigError(
            f"engine.kv_cache_gib={cache_gib} is too little for a context of {plan.context} "
            f"tokens; raise it to {least}, or lower engine.max_model_len: this plan needs "
            f"{plan.length}"
        )
    if plan.missing > 0:
        raise ConfigError(
            f"model_name: {plan.config.model_name} does not fit: each {plan.device} would need "
            f"{show_bytes(plan.usable + plan.missing)} and can give {show_bytes(plan.usable)}, "
            f"{show_bytes(plan.missing)} too little; what would do: "
            f"{', or '.join(_changes(plan)) or 'no one option alone'}"
        )
    if not plan.vllm:  # The torch engine shortens the context if memory holds no more.
        cache = plan.memory.plan(
            plan.cache_size,
            num_lanes=1,
            max_rows=plan.max_rows,
            vocabulary_size=plan.vocabulary,
            context_length=plan.context,
            may_shorten=plan.config.engine.max_model_len is None,
        )
        _check_length(plan, cache.context_length)


def _check_length(plan: Plan, most: int) -> None:
    if plan.length > most:
        raise ConfigError(
            f"prompt_tokens + sampled_tokens = {plan.length} is more than the engine's context of "
            f"{most} tokens; lower them, or raise engine.max_model_len as far as the model goes"
        )


def _changes(plan: Plan) -> Iterator[str]:
    """Options that by themselves make it fit, the least of each kind."""
    larger = [tp for tp in plan.shards.accepted_tp() if plan.vllm and tp > plan.tp]
    for name, values in {
        "engine.tensor_parallel_size": larger,
        "gpu": sorted(GPUS, key=GPUS.__getitem__),
        "engine.max_model_len": [plan.length],
        "engine.dtype": ["bfloat16"] if plan.size == 4 else [],
        "engine.max_genomes": [plan.share] if plan.vllm else [],
    }.items():
        for value in values:
            given = {name: str(value)} | ({"gpu_memory": "None"} if name == "gpu" else {})
            if Plan(changed(plan.config, given), plan.model).missing <= 0:
                yield f"{name}={value}"
                break


def suggested(config: PlanConfig, model: "PreTrainedModel") -> Plan:
    """The plan of the simplest division of `config.machine` that fits; only inside `run_cli`.

    Any other has to have twice as many requests in flight: GPUs of one model wait for each other,
    and genomes that are not there at once wait for the last answer of those before, neither of
    which is counted. Only where it does not fit otherwise the context is as short as the answers
    allow, and weights are bfloat16.

    Raises:
        ConfigError: None fits; says what the simplest would need.
    """
    short = {"engine.max_model_len": str(config.prompt_tokens + config.sampled_tokens)}
    small = {"engine.dtype": "bfloat16"}
    plans: list[Plan] = []
    for more in ({}, short, small, short | small):
        found = [Plan(changed(config, each), model) for each in _divisions(config, model, more)]
        if fitting := [plan for plan in found if plan.missing <= 0]:
            return functools.reduce(_better, fitting)
        plans += found
    try:
        check(plans[0])
    except ConfigError as error:
        said = str(error).replace(" gpu=", " machine=")
        each = f"{plans[0].gpu_bytes / 1e9:g}gb"
        said = re.sub(r"engine\.tensor_parallel_size=(\d+)", rf"machine=\1x{each}", said)
        raise ConfigError(said) from error
    return plans[0]


def _better(best: Plan, plan: Plan) -> Plan:
    now, then = (each.config.num_engines * each.in_flight for each in (plan, best))
    return plan if now >= 2 * then else best


def _divisions(
    config: PlanConfig, model: "PreTrainedModel", more: Mapping[str, str]
) -> Iterator[Mapping[str, str]]:
    """Ways to divide a machine among engines, the simplest first, as options with some more."""
    from es_cookbook.engines.vllm.memory import Shards

    machine = machine_of(config.machine or "here")
    given = {"machine": "None", "gpu_memory": str(machine.gigabytes), **more}
    if isinstance(config.engine, VLLMEngineBuilder):
        if not machine.num_gpus:
            raise ConfigError("engine=vllm is counted for GPUs alone: leave it, or name a GPU")
        for tp in Shards(model, 1).accepted_tp():
            if machine.num_gpus % tp == 0:
                engines = min(machine.num_gpus // tp, config.population_size)
                split = {"num_engines": str(engines), "engine.tensor_parallel_size": str(tp)}
                at_once = math.ceil(config.population_size / engines)
                while at_once:
                    yield given | split | {"engine.max_genomes": str(at_once)}
                    at_once //= 2
        return
    engines = min(max(1, machine.num_gpus), config.population_size)
    given |= {"num_engines": str(engines)} | ({} if machine.num_gpus else {"engine.device": "cpu"})
    yield given
    plan = Plan(changed(config, given), model)
    if plan.weights + plan.centre < plan.usable:
        # All genomes at once, and the rest for keys and values.
        genomes = math.ceil(plan.genome * (plan.share + 1) / GIB * 1000) / 1000
        whole = given | {"engine.memory_gib": str(genomes)}
        yield whole
        plan = Plan(changed(config, whole), model)
        cache = math.floor((plan.cache + plan.remaining) / GIB * 1000) / 1000
        if cache > 0:
            yield whole | {"engine.kv_cache_gib": str(cache)}


def _chosen(config: PlanConfig) -> dict[str, str]:
    """The options of a plan that are not defaults, as a user types them."""
    blueprint = chz.Blueprint(PlanConfig)
    now = options_of(blueprint.clone().apply(chz.beta_to_blueprint_values(config)))
    parts = {path: each.part for path, each in now.items() if each.part}
    usual, inside = options_of(blueprint), options_of(blueprint.clone().apply(parts))
    return {
        path: each.value or ""
        for path, each in now.items()
        if each.value != (usual if each.part else inside)[path].value
    }


def command_line(plan: Plan) -> str:
    """The main job's command with a plan's options, and with its engines."""
    options = _chosen(plan.config)
    run = [f"{_IN_A_RUN[path]}={text}" for path, text in options.items() if path in _IN_A_RUN]
    run += [f"{path}={text}" for path, text in options.items() if path.startswith("search_space")]
    own = [(path, text) for path, text in options.items() if path.split(".")[0] == "engine"]
    kind = "vllm" if plan.vllm else "torch"
    engine = [("engine", kind), *(each for each in own if each[0] != "engine")]
    pool: list[str] = []
    if (engines := plan.config.num_engines) > 1:
        pool = ["engine=ray", f"engine.num_engines={engines}", f"engine.num_gpus={plan.tp}"]
        engine = [(f"engine.{path}", text) for path, text in engine]
    return f"{command('countdown')} {shlex.join([*run, *pool, *(f'{p}={t}' for p, t in engine)])}"


def report(plan: Plan) -> str:
    """The page that is printed."""
    lines: list[str] = []
    for label, number in _rows(plan):
        value = show_bytes(number) if isinstance(number, int) else number
        lines += [f"  {label:<72}{value:>14}"] if value else ["", label]
    return "\n".join(lines).strip()


def _rows(plan: Plan) -> Iterator[tuple[str, int | str]]:
    """Labels with bytes or text; those with no text are titles of what follows."""
    config, vllm = plan.config, plan.vllm
    rollouts = config.population_size * plan.attempted
    what = plan.device if config.gpu_memory else config.gpu
    each = f"{'vllm' if vllm else 'torch'} with {plan.tp} x {what}"
    yield f"{config.model_name}: {plan.parameters:,} parameters in {plan.dtype}", ""
    space = f"low rank, rank {plan.rank}" if plan.rank else "full rank"
    yield f"of which genomes perturb ({space})", f"{plan.perturbed:,}"
    yield f"engines: {each}, {plan.gpu_bytes / 1e9:g} GB", f"{config.num_engines:,}"
    yield f"genomes of an engine, of {config.population_size:,}", f"{plan.share:,}"
    yield "genomes of an engine at once", f"{plan.at_once:,}"
    fit = f"{plan.genomes_that_fit:,}"
    yield "genomes that would fit at once beside the same requests in flight", fit
    yield f"rollouts of an engine, of {rollouts:,}", f"{plan.share * plan.attempted:,}"
    yield "tokens of prompts, all engines", f"{rollouts * config.prompt_tokens:,}"
    yield "tokens sampled, all engines", f"{rollouts * config.sampled_tokens:,}"
    if plan.device == "CPU":
        seconds, cores = plan.seconds, plural(num_cores(), "core")
        took = duration_in_words(seconds) if seconds >= 10 else f"{seconds:.2g} s"
        yield f"products of a generation take on {cores} of this machine, about", took
    yield f"Memory of each {plan.device}", ""
    yield "weights" if vllm else "weights, the base's and the centre's", plan.weights
    yield "centre, float32", plan.centre
    kind = f"LoRA slots of rank {plan.slot_rank}" if vllm else "rows of tables"
    residents = "one at a time, in the weights' place"
    if plan.genome:
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
        yield (
            "at most: keys and values that prompts share or that are kept of answers",
            plan.prefixes,
        )
    left = ", and what engine.gpu_memory_utilization leaves" if vllm else ""
    yield f"CUDA and temporaries{left}", plan.gpu_bytes - plan.usable
    added = ", which vLLM adds to the cache" if vllm and not vllm.kv_cache_gib else ""
    yield f"remains{added}", plan.remaining
    yield "all of it", plan.gpu_bytes
    if vllm:
        yield "Memory of an engine's machine", ""
        yield f"base copy, {plan.dtype}", plan.base_copy
    step = f"sent through Ray: the step, {plan.terms:,} of the same to every engine"
    yield "Bytes of a generation, all engines", ""
    yield "sent through Ray: genomes, a seed and coefficient each", plan.genome_message
    yield step, plan.step_message
    yield "sent through Ray: prompts, at most", plan.prompt_message
    yield "kept: the history's line, about", plan.history


def main(config: PlanConfig) -> None:
    say(f"reading the config.json of {config.model_name}")
    model = read_architecture(config.model_name)
    plan = Plan(config, model) if config.machine is None else suggested(config, model)
    check(plan)
    if config.machine is not None:
        print(f"{command_line(plan)}\n")
    print(report(plan))


cli = functools.partial(run_cli, main, PlanConfig)

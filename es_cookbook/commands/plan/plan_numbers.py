"""What a run needs of its GPUs, its machines and its network, in numbers.

Those of `Plan`, where the docstring of a method is its formula, and the tests compare them with
real engines. Left out: time, experts, compressed keys, quantised weights, communication between
GPUs of one model, Envs and evaluations.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterator
from typing import cast

import torch
from transformers import PreTrainedModel

from es_cookbook.checkpoints.models import load_architecture
from es_cookbook.commands.plan.plan_config import GPUS, PlanConfig
from es_cookbook.common.cli import changed
from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.common.terminal import GIB, show_bytes
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.torch.forward.attention import round_up
from es_cookbook.engines.torch.forward.cache_size import CacheSize, Unfit, flat_cache_size
from es_cookbook.engines.torch.forward.low_rank_tables import elements_of_row
from es_cookbook.engines.torch.forward.population_layers import (
    ROWS_PER_BLOCK,
    PopulationModel,
)
from es_cookbook.engines.torch.kernels.attention import STEP
from es_cookbook.engines.torch.memory import CACHE_SHARE, GENOME_SHARE, Memory, weight_bytes
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.engines.vllm.memory import CENTRE_WORK_BYTES, Shards, slots_for


def read_architecture(model_name: str) -> PreTrainedModel:
    """The model on the meta device, which takes no memory; a directory needs no weights.

    Raises:
        ModelError: It cannot be read, or is of a kind that is not counted.
    """
    model = load_architecture(model_name, weights=False)
    for field in ("num_experts", "num_local_experts", "kv_lora_rank", "quantization_config"):
        if getattr(model.config.get_text_config(), field, None):
            raise ModelError(
                f"model_name: {model_name!r} has {field} in its config.json; experts, compressed "
                "keys and quantised weights are not counted here"
            )
    return model


class Plan:
    """What a run needs: memory of one GPU in bytes, unless a method says otherwise.

    An engine samples a *block* at a time: its resident genomes, or one dense genome. *Rows* are
    requests that decode together. `out` and `in` are the sides of a weight.

    A low-rank genome has a *rank*, a dense one 0; vLLM's *slot rank* is the least of 1, 8, 16, 32,
    ... for rank · terms_per_genome. *Size* is the bytes of a number of `dtype`, which samples; *tp*
    the GPUs of an engine; *perturbed* the elements of the search space. An engine's *share* is
    population / engines; a step has population / 2 *terms*. *Context* is max_model_len or 4,096,
    the model's own if less; *request tokens* are prompt + sampled (torch: a multiple of 16).
    *Max rows* and *pass tokens* (of prompts, in a forward pass) are max_batch_size and
    prefill_tokens (torch); `engine.extra`'s max_num_seqs or 1,024, and max_num_batched_tokens or
    2,048 (vLLM).
    """

    def __init__(self, config: PlanConfig, model: PreTrainedModel) -> None:
        engine, text = config.engine, model.config.get_text_config()
        self.config, self.model, self.engine = config, model, engine
        self.request_tokens = config.prompt_tokens + config.sampled_tokens
        if isinstance(engine, VLLMEngineBuilder):
            self.vllm, self.tp = engine, engine.tensor_parallel_size
            self.max_rows = int(engine.extra.get("max_num_seqs", 1024))
            self.pass_tokens = int(engine.extra.get("max_num_batched_tokens", 2048))
        else:
            self.vllm, self.tp = None, 1
            self.max_rows, self.pass_tokens = engine.max_batch_size, engine.prefill_tokens
            self.request_tokens = round_up(self.request_tokens, STEP)
        self.on_cpu = isinstance(engine, TorchEngineBuilder) and engine.device == "cpu"
        self.shards = Shards(model, self.tp)
        self.space = config.search_space(self.shards.infos)
        self.rank = self.space.low_rank.rank if self.space.low_rank else 0
        self.slot_rank = self.rank
        if self.vllm:
            slots = slots_for(self.space, self.vllm.max_genomes, self.vllm.terms_per_genome)
            self.slot_rank = slots.get("max_lora_rank", 0)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.perturbed = sum(math.prod(shape) for shape in self.space.shapes.values())
        self.layers, heads = int(text.num_hidden_layers), int(text.num_attention_heads)
        head = cast("torch.nn.Linear", model.get_output_embeddings()).weight
        self.vocabulary, self.hidden = head.shape
        self.head_dim = int(getattr(text, "head_dim", None) or self.hidden // heads)
        own_dtype = str(model.config.dtype or torch.float32).removeprefix("torch.")
        self.dtype = own_dtype if engine.dtype == "auto" else engine.dtype
        self.size = cast("torch.dtype", getattr(torch, self.dtype)).itemsize
        self.is_wide = self.dtype == "bfloat16"  # float32 around its products, on the CPU
        self.context = engine.context_length(model)
        self.share = math.ceil(config.population_size / config.num_engines)
        self.terms = math.ceil(config.population_size / 2)
        self.gpu_bytes = int((config.gpu_memory or GPUS[config.gpu]) * 1e9)

    def own_bytes(self) -> int:
        """Torch's set of weights of the centre, or of a dense genome, beside the whole base.

        size · elements of linear layers (a tied table is one: the output head) and perturbed ones.
        """
        return weight_bytes(self.model, self.space, self.size).own

    def weight_bytes(self) -> int:
        """vLLM: size · Σ out · in over `Shards`. torch: size · parameters + own_bytes."""
        if self.vllm:
            return self.size * self.shards.elements(self.shards.infos)
        return self.size * self.parameters + self.own_bytes()

    def centre_bytes(self) -> int:
        """4 · perturbed (vLLM: of `Shards`): the centre is float32, beside the weights."""
        return 4 * (self.shards.centre_elements(self.space) if self.vllm else self.perturbed)

    def base_copy_bytes(self) -> int:
        """On the engine's machine. vLLM: size · perturbed, to restore the centre; torch: 0."""
        return self.size * self.perturbed if self.vllm else 0

    def genome_bytes(self) -> int:
        """A resident genome; if dense, own_bytes, and 0 in vLLM, where it takes the model's place.

        vLLM: size · slot rank · Σ (out + in) over the shards of linear weights, and of embedding
        and output head whole (some models, as Qwen2, have no slots of those two). torch: size (on
        device=cpu 4 for bfloat16) · Σ ranks · (in + out) over matmuls, of all that one computes, as
        q, k and v; ranks and out above 4 are multiples of 4.
        """
        if not self.rank:
            return 0 if self.vllm else self.own_bytes()
        if self.vllm:
            sides = self.shards.slot_elements() + 2 * (self.vocabulary + self.hidden)
            return self.size * self.slot_rank * sides
        members = PopulationModel(copy.deepcopy(self.model)).group_members()
        perturbed = Counter(group for name, group, _ in members if name in self.space.shapes)
        size = torch.float32.itemsize if self.on_cpu and self.is_wide else self.size
        return size * sum(
            elements_of_row(group, self.rank, layers) for group, layers in perturbed.items()
        )

    def resident(self) -> int:
        """Genomes at once: the share, up to max_genomes (vLLM; dense: 1) or memory_gib / genome.

        Without memory_gib a quarter of what the weights leave.
        """
        if isinstance(self.engine, VLLMEngineBuilder):
            return min(self.share, self.engine.max_genomes) if self.rank else 1
        given = self.engine.memory_gib
        memory = GENOME_SHARE * self.left_bytes() if given is None else given * GIB
        return min(self.share, max(1, int(memory) // self.genome_bytes()))

    def resident_bytes(self) -> int:
        """Genome · (genomes + 1 for the centre, if low rank); vLLM always makes max_genomes."""
        genomes = self.vllm.max_genomes if self.vllm else self.resident()
        return self.genome_bytes() * (genomes + bool(self.rank))

    def block_genomes(self) -> int:
        """Genomes sampled at once: the resident ones, or one dense one."""
        return self.resident() if self.rank else 1

    def rows(self) -> int:
        """Requests of a block: its genomes · problems · attempts, up to max rows."""
        attempted = self.config.problems_per_generation * self.config.attempts
        return min(self.block_genomes() * attempted, self.max_rows)

    def gathered_bytes(self) -> int:
        """torch, low rank: genome · (rows + pass tokens) / 8, copied for blocks of 8 rows."""
        if self.vllm or not self.rank:
            return 0
        return self.genome_bytes() * math.ceil((self.rows() + self.pass_tokens) / ROWS_PER_BLOCK)

    def work_bytes(self) -> int:
        """A guess: 2 · (pass tokens · widest (in + out) · size / tp + rows · vocabulary · 4)."""
        widest = max(sum(info.shape) for info in self.shards.body)
        activations = self.pass_tokens * widest * self.size // self.tp
        return 2 * (activations + self.rows() * self.vocabulary * 4)

    def fixed_bytes(self) -> int:
        """All but the cache: weights + centre + resident genomes + gathered + work + prefixes."""
        weights = self.weight_bytes() + self.centre_bytes() + self.resident_bytes()
        return weights + self.gathered_bytes() + self.work_bytes() + self.prefix_bytes()

    def prefix_bytes(self) -> int:
        """torch: prefix_cache_gib, none on a GPU unless given; vLLM's is part of its cache."""
        given = 0 if isinstance(self.engine, VLLMEngineBuilder) else self.engine.prefix_cache_gib
        return int((given or 0) * GIB)

    def usable_bytes(self) -> int:
        """GPU · gpu_memory_utilization (torch: · 1) - 1 GiB for CUDA - 0.5 to move the centre.

        The first is a guess at CUDA's context, libraries and captured graphs.
        """
        part = self.vllm.gpu_memory_utilization if self.vllm else 1.0
        return max(0, int(self.gpu_bytes * part) - GIB - CENTRE_WORK_BYTES)

    def kv_bytes(self) -> int:
        """A token of the cache: 2 · layers · (kv heads / tp, at least 1) · head width · size.

        For torch on device=cpu it is float32, or bfloat16 if the model is in that, and values'
        width a multiple of 16.
        """
        heads = self.layers * max(1, self.shards.kv_heads // self.tp)
        if self.on_cpu:
            widths = self.head_dim + round_up(self.head_dim, STEP)
            return heads * widths * (self.size if self.is_wide else torch.float32.itemsize)
        return heads * 2 * self.head_dim * self.size

    def context_bytes(self) -> int:
        """The least cache that an engine starts with: context · kv, for torch 8 of them."""
        return self.context * self.kv_bytes() * (1 if self.vllm else ROWS_PER_BLOCK)

    def cache_room(self) -> int:
        """kv_cache_gib if given; else usable - fixed; torch: half of what the weights leave."""
        given = self.engine.kv_cache_gib
        if given is not None:
            return int(given * GIB)
        if self.vllm:
            return self.usable_bytes() - self.fixed_bytes()
        return int(CACHE_SHARE * self.left_bytes())

    def left_bytes(self) -> int:
        """Usable - weights - centre."""
        return max(0, self.usable_bytes() - self.weight_bytes() - self.centre_bytes())

    def slots(self) -> int:
        """Requests that the cache holds, up to rows; torch: up to max rows, 8 · k, at least 8."""
        held = self.cache_room() // (self.kv_bytes() * self.request_tokens)
        if self.vllm:
            return max(1, min(self.rows(), held))
        return max(ROWS_PER_BLOCK, min(self.max_rows, held) // ROWS_PER_BLOCK * ROWS_PER_BLOCK)

    def cache_bytes(self) -> int:
        """Keys and values: slots · request tokens · kv."""
        return self.slots() * self.request_tokens * self.kv_bytes()

    def remaining_bytes(self) -> int:
        """Usable - fixed - cache."""
        return self.usable_bytes() - self.fixed_bytes() - self.cache_bytes()

    def shortfall_bytes(self) -> int:
        """Fixed + (kv_cache_gib or a context; torch: cache) - usable; above 0 it does not start."""
        if not self.vllm:
            return -self.remaining_bytes()
        least = self.cache_room() if self.vllm.kv_cache_gib else self.context_bytes()
        return self.fixed_bytes() + least - self.usable_bytes()

    def genomes_that_fit(self) -> int:
        """(Resident + remaining) / genome, but the centre's; vLLM's dense one takes no memory."""
        memory = self.resident_bytes() + self.remaining_bytes()
        genome = self.genome_bytes()
        return memory // genome - bool(self.rank) if genome else self.resident()

    def genome_message_bytes(self) -> int:
        """All engines: engines · 4 + population · (4 + 8 + 8); a genome goes to one of them."""
        return self.config.num_engines * 4 + self.config.population_size * 20

    def step_message_bytes(self) -> int:
        """All engines: engines · (8 + 8 + terms · (8 + 8)): lengths, decay, seeds, coefficients."""
        return self.config.num_engines * (16 + self.terms * 16)

    def prompt_message_bytes(self) -> int:
        """At most: engines · blocks · (300 + problems · (20 + attempts · 20 + prompt · 5)).

        Pickled. Blocks = share / block genomes, rounded up; an engine gets all prompts for each.
        """
        problem = 20 + self.config.attempts * 20 + self.config.prompt_tokens * 5
        block = 300 + self.config.problems_per_generation * problem
        return self.config.num_engines * math.ceil(self.share / self.block_genomes()) * block

    def history_bytes(self) -> int:
        """About 150 + terms · 39 + population · 20: hexadecimal seeds, shortest decimals."""
        return 150 + self.terms * 39 + self.config.population_size * 20


def _cache_size(plan: Plan) -> CacheSize | None:
    """What the torch engine keeps of a request; None where weights would have to tell.

    Refuses models of which it does not keep keys and values alone.
    """
    try:
        size = flat_cache_size(plan.model, plan.context, on_cpu=plan.on_cpu)
    except Unfit as error:
        raise ModelError(
            f"model_name: {type(plan.model).__name__} is not counted for the torch engine, which "
            f"may run it all the same: {error}"
        ) from error
    except RuntimeError:  # without weights a router cannot choose experts
        return None
    narrow = plan.on_cpu and plan.is_wide
    return CacheSize(0, size.per_token // 2) if narrow else size


def _shortened(plan: Plan, size: CacheSize) -> int:
    """The context that the torch engine will have, which divides memory in the same way."""
    cache = Memory(plan.left_bytes(), plan.engine.kv_cache_gib, None, prefix_gib=0).plan(
        size,
        num_lanes=1,
        max_rows=plan.max_rows,
        vocabulary_size=plan.vocabulary,
        context_length=plan.context,
        may_shorten=plan.engine.max_model_len is None,
    )
    return cache.context_length


def _check_length(plan: Plan, most: int) -> None:
    length = plan.config.prompt_tokens + plan.config.sampled_tokens
    if length > most:
        raise ConfigError(
            f"prompt_tokens + sampled_tokens = {length} is more than the engine's context of {most}"
            " tokens; lower them, or raise engine.max_model_len as far as the model goes"
        )


def check(plan: Plan) -> None:
    """Refuse what no engine would start with.

    Raises:
        ModelError: The torch engine cannot run the model.
        ConfigError: What cannot be divided, is too long, or does not fit.
    """
    config = plan.config
    length = config.prompt_tokens + config.sampled_tokens
    if plan.vllm and plan.vllm.quantization:
        raise ConfigError("engine.quantization: quantised weights are not counted here; leave it")
    cache_size = None if plan.vllm else _cache_size(plan)
    if plan.tp not in (accepted := plan.shards.accepted_tp()):
        raise ConfigError(
            f"engine.tensor_parallel_size={plan.tp} does not divide this model's "
            f"{plan.shards.heads} attention heads, {plan.shards.kv_heads} key and value heads and "
            f"the sides of its weights; accepted: {', '.join(map(str, accepted))}"
        )
    _check_length(plan, plan.context)
    cache_gib = plan.vllm.kv_cache_gib if plan.vllm else None
    if cache_gib is not None and plan.context_bytes() > cache_gib * GIB:
        least = math.ceil(plan.context_bytes() / GIB * 1000) / 1000
        raise ConfigError(
            f"engine.kv_cache_gib={cache_gib} is too little for a context of {plan.context} "
            f"tokens; raise it to {least}, or lower engine.max_model_len: this plan needs {length}"
        )
    usable, missing = plan.usable_bytes(), plan.shortfall_bytes()
    if missing > 0:
        raise ConfigError(
            f"model_name: {config.model_name} does not fit: each GPU would need "
            f"{show_bytes(usable + missing)} and can give {show_bytes(usable)}, "
            f"{show_bytes(missing)} too little; what would do: "
            f"{', or '.join(_changes(plan)) or 'no one option alone'}"
        )
    if cache_size is not None:
        _check_length(plan, _shortened(plan, cache_size))


def _changes(plan: Plan) -> Iterator[str]:
    """Options that by themselves make it fit, the least of each kind."""
    larger = [tp for tp in plan.shards.accepted_tp() if plan.vllm and tp > plan.tp]
    length = plan.config.prompt_tokens + plan.config.sampled_tokens
    for name, values in {
        "engine.tensor_parallel_size": larger,
        "gpu": sorted(GPUS, key=GPUS.__getitem__),
        "engine.max_model_len": [length],
        "engine.dtype": ["bfloat16"] if plan.size == 4 else [],
        "engine.max_genomes": [plan.share] if plan.vllm else [],
    }.items():
        for value in values:
            given = {name: str(value)} | ({"gpu_memory": "None"} if name == "gpu" else {})
            if Plan(changed(plan.config, given), plan.model).shortfall_bytes() <= 0:
                yield f"{name}={value}"
                break


def report(plan: Plan) -> str:
    """The page that is printed."""
    lines: list[str] = []
    for label, number in _rows(plan):
        value = show_bytes(number) if isinstance(number, int) else number
        lines += [f"  {label:<72}{value:>14}"] if value else ["", label]
    return "\n".join(lines).strip()


def _rows(plan: Plan) -> Iterator[tuple[str, int | str]]:
    """Labels with bytes or text; those with no text are titles of what follows."""
    config, vllm, genome = plan.config, plan.vllm, plan.genome_bytes()
    attempted = config.problems_per_generation * config.attempts
    rollouts = config.population_size * attempted
    each = f"{'vllm' if vllm else 'torch'} with {plan.tp} x {config.gpu}"
    yield f"{config.model_name}: {plan.parameters:,} parameters in {plan.dtype}", ""
    space = f"low rank, rank {plan.rank}" if plan.rank else "full rank"
    yield f"of which genomes perturb ({space})", f"{plan.perturbed:,}"
    yield f"engines: {each}, {plan.gpu_bytes / 1e9:g} GB", f"{config.num_engines:,}"
    yield f"genomes of an engine, of {config.population_size:,}", f"{plan.share:,}"
    yield "genomes of an engine at once", f"{plan.resident():,}"
    fit = f"{plan.genomes_that_fit():,}"
    yield "genomes that would fit at once beside the same requests in flight", fit
    yield f"rollouts of an engine, of {rollouts:,}", f"{plan.share * attempted:,}"
    yield "tokens of prompts, all engines", f"{rollouts * config.prompt_tokens:,}"
    yield "tokens sampled, all engines", f"{rollouts * config.sampled_tokens:,}"
    yield "Memory of each GPU", ""
    yield "weights" if vllm else "weights, the base's and the centre's", plan.weight_bytes()
    yield "centre, float32", plan.centre_bytes()
    kind = f"LoRA slots of rank {plan.slot_rank}" if vllm else "rows of tables"
    residents = "one at a time, in the weights' place"
    if genome:
        kind = kind if plan.rank else "sets of weights"
        residents = f"{plan.resident_bytes() // genome:,} {kind}, {show_bytes(genome)} each"
    yield f"genomes: {residents}", plan.resident_bytes()
    if plan.gathered_bytes():
        yield "copies of these rows for a batch", plan.gathered_bytes()
    yield "work space, an estimate", plan.work_bytes()
    token = show_bytes(plan.kv_bytes())
    of_requests = f"{plan.slots():,} requests of {plan.request_tokens:,} tokens, {token} a token"
    yield f"keys and values of {of_requests}", plan.cache_bytes()
    if plan.prefix_bytes():
        yield "at most: keys and values of requests that have ended", plan.prefix_bytes()
    left = ", and what engine.gpu_memory_utilization leaves" if vllm else ""
    yield f"CUDA and temporaries{left}", plan.gpu_bytes - plan.usable_bytes()
    added = ", which vLLM adds to the cache" if vllm and not vllm.kv_cache_gib else ""
    yield f"remains{added}", plan.remaining_bytes()
    yield "all of it", plan.gpu_bytes
    if vllm:
        yield "Memory of an engine's machine", ""
        yield f"base copy, {plan.dtype}", plan.base_copy_bytes()
    step = f"sent through Ray: the step, {plan.terms:,} of the same to every engine"
    yield "Bytes of a generation, all engines", ""
    yield "sent through Ray: genomes, a seed and coefficient each", plan.genome_message_bytes()
    yield step, plan.step_message_bytes()
    yield "sent through Ray: prompts, at most", plan.prompt_message_bytes()
    yield "kept: the history's line, about", plan.history_bytes()

"""The formulas of `es_cookbook.commands.plan`: a method a number, its docstring the formula.

Sizes are what the engines allocate, and the tests hold them against engines. Times are floors: the
slower of arithmetic and memory traffic at data-sheet speed (a roofline, Williams et al. 2009),
which no engine reaches.

Left out: experts, compressed keys, quantised weights; prefix caching; what GPUs that share a model
tell each other; Envs and evaluations.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedModel

from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.torch.attention import round_up
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.torch.population_layers import (
    MIN_ROWS,
    ROWS_PER_BLOCK,
    PopulationModel,
    padded,
)
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.engines.vllm.memory import CENTRE_WORK_BYTES, GIB, Shards, slot_rank
from es_cookbook.evolution.spaces.base import ParameterInfo

if TYPE_CHECKING:
    from es_cookbook.commands.plan import PlanConfig

RUNTIME_BYTES = GIB
"""CUDA's context, libraries and captured graphs: a guess."""
NOISE_FLOPS = 100
"""Of making a number of noise: a guess. Counted are some 25 integer instructions, at half the rate
of float32's, of which one counts as two operations."""
_DEFAULT_CONTEXT = 4096
_MAX_ROWS, _MAX_TOKENS = 1024, 2048
"""vLLM's `max_num_seqs` and `max_num_batched_tokens`, as the vLLM engine has them."""
_SLOT_STEP, _MIN_SLOT = 32, 64
"""Lengths of the torch engine's cache slots."""


class Plan:
    """What a run needs; sizes are bytes, times seconds, for one engine unless it says otherwise.

    In the formulas `size` is the bytes of a number as it samples, `tp` the GPUs of an engine, `out`
    and `in` a weight's outputs and inputs. An engine samples a *block* at a time: its resident
    genomes, or one dense genome. *Rows* are requests that decode together.

    Args:
        config: the run.
        model: on the meta device.

    Raises:
        ConfigError: Options that cannot work together.
    """

    def __init__(self, config: "PlanConfig", model: PreTrainedModel) -> None:
        engine, text = config.engine, model.config.get_text_config()
        if not isinstance(engine, TorchEngineBuilder | VLLMEngineBuilder):
            raise ConfigError("engine must be torch or vllm, what each of num_engines is")
        self.config, self.model = config, model
        self.torch = engine if isinstance(engine, TorchEngineBuilder) else None
        self.vllm = engine if isinstance(engine, VLLMEngineBuilder) else None
        self.tp = self.vllm.tensor_parallel_size if self.vllm else 1
        self.shards = Shards(model, self.tp)
        self.infos, self.body = self.shards.infos, self.shards.body
        self.space = config.search_space(self.infos)
        self.rank = self.space.low_rank.rank if self.space.low_rank else 0
        self.layers, self.heads = int(text.num_hidden_layers), int(text.num_attention_heads)
        self.kv_heads = self.shards.kv_heads
        head = cast("torch.nn.Linear", model.get_output_embeddings()).weight
        self.vocabulary, self.hidden = head.shape
        self.head_dim = int(getattr(text, "head_dim", None) or self.hidden // self.heads)
        own_dtype = str(model.config.dtype or torch.float32).removeprefix("torch.")
        self.dtype = own_dtype if engine.dtype == "auto" else engine.dtype
        self.size = cast("torch.dtype", getattr(torch, self.dtype)).itemsize
        own_context = int(getattr(text, "max_position_embeddings", _DEFAULT_CONTEXT))
        self.context = min(own_context, engine.max_model_len or _DEFAULT_CONTEXT)
        self.gpu = config.hardware(self.size)

    # Memory of each GPU.

    def parameters(self) -> int:
        """Σ elements of the parameters, tied ones once."""
        return _elements(self.infos)

    def own_bytes(self) -> int:
        """A torch engine's set of weights: size · elements of linear layers and perturbed ones.

        The engine has the base, one such set for the centre, and one for each dense genome. A tied
        table is the output head, so a linear layer.
        """
        linear = {i.name.rpartition(".")[0] for i in self.body}
        linear.add(str(self.shards.head).rpartition(".")[0])
        names = self.space.shapes
        own = (i for i in self.infos if i.name.rpartition(".")[0] in linear or i.name in names)
        return self.size * _elements(own)

    def weight_bytes(self) -> int:
        """vLLM: size · Σ out · in over `Shards`. torch: size · parameters + own_bytes."""
        if self.torch:
            return self.size * self.parameters() + self.own_bytes()
        return self.size * self.shards.elements(self.infos)

    def slot_rank(self) -> int:
        """Least rank that vLLM's slots come in (1, 8, 16, 32, ...) for rank · terms a genome."""
        return slot_rank(self.rank * (self.vllm.terms_per_genome if self.vllm else 1))

    def genome_bytes(self) -> int:
        """A resident genome.

        vLLM, low rank: size · slot rank · Σ (out + in) over the shards of linear weights, and of
        embedding and output head whole (some models, as Qwen2, have no slots of those two).
        torch, low rank: size · Σ ranks · (in + out) over matmuls, of all that one computes, as q, k
        and v; ranks and out above 4 are multiples of 4. Dense: own_bytes; vLLM 0, it takes the
        model's place.
        """
        if self.torch is None:
            sides = self.shards.slot_elements() + 2 * (self.vocabulary + self.hidden)
            return self.size * self.slot_rank() * sides if self.rank else 0
        if not self.rank:
            return self.own_bytes()
        members = PopulationModel(copy.deepcopy(self.model)).group_members()
        perturbed = [group for name, group, _ in members if name in self.space.shapes]
        groups = {group.index: group for group in perturbed}
        counts = Counter(group.index for group in perturbed)
        return self.size * sum(
            padded(self.rank * counts[i]) * (g.in_features + padded(sum(g.sizes)))
            for i, g in groups.items()
        )

    def share(self) -> int:
        """Genomes of an engine: population / engines, rounded up."""
        return math.ceil(self.config.population_size / self.config.num_engines)

    def resident(self) -> int:
        """Genomes at once: the share, if max_genomes (vLLM) or memory_gib / genome (torch) allow.

        Dense ones are one at a time in vLLM.
        """
        if self.vllm:
            return min(self.share(), self.vllm.max_genomes) if self.rank else 1
        memory = self.torch.memory_gib * GIB if self.torch else 0
        return min(self.share(), max(1, int(memory) // self.genome_bytes()))

    def resident_bytes(self) -> int:
        """Genome · (genomes + 1 for the centre, if low rank); vLLM always makes max_genomes."""
        genomes = self.vllm.max_genomes if self.vllm else self.resident()
        return self.genome_bytes() * (genomes + (1 if self.rank else 0))

    def kv_bytes(self) -> int:
        """A token on one GPU: 2 · layers · (kv heads / tp, at least 1) · head width · size."""
        return 2 * self.layers * max(1, self.kv_heads // self.tp) * self.head_dim * self.size

    def request_tokens(self) -> int:
        """Places in the cache: prompt + sampled; torch: a multiple of 32, at least 64."""
        tokens = self.config.prompt_tokens + self.config.sampled_tokens
        return max(_MIN_SLOT, round_up(tokens, _SLOT_STEP)) if self.torch else tokens

    def block_genomes(self) -> int:
        """Genomes sampled at once: the resident ones, or one dense one."""
        return self.resident() if self.rank else 1

    def block_requests(self) -> int:
        """Block genomes · problems · attempts."""
        return self.block_genomes() * self.config.problems_per_generation * self.config.attempts

    def max_rows(self) -> int:
        """Engine's most rows: max_batch_size (torch), max_num_seqs in `extra`, or 1,024 (vLLM)."""
        if self.torch:
            return self.torch.max_batch_size
        return int(self.vllm.extra.get("max_num_seqs", _MAX_ROWS)) if self.vllm else 0

    def pass_tokens(self) -> int:
        """Prompt tokens of a forward pass: prefill_tokens, max_num_batched_tokens, or 2,048."""
        if self.torch:
            return self.torch.prefill_tokens
        return int(self.vllm.extra.get("max_num_batched_tokens", _MAX_TOKENS)) if self.vllm else 0

    def gathered_bytes(self) -> int:
        """torch, low rank: genome · (rows + prefill tokens) / 8, copied for blocks of 8 rows."""
        if not (self.torch and self.rank):
            return 0
        rows = min(self.block_requests(), self.max_rows())
        return self.genome_bytes() * math.ceil((rows + self.pass_tokens()) / ROWS_PER_BLOCK)

    def work_bytes(self) -> int:
        """A guess: 2 · (pass tokens · widest (in + out) · size / tp + rows · vocabulary · 4)."""
        widest = max(sum(info.shape) for info in self.body)
        rows = min(self.block_requests(), self.max_rows())
        activations = self.pass_tokens() * widest * self.size // self.tp
        return 2 * (activations + rows * self.vocabulary * 4)

    def usable_bytes(self) -> int:
        """Memory · gpu_memory_utilization (vLLM; all of it for torch) - 1 GiB for CUDA.

        And less 0.5 GiB to move the centre with.
        """
        part = self.vllm.gpu_memory_utilization if self.vllm else 1.0
        return max(0, int(self.gpu.memory * 1e9 * part) - RUNTIME_BYTES - CENTRE_WORK_BYTES)

    def centre_bytes(self) -> int:
        """4 · perturbed elements (vLLM: of `Shards`): the centre is float32, beside the weights."""
        if self.torch:
            return 4 * self.perturbed_elements()
        return 4 * self.shards.centre_elements(self.space)

    def fixed_bytes(self) -> int:
        """All but the cache: weights + centre + resident genomes + gathered + work space."""
        weights = self.weight_bytes() + self.centre_bytes()
        return weights + self.resident_bytes() + self.gathered_bytes() + self.work_bytes()

    def context_bytes(self) -> int:
        """The least cache that an engine starts with: context · kv, for torch 16 of them."""
        return self.context * self.kv_bytes() * (MIN_ROWS if self.torch else 1)

    def cache_room(self) -> int:
        """Usable - fixed, or kv_cache_gib where it is given."""
        engine = self.torch or self.vllm
        given = engine.kv_cache_gib if engine else None
        return self.usable_bytes() - self.fixed_bytes() if given is None else int(given * GIB)

    def slots(self) -> int:
        """Requests that the cache holds, up to max rows; torch: whole blocks of 8, at least 16."""
        held = self.cache_room() // (self.kv_bytes() * self.request_tokens())
        slots = min(self.max_rows(), held)
        return max(MIN_ROWS, slots // ROWS_PER_BLOCK * ROWS_PER_BLOCK) if self.torch else slots

    def rows(self) -> int:
        """Requests that decode together: those of the block, up to slots."""
        return max(1, min(self.block_requests(), self.slots()))

    def cache_bytes(self) -> int:
        """Keys and values: rows (torch, which makes all of them: slots) · request tokens · kv."""
        rows = self.slots() if self.torch else self.rows()
        return rows * self.request_tokens() * self.kv_bytes()

    def remaining_bytes(self) -> int:
        """Usable - fixed - cache."""
        return self.usable_bytes() - self.fixed_bytes() - self.cache_bytes()

    def shortfall_bytes(self) -> int:
        """Fixed + (kv_cache_gib or a context; torch: cache) - usable; above 0 it does not start."""
        least = self.cache_bytes() if self.torch else self.context_bytes()
        if self.vllm and self.vllm.kv_cache_gib is not None:
            least = self.cache_room()
        return self.fixed_bytes() + least - self.usable_bytes()

    def genomes_that_fit(self) -> int:
        """Resident genomes, and remaining / genome more."""
        if not self.genome_bytes():
            return self.resident()
        there = self.resident_bytes() // self.genome_bytes() - (1 if self.rank else 0)
        return there + self.remaining_bytes() // self.genome_bytes()

    # Memory of the engine's machine.

    def base_copy_bytes(self) -> int:
        """vLLM: size · perturbed elements, to restore the centre; torch has the base's weights."""
        return self.size * self.perturbed_elements() if self.vllm else 0

    def perturbed_elements(self) -> int:
        """Σ elements of the parameters that the search space selects."""
        return sum(math.prod(shape) for shape in self.space.shapes.values())

    # Time of a generation.

    def requests(self) -> int:
        """Rollouts of an engine: share · problems · attempts."""
        return self.share() * self.config.problems_per_generation * self.config.attempts

    def blocks(self) -> int:
        """Share / block genomes, rounded up."""
        return math.ceil(self.share() / self.block_genomes())

    def factor_elements(self) -> int:
        """A and B of a low-rank term: rank · Σ (out + in) over perturbed weights; dense: 0."""
        return self.rank * sum(sum(shape) for shape in self.space.shapes.values())

    def token_flops(self) -> int:
        """2 · (Σ out · in but for the output head + factors); 2 N a token (arXiv:2001.08361)."""
        return 2 * (_elements(self.body) + self.factor_elements())

    def head_flops(self) -> int:
        """2 · vocabulary · hidden, for each token that is sampled."""
        return 2 * self.vocabulary * self.hidden

    def prefill_flops(self) -> int:
        """Requests · (prompt · token + head + 2 · layers · heads · width · prompt²)."""
        prompt = self.config.prompt_tokens
        attention = 2 * self.layers * self.heads * self.head_dim * prompt**2
        return self.requests() * (prompt * self.token_flops() + self.head_flops() + attention)

    def decode_flops(self) -> int:
        """Requests · (sampled - 1) · (token + head + 4 · layers · heads · width · mean length).

        The mean length is prompt + sampled / 2; the prefill gave the first token.
        """
        attention = 4 * self.layers * self.heads * self.head_dim * self._mean_length()
        per_token = self.token_flops() + self.head_flops() + attention
        return int(self.requests() * (self.config.sampled_tokens - 1) * per_token)

    def read_bytes(self) -> int:
        """Weights that every forward pass reads: size · (Σ out · in + vocabulary · hidden)."""
        return self.size * (_elements(self.body) + self.vocabulary * self.hidden)

    def factor_bytes(self) -> int:
        """Factors that a decode step reads: genome · rows / 8 (torch).

        vLLM: size · factors · slot rank / rank · genomes, at most one a row.
        """
        if not self.rank:
            return 0
        if self.torch:
            return self.genome_bytes() * math.ceil(self.rows() / ROWS_PER_BLOCK)
        padded = self.factor_elements() // self.rank * self.slot_rank()
        return self.size * padded * min(self.block_genomes(), self.rows())

    def prefill_traffic(self) -> int:
        """Passes · read + requests · prompt · kv · tp; passes = requests · prompt / pass tokens.

        Passes are rounded up for each block.
        """
        tokens = self.requests() * self.config.prompt_tokens
        passes = self.blocks() * math.ceil(tokens / self.blocks() / self.pass_tokens())
        return passes * self.read_bytes() + tokens * self.kv_bytes() * self.tp

    def decode_steps(self) -> int:
        """Blocks · (a block's requests / rows, rounded up) · (sampled - 1)."""
        rounds = math.ceil(self.requests() / self.blocks() / self.rows())
        return self.blocks() * rounds * (self.config.sampled_tokens - 1)

    def decode_traffic(self) -> int:
        """Steps · (read + factors) + requests · (sampled - 1) · mean length · kv · tp."""
        tokens = self.requests() * (self.config.sampled_tokens - 1)
        cache = tokens * self._mean_length() * self.kv_bytes() * self.tp
        return int(self.decode_steps() * (self.read_bytes() + self.factor_bytes()) + cache)

    def seconds(self, flops: float, traffic: float, size: int | None = None) -> tuple[float, str]:
        """The larger of flops / (tp · FLOP/s) and traffic / (tp · bytes/s), and which it is."""
        arithmetic = flops / (self.tp * self.gpu.tflops(size or self.size) * 1e12)
        memory = traffic / (self.tp * self.gpu.bandwidth * 1e9)
        return max((arithmetic, "arithmetic"), (memory, "memory traffic"))

    def load_seconds(self) -> float:
        """The larger of noise · 100 / float32 FLOP/s and bytes / GB/s, for the engine's share.

        Low rank: noise = factors · share, bytes = genome · share, on each GPU. Dense: noise =
        perturbed · share, bytes = (4 + size) · that: the centre read, weights written.
        """
        if self.rank:
            noise, moved = self.factor_elements(), self.genome_bytes() * self.tp
        else:
            noise, moved = self.perturbed_elements(), self.perturbed_elements() * (4 + self.size)
        return self.seconds(noise * NOISE_FLOPS * self.share(), moved * self.share(), 4)[0]

    def terms(self) -> int:
        """Terms of a step: population / 2, a mirrored pair is one."""
        return math.ceil(self.config.population_size / 2)

    def step_seconds(self) -> float:
        """The larger of perturbed · terms · 4 · rank / float32 FLOP/s and bytes / GB/s.

        A product and a sum, each where both could have been one. Dense: 100 in place of 4 · rank.
        Bytes = perturbed · (4 read + 4 written + 4 for the fingerprint + 4 + size for the weights).
        """
        elements = self.perturbed_elements()
        flops = elements * self.terms() * (4 * self.rank or NOISE_FLOPS)
        return self.seconds(flops, elements * (16 + self.size), 4)[0]

    def _mean_length(self) -> float:
        return self.config.prompt_tokens + self.config.sampled_tokens / 2


def _elements(infos: Iterable[ParameterInfo]) -> int:
    return sum(math.prod(info.shape) for info in infos)

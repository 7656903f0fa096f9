"""Find the right path for a model by running it: right, or refused.

Transformers has about two hundred causal language models, and any of them may do in its attention,
its cache or its layers what an engine does not expect. So before a model is used, the engine's own
code runs it: prompts from a random sequence, then the rest of it token by token, by the centre and
by a genome. The log-probabilities must be those of the model's own forward, and of its forward with
the genome's weights merged. Paths are tried from the fastest on (`PATHS`), and a model for which
none agrees is refused by name, with the difference.

A 16-bit model on the CPU is then run once more as it will sample, with float32 around its products,
and has that if it agrees up to rounding (see `kernels.modules`).

To be quick the check first runs a part of the model, in float32: its first layers up to one of
every kind there is, and the first tokens of its vocabulary. Only if that does not show one of the
fast paths to be right, it runs all of it. A sequence of a few tokens does not show how far back a
layer looks; on the flat path, which has its own attention, that is compared over the whole
context (see `cache_size`).
"""

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from es_cookbook.checkpoints.linear_weights import named_weights
from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.common.errors import ModelError
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch.attention import attention_of, set_attention
from es_cookbook.engines.torch.flat import FlatForward, new_cache
from es_cookbook.engines.torch.kernels.modules import FLAT, NARROW, Path
from es_cookbook.engines.torch.kernels.products import one_thread
from es_cookbook.engines.torch.memory import CacheSize, Unfit, flat_cache_size, own_cache_size
from es_cookbook.engines.torch.own import OwnForward
from es_cookbook.engines.torch.population_layers import ROWS_PER_BLOCK, PopulationModel
from es_cookbook.engines.torch.prefix_cache import PrefixCache
from es_cookbook.engines.torch.resident_weights import GenomeTables
from es_cookbook.engines.torch.slots import Forward, SlotTable, Work
from es_cookbook.evolution.centre import Centre, noise_device
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.spaces.base import SearchSpace
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.rl.types import Observation, SamplingParams

_Copy: TypeAlias = Callable[[PreTrainedModel], PreTrainedModel]
"""Makes a copy in float32: of the first layers, or of all of a model."""

_OWN = (
    Path(),
    Path(padded=False),
    Path(mixed=False),
    Path(padded=False, mixed=False),
    Path(padded=False, cached=False),
    Path(padded=False, cached=False, mixed=False),
)
PATHS = (FLAT, *_OWN)
"""Paths from the fastest to the one that asks least of a model."""
TOLERANCE = 1e-3
"""Greatest difference of log-probabilities in float32 that still is rounding."""
ROUNDED = 0.5
"""The same where products are rounded to 16 bits."""

LARGE = 1 << 28
"""Parameters from which on only the first layers are run: all of them take 4 GiB and more."""
_SEQUENCE = 12
_DECODED = 3
_BLOCKS = 64
"""Blocks of the cache: more than all requests need."""
_VOCABULARY = 512
_SEED = 1
_SHARE = 0.3
"""Size of the genome's change, as a share of the weights' own."""
_FORGETFUL = ("MoshiForCausalLM",)
"""Models whose cache goes wrong where no short sequence shows it: past the window, for Moshi."""
_INDICES = ("layer_idx", "layer_id", "layer_number", "training")
"""Attributes that differ between layers of one kind, or do not matter."""


def right_path(
    model: PreTrainedModel,
    space: SearchSpace,
    context_length: int,
    products: torch.dtype | None = None,
) -> tuple[Path, CacheSize]:
    """Return the first of `PATHS` on which the model answers as by itself, and its cache size.

    Args:
        model: model in evaluation mode, on its device.
        space: parameters that genomes perturb.
        context_length: most tokens of prompt and action together.
        products: dtype of products on the CPU; None: that of the weights.

    Raises:
        ModelError: There is none; says by how much the last of them differs.
    """
    if getattr(model.config, "rescale_every", 0):
        model.config.rescale_every = 0  # RWKV would divide its weights when it is first run
    why = "it has no forward that takes tokens alone"
    is_large = sum(parameter.numel() for parameter in model.parameters()) > LARGE
    with torch.inference_mode(), one_thread():
        for part in (_first_layers, _whole):
            try:
                weights = None if space.is_dense else space.weights
                check = _Check(model, part, weights, products)
            except Exception as error:  # of any kind: this cannot be taken apart, or not be run
                why = _sentence(error)
                continue
            paths = PATHS if is_large or part is _whole else PATHS[:2]
            for path in paths:
                try:
                    size = check.cache_size(path, context_length) if path.flat else None
                    difference = check.difference(path)
                    if difference <= TOLERANCE:
                        if type(model).__name__ in _FORGETFUL and not path.flat:
                            path = dataclasses.replace(path, cached=False)
                        path = check.widened(path)
                        if size is None or path.wide:
                            size = check.cache_size(path, context_length)
                        return path, size
                    why = f"log-probabilities are off by {difference:.2g}"
                except Exception as error:  # of any kind: the model is not made for this path
                    why = _sentence(error)
            if is_large:
                break
    raise ModelError(
        f"model_name: the torch engine cannot run {type(model).__name__} as transformers does: "
        f"{why}; accepted are models with which it agrees to {TOLERANCE}"
    )


def _sentence(error: Exception) -> str:
    first = str(error).strip().splitlines()[:1]
    return first[0] if isinstance(error, Unfit) else ": ".join([type(error).__name__, *first])


class _Check:
    """A model and its own log-probabilities: as it is, and with a genome's weights merged."""

    def __init__(
        self,
        model: PreTrainedModel,
        part: _Copy,
        weights: Collection[str] | None,
        products: torch.dtype | None,
    ) -> None:
        """`part` makes the copy to run; `weights` host low-rank genomes, None if they are dense."""
        self._model, self._part, self._products = model, part, products
        self._device = model.device
        module = part(model)
        self._unused: PreTrainedModel | None = module
        attention = attention_of(module)
        # transformers' other implementations may omit parts, such as Gemma 2's capped scores.
        set_attention(module, "eager")
        infos = [
            info for info in parameter_infos(module) if weights is None or info.name in weights
        ]
        # Quantisation does not matter here.
        linear = [dataclasses.replace(info, bits=None) for info in infos if info.kind == "linear"]
        embedding = module.get_input_embeddings()
        if not isinstance(embedding, nn.Embedding):
            raise Unfit("it does not take tokens of one vocabulary")
        size = embedding.weight.shape[0]
        rng = np.random.default_rng(_SEED)
        # Not the first tokens: some models see padding in them.
        self._tokens_T = tuple(rng.integers(min(4, size - 1), size, _SEQUENCE).tolist())
        self._genomes_G = [Genome()]
        self._expected_G_T_V = [self._own_logprobs(module)]
        if weights is not None and linear:
            space = LowRank()(linear)
            weights_of = {n: w for n, w in named_weights(module) if n in space.shapes}
            there = noise_device(self._device)
            values = {name: weight.to(there) for name, weight in weights_of.items()}
            self._space, self._centre = space, Centre(values, space, device=there)
            rms = float(np.mean([float(w.norm()) * w.numel() ** -0.5 for w in values.values()]))
            self._genomes_G = [Genome((Term(_SEED, _SHARE * rms),)), Genome()]
            for name, weight in weights_of.items():
                weight.copy_(self._centre.perturbed(self._genomes_G[0], name))
            self._expected_G_T_V.insert(0, self._own_logprobs(module))
            for name, weight in weights_of.items():
                weight.copy_(self._centre.weights[name])
        set_attention(module, attention)

    def _own_logprobs(self, module: PreTrainedModel) -> torch.Tensor:
        tokens = torch.tensor([self._tokens_T], device=self._device)
        return module(input_ids=tokens, use_cache=False).logits[0].float().log_softmax(-1)

    def cache_size(self, path: Path, context_length: int) -> CacheSize:
        """Return the cache size of the model's tokens on a path.

        Raises:
            Unfit: The model cannot run on it.
        """
        if not path.flat:
            found = own_cache_size(self._model, path)
            times = torch.float32.itemsize // self._model.dtype.itemsize if path.wide else 1
            return CacheSize(found.fixed * times, found.per_token * times)
        module = self._unused or self._part(self._model)
        layers = None if self._part is _whole else _layers_like(self._model)
        on_cpu = module.device.type == "cpu"
        size = flat_cache_size(module, context_length, layers, on_cpu=on_cpu)
        if on_cpu and not path.wide:  # in float32 for any dtype of the model
            return size
        kept_bytes = path.kept.itemsize if on_cpu else self._model.dtype.itemsize
        return CacheSize(0, size.per_token * kept_bytes // torch.float32.itemsize)

    def difference(self, path: Path) -> float:
        """Return the greatest difference of any log-probability on this path; NaN if any is NaN."""
        module, self._unused = self._unused or self._part(self._model), None
        model = PopulationModel(module, path)
        if len(self._genomes_G) > 1:
            model.tables = GenomeTables(model, self._space, self._centre, 1).fill(
                self._genomes_G[:1]
            )
        rows = range(len(self._genomes_G))
        cohorts = [rows] if path.mixed else [[row] for row in rows]
        return float(np.max([self._of_cohort(model, path, own) for own in cohorts]))

    def widened(self, path: Path) -> Path:
        """Return the path with float32 around products, for 16 bits on the CPU, if that agrees."""
        own = self._model.dtype
        if self._device.type != "cpu":
            return path
        if own not in NARROW:  # products have its dtype, or are quantised
            quantised = self._products if self._products == torch.int8 else None
            return dataclasses.replace(path, products=quantised)
        path = dataclasses.replace(path, products=self._products or own)
        self._unused = self._part(self._model)
        stored = {name: each.dtype for name, each in self._model.named_parameters()}
        for name, parameter in self._unused.named_parameters():  # some of it may be in float32
            parameter.data = parameter.data.to(stored[name])
        kept = own if own == torch.bfloat16 else torch.float32  # of what kernels read
        wide = dataclasses.replace(path, wide=True, kept=kept)
        try:
            return wide if self.difference(wide) <= ROUNDED else path
        except Exception:  # of any kind: a model that reads its weights finds other dtypes then
            return path

    def _of_cohort(self, model: PopulationModel, path: Path, rows: Sequence[int]) -> float:
        """Prefill, score, decode, move rows to other places, and decode on."""
        longest = _SEQUENCE - _DECODED
        prefill_tokens = ROWS_PER_BLOCK * len(rows) * longest
        if path.flat:
            prefixes = PrefixCache(new_cache(self._device, _BLOCKS, path.kept), _BLOCKS)
            forward: Forward = FlatForward(self._device, prefill_tokens, prefixes)
            lengths = [longest, longest - _DECODED]
        else:
            # Twice as many rows as run together: their caches are joined, and each is of all
            # genomes.
            forward = OwnForward(path, self._device, prefill_tokens)
            lengths = [longest] * (ROWS_PER_BLOCK + 1)
            if path.padded:
                lengths[1::2] = [longest - _DECODED] * (ROWS_PER_BLOCK // 2)
        blocks = [lengths[first : first + ROWS_PER_BLOCK] for first in (0, ROWS_PER_BLOCK)]
        works = [self._request(model, row, n) for block in blocks for row in rows for n in block]
        table = SlotTable(len(rows) * 2 * ROWS_PER_BLOCK, 64)
        forward.fit(table.num_slots, table.slot_length)
        forward.turn_to(model)
        works = forward.admit(works)
        placed = list(zip(works, table.place(works), strict=True))
        differences: list[float] = []
        for slots, logits in forward.prefill(table, placed):
            differences.append(self._force(table, slots, logits))
        scored = [self._request(model, work.row, len(work.sequence), True) for work in works]
        for work, logprobs_T in zip(scored, forward.score(scored), strict=True):
            request = cast(LogprobsRequest, work.request)
            first = len(request.prompt_T)
            expected = self._expected_G_T_V[work.row][first - 1 : first - 1 + len(logprobs_T)]
            targets = torch.tensor(request.continuation_T, device=expected.device)[:, None]
            found_T = torch.from_numpy(logprobs_T).to(expected.device)
            differences.append(_most(found_T - expected.gather(1, targets)[:, 0]))
        for step in range(1, _DECODED):
            if step == 1:
                order = np.arange(table.num_rows).reshape(-1, ROWS_PER_BLOCK)[::-1].flatten()
                forward.keep(order)
                table.reorder(order)
            slots = table.active.nonzero()[0]
            logits, of_slots = forward.decode(table)
            differences.append(self._force(table, slots, logits[of_slots]))
        return float(np.max(differences))

    def _request(self, model: PopulationModel, row: int, length: int, score: bool = False) -> Work:
        prompt_T = self._tokens_T[:length]
        if score:
            continuation_T = self._tokens_T[length : length + _DECODED]
            return Work(LogprobsRequest(row, prompt_T, continuation_T), model, row, 0)
        params = SamplingParams(max_tokens=_DECODED)
        return Work(SampleRequest(row, Observation(prompt_T), params), model, row, _DECODED)

    def _force(self, table: SlotTable, slots: np.ndarray, logits: torch.Tensor) -> float:
        """Compare these slots' log-probabilities, and continue them with the sequence's tokens."""
        differences: list[float] = []
        tokens: list[int] = []
        for slot, own in zip(slots.tolist(), logits.float().log_softmax(-1), strict=True):
            work = table.works[slot]
            assert work is not None
            at = len(work.sequence) + int(table.count[slot])
            differences.append(_most(own - self._expected_G_T_V[work.row][at - 1]))
            tokens.append(self._tokens_T[at])
        table.accept(slots, np.array(tokens), None)
        return float(np.max(differences))


def _most(differences: torch.Tensor) -> float:
    return float(differences.abs().max())


def _whole(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model in float32."""
    return copy.deepcopy(model, _float32(model.state_dict(keep_vars=True).values(), {}))


def _first_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of some layers and tokens of a model, in float32.

    Raises:
        ValueError: Its layers cannot be identified.
    """
    layers = _layers(model)
    number = max(2, 1 + max(_layers_like(model)))
    memo: dict[int, object] = {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for module in (embedding, head):
        for tensor in () if module is None else module.parameters():
            memo[id(tensor)] = nn.Parameter(tensor[:_VOCABULARY].float(), False)
    dropped = {id(tensor) for layer in layers[number:] for tensor in layer.parameters()}
    dropped -= {id(tensor) for layer in layers[:number] for tensor in layer.parameters()}
    tensors = [*model.parameters(), *model.buffers()]
    _float32([tensor for tensor in tensors if id(tensor) not in dropped], memo)
    memo[id(layers)] = nn.ModuleList(copy.deepcopy(layer, memo) for layer in layers[:number])
    part = copy.deepcopy(model, memo)
    config = part.config.get_text_config()
    config.num_hidden_layers = number
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:number]
    return part


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of a model's layers.

    Raises:
        ValueError: It cannot be identified.
    """
    number = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    lists = [layers for layers in lists if len(layers) == number]
    if len(lists) != 1:
        raise ValueError("its layers are in no list, or in more than one")
    return lists[0]


def _layers_like(model: PreTrainedModel) -> list[int]:
    """Return for each layer the index of the first one that does the same with other weights."""
    layers = _layers(model)
    types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    kinds = [(kind, _kind(layer)) for kind, layer in zip(types, layers, strict=True)]
    return [kinds.index(kind) for kind in kinds]


def _float32(tensors: Iterable[torch.Tensor], memo: dict[int, object]) -> dict[int, object]:
    """Extend a memo for `copy.deepcopy` by float32 copies of tensors that it lacks."""
    for tensor in tensors:
        if tensor.is_floating_point() and id(tensor) not in memo:
            as_float = tensor.to(torch.float32, copy=True)
            memo[id(tensor)] = (
                nn.Parameter(as_float, False) if isinstance(tensor, nn.Parameter) else as_float
            )
    return memo


def _kind(layer: nn.Module) -> object:
    """Return a key that is equal for layers that differ in their weights alone."""
    return [
        (
            name,
            type(module),
            {key: value for key, value in vars(module).items() if _is_setting(key, value)},
            [tuple(parameter.shape) for parameter in module.parameters(recurse=False)],
        )
        for name, module in layer.named_modules()
    ]


def _is_setting(key: str, value: object) -> bool:
    return key not in _INDICES and isinstance(value, bool | int | float | str | tuple | None)

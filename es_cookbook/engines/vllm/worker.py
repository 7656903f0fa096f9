"""The code in a vLLM worker: it makes genomes from seeds, in the weights that it samples with.

vLLM imports this module in every worker before the model is loaded and mixes `GenomeWorker` into
the worker. The engine calls its methods by name; arguments and answers are plain numbers, texts,
bytes and lists: once the search space, then seeds (or a small space's coordinates), never weights.

The centre is kept in float32, for the part of each parameter that the rank has. The weights that
sample are always derived from it, never undone. Dense genomes take the weights' place one by one;
low-rank genomes are LoRA slots beside the centre's weights, written here from (seed, coefficient);
adapters are slots beside the base's weights, which stay as they are, so these may be quantised.
"""

import functools
import pickle
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, cast

import torch
from vllm.config import set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.gpt2 import GPT2LMHeadModel
from vllm.platforms import current_platform

from es_cookbook.checkpoints.models import AsStored, keep_tokens, load_architecture, stored_form
from es_cookbook.checkpoints.tensors import restore_centre
from es_cookbook.common.errors import EngineError, ESCookbookError, ModelError
from es_cookbook.common.terminal import plural
from es_cookbook.engines.genome_terms import GenomeFactors, Slots
from es_cookbook.engines.vllm import cpu
from es_cookbook.engines.vllm.layout import Placement, find_placements, find_slots
from es_cookbook.engines.wire import decode_genomes, decode_steps
from es_cookbook.evolution.centre import Centre, noise_device
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.noise import Part
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpace

if current_platform.is_cpu():
    cpu.prepare()

Answer: TypeAlias = tuple[str, object]
"""An empty text and the result, or an error's class and its sentence."""

_LORA_OF_GPT2: dict[str, object] = {
    "supports_lora": True,
    "packed_modules_mapping": {"c_attn": ["c_attn"]},
    "embedding_modules": {"lm_head": "output_embeddings"},
    "lora_skip_prefixes": [],
    "is_3d_moe_weight": False,
    "is_non_gated_moe": False,
    "lora_manager": None,
}
"""GPT-2: vLLM has LoRA layers for all its linear weights, but its model does not say so."""

for _name, _value in _LORA_OF_GPT2.items():
    setattr(GPT2LMHeadModel, _name, _value)

FingerprintPiece: TypeAlias = Sequence[str | int]
"""Name, first and last row, first and last column, and that part's term in the fingerprint."""
_Weights: TypeAlias = int | Literal["centre", "base"]
"""The weights of a loaded genome, by its index, of the centre or of the base."""
_Arguments = ParamSpec("_Arguments")
_T = TypeVar("_T", Placement, Slots)


def slot_request(slot: int) -> LoRARequest:
    """Return the name of a slot in a vLLM request; it never leads to a file."""
    return LoRARequest(f"slot-{slot}", slot + 1, "filled by es_cookbook")


def _answers(method: Callable[_Arguments, object]) -> Callable[_Arguments, Answer]:
    """Return our own errors with their class: vLLM would turn them into text."""

    @functools.wraps(method)
    def answer(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Answer:
        try:
            return "", method(*args, **kwargs)
        except ESCookbookError as error:
            return type(error).__name__, str(error)

    return answer


class GenomeWorker:
    """A mixin for vLLM workers; see the module's text."""

    model_runner: Any  # vLLM's own
    _genomes: "_RankGenomes"

    @_answers
    def genomes_open(self, what: bytes, num_slots: int) -> list[FingerprintPiece]:
        """Get ready to host genomes.

        Args:
            what: the search space, the Hugging Face model's parameters, the name of the dtype that
                weights are rounded to, and rows of the vocabulary without tokens, pickled.
            num_slots: LoRA slots; 0 where the space needs none.
        """
        space, infos, dtype, never = pickle.loads(what)
        if num_slots:
            self._take_slots(num_slots)
        model = cast(torch.nn.Module, self.model_runner.model)
        if never:
            _sample_tokens_alone(self.model_runner.model, torch.tensor(sorted(never)))
        with set_current_vllm_config(self.model_runner.vllm_config):  # its activations ask for it
            as_stored = stored_form(load_architecture(self.model_runner.model_config.model))
        with _writing_weights():
            self._genomes = _RankGenomes(model, space, infos, as_stored, getattr(torch, dtype))
            if num_slots:
                self._genomes.load([])
            self._genomes.centre.fingerprint()
        return self._fingerprint()

    @_answers
    def genomes_load(self, genomes: bytes) -> None:
        """Make encoded genomes resident, in place of any before."""
        with torch.no_grad():
            self._genomes.load(decode_genomes(genomes))

    @_answers
    def genomes_use(self, weights: _Weights) -> None:
        """Write the centre's, the base's or a dense genome's weights into the model."""
        with _writing_weights():
            self._genomes.use(weights)

    @_answers
    def genomes_apply(self, step: bytes) -> list[FingerprintPiece]:
        """Move the centre by an encoded step; no genome is resident afterwards."""
        (decoded,) = decode_steps(step)
        return self._move(lambda centre: centre.apply(decoded))

    @_answers
    def genomes_restore(self, steps: bytes, snapshot: str | None) -> list[FingerprintPiece]:
        """Set the centre to the base moved by encoded steps; no genome is resident afterwards.

        The rank reads its own parts of a snapshot on the way, and goes on from there.
        """
        path = None if snapshot is None else Path(snapshot)
        decoded = list(decode_steps(steps))
        return self._move(lambda centre: restore_centre(centre, decoded, path))

    def _move(self, move: Callable[[Centre], object]) -> list[FingerprintPiece]:
        with _writing_weights():
            move(self._genomes.centre)
            self._genomes.load([])
            self._genomes.use("centre")
            return self._fingerprint()

    def _fingerprint(self) -> list[FingerprintPiece]:
        """Return the terms of this rank's parts in the centre's fingerprint."""
        centre = self._genomes.centre
        return [
            (name, *part.rows, *part.columns, centre.fingerprints[name])
            for name, part in centre.parts.items()
        ]

    def _take_slots(self, num_slots: int) -> None:
        """Take LoRA slots for good, so that requests that name one find it there."""
        manager = self.model_runner.lora_manager
        for slot in range(num_slots):
            manager.add_dummy_lora(slot_request(slot), 1)
            manager._adapter_manager.activate_adapter(slot + 1)
        # Before each step vLLM checks that the batch's adapters are there, one by one; they are.
        vars(manager)["_apply_adapters"] = _nothing


def _sample_tokens_alone(model: Any, never: torch.Tensor) -> None:  # noqa: ANN401
    """Make a model compute logits from which only tokens are sampled.

    All that vLLM samples or scores comes from its `compute_logits`, outside of graphs.
    """
    compute = cast("Callable[..., torch.Tensor | None]", model.compute_logits)
    never = never.to(next(model.parameters()).device)

    @functools.wraps(compute)
    def of_tokens(*args: object, **kwargs: object) -> torch.Tensor | None:
        logits = compute(*args, **kwargs)  # None on ranks that do not sample.
        return logits if logits is None else keep_tokens(logits, never)

    model.compute_logits = of_tokens


@contextmanager
def _writing_weights() -> Generator[None]:
    """Allow writes to the model's weights inside the block."""
    try:
        with torch.no_grad():
            yield
    finally:
        cpu.weights_changed()


def _nothing(requests: object) -> None:
    del requests


class _RankGenomes:
    """The genomes of one rank.

    Args:
        dtype: dtype that weights are rounded to; the model may hold them in float32.

    Attributes:
        centre: centre of the parts that the rank has.

    Raises:
        ModelError: The model has no such parameter, or no slot for it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        space: SearchSpace,
        infos: Sequence[ParameterInfo],
        as_stored: AsStored,
        dtype: torch.dtype,
    ) -> None:
        self._space, self._dtype = space, dtype
        self._device = noise_device(next(model.parameters()).device)
        self._placements: dict[str, Placement] = {}
        if space.adapter is None:
            found = find_placements(model, infos, space.shapes.keys(), as_stored)
            self._placements = _find(found, space.shapes, "parameter")
        self._base: dict[str, torch.Tensor] = {}
        for name, place in self._placements.items():
            shape = space.shapes[name]
            is_whole = place.part == Part.whole(shape)
            self._base[name] = place.read().view(shape) if is_whole else place.read()
        parts = {name: place.part for name, place in self._placements.items()} or None
        self.centre = Centre(self._base, space, torch.get_num_threads(), parts, self._device)
        self._slots: dict[str, Slots] = {}
        if not space.is_dense:
            self._slots = _find({s.name: s for s in find_slots(model)}, space.weights, "LoRA slot")
        # A stored (in, out) weight's rows are inputs; an adapter's A reads them in any case.
        self._turned = {i.name for i in infos if i.transposed and space.adapter is None}
        self._genomes_G: Sequence[Genome] = ()

    def load(self, genomes_G: Sequence[Genome]) -> None:
        """Make genomes resident, in place of any before: in slots, or once they are used.

        The last slot stays zero; the one before it has an adapter's centre.

        Raises:
            EngineError: They do not fit into the slots.
        """
        self._genomes_G = genomes_G
        if not self._slots:
            return
        num_slots, slot_rank = next(iter(self._slots.values())).a.shape[:2]
        reserved, rows_G, places_G = 1, genomes_G, None
        if self._space.adapter is not None:
            reserved, rows_G = 2, [*genomes_G, Genome()]
            places_G = [*range(len(genomes_G)), num_slots - 2]
        factors = GenomeFactors(rows_G, self._space, self._device, self.centre, places_G)
        if len(genomes_G) > num_slots - reserved or factors.num_ranks > slot_rank:
            raise EngineError(
                f"no room for {plural(len(genomes_G), 'genome')} of rank {factors.num_ranks}: the "
                f"engine has {plural(num_slots - reserved, 'slot')} of rank {slot_rank} "
                "(engine.max_genomes, engine.terms_per_genome)"
            )
        for name, slots in self._slots.items():
            slots.a.zero_()
            slots.b.zero_()
            factors.write(slots.mT if name in self._turned else slots)
        factors.finish()

    def use(self, weights: _Weights) -> None:
        """Write weights into the model; adapters have a slot for every target."""
        for name, place in self._placements.items():
            if weights == "base":
                place.write(self._base[name])
            elif weights == "centre":
                place.write(self.centre.weights[name].to(self._dtype))
            else:
                perturbed = self.centre.perturbed(self._genomes_G[weights], name)
                place.write(perturbed.to(self._dtype))


def _find(found: Mapping[str, _T], wanted: Iterable[str], what: str) -> dict[str, _T]:
    missing = [name for name in wanted if name not in found]
    if missing:
        more = f" and for {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"vLLM has no {what} for {missing[0]}{more}; leave them out (search_space.exclude), or "
            "use engine=torch"
        )
    return {name: found[name] for name in wanted}

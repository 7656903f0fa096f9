"""What a run's centre can be written as: a model directory, or a PEFT adapter.

Weights that the run moved, or its merged adapter, make a whole model. Its adapter alone is a PEFT
adapter, and so is the nearest of a rank to what the run changed: per weight a truncated singular
value decomposition of centre - base. Each is written into a directory that is there and empty, as
the centre's tensors come, one at a time, and none of them outlives its turn.
"""

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch

from es_cookbook.checkpoints.linear_weights import named_weights, split_member
from es_cookbook.checkpoints.model_files import hub_repository, model_directory
from es_cookbook.checkpoints.models import (
    base_parameters,
    load_architecture,
    load_causal_lm,
    load_tokenizer,
)
from es_cookbook.checkpoints.peft import write_adapter
from es_cookbook.checkpoints.quantised import is_quantised, quantised_checkpoint
from es_cookbook.checkpoints.tensors import dtype_name
from es_cookbook.common.terminal import plural
from es_cookbook.evolution.spaces.base import ParameterInfo
from es_cookbook.evolution.spaces.factors import AdapterFactors, LoRA
from es_cookbook.runs.centre.replay import Replay
from es_cookbook.runs.export.loading import (
    Lines,
    of_adapter,
    of_model,
)
from es_cookbook.runs.export.model_directory import BaseFiles

_FULL_UP_TO = 512
"""Sides: below, a full decomposition costs less than a fifth of a second."""
_ROUNDS = 4
_WORST = 3
"""Weights of an approximation whose errors are told."""
_BASE = "base"
"""Folder of an adapter with the model that it belongs on, where loaders would not find that."""


@dataclasses.dataclass(frozen=True)
class Written:
    """What came out.

    Attributes:
        library: the Hub's name of what loads it.
        relation: the Hub's name of how it comes from the base.
        loading: what loads it.
        said: how near it is, where it is an approximation, a line each.
        notes: what else has to be known of it, a line each.
        errors: weight -> relative error, where it is an approximation.
    """

    kind: str
    library: str
    relation: str
    loading: tuple[Lines, ...]
    said: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an adapter will be, and the model that it belongs on.

    Attributes:
        final: the adapter's directory, when it is finished.
        base: a directory or a name on the Hub, as loaders find it from any folder.
        notes: what has to be known of that.
    """

    final: Path
    base: str
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CentreFiles:
    """A centre, and which of the two it is written as, where it can be either.

    Attributes:
        merge: as a whole model in plain numbers, an adapter merged.
        rank: as an adapter of this rank; exact: of one that holds all of what the run changed.
    """

    replay: Replay
    merge: bool = False
    rank: int | Literal["exact"] | None = None

    def write(self, directory: Path, final: Path | None) -> Written:
        """Fill a directory that is `final` in the end; None for one that becomes something else."""
        replay, rank = self.replay, self.rank
        if rank is None and (replay.space.adapter is None or self.merge):
            return write_model(directory, replay, final, plain=self.merge or final is None)
        place = Place(directory, replay.model_name)
        if final is not None:
            place = place_beside(directory, final, replay)
        if rank is None:
            return write_own_adapter(directory, replay, place)
        rank = exact_rank(replay) if rank == "exact" else rank
        return write_fitted_adapter(directory, replay, rank, place)


def place_beside(directory: Path, final: Path, replay: Replay) -> Place:
    """The place of an adapter that is written into a directory.

    A base that loaders would not find by its name, as a format made it of something else, is copied
    into it, and one that is quantised dequantised: PEFT adapts layers that have weights, and
    transformers needs further packages for some.
    """
    final, model_name = final.resolve(), replay.model_name
    base, named = model_directory(model_name), Path(model_name).resolve()
    if is_quantised(model_name):
        plain_base(replay, directory)
    elif hub_repository(model_name) == model_name:
        return Place(final, model_name)
    elif base.resolve() == named:
        return Place(final, str(named))
    else:
        shutil.copytree(base, directory / _BASE)
    note = f"its base, made of {model_name}, is beside it: {final / _BASE}"
    return Place(final, str(final / _BASE), (note,))


def plain_base(replay: Replay, parent: Path) -> Path:
    """The base as a model directory; one that is quantised is dequantised into `parent`."""
    if not is_quantised(replay.model_name):
        return model_directory(replay.model_name)
    (directory := parent / _BASE).mkdir()
    BaseFiles(replay.model_name, replay.dtype).write_changed(directory)
    return directory


def write_model(
    directory: Path, replay: Replay, final: Path | None = None, plain: bool = False
) -> Written:
    """A whole model: the base with the weights that the run moved, or with its adapter merged.

    It is `final`, if not `directory`, when it is finished. A quantised checkpoint whose own numbers
    moved stays one, unless it shall be `plain`.
    """
    adapter, final = replay.space.adapter, (final or directory).resolve()
    if replay.search_space.moves_quantised:
        return (_write_dequantised if plain else _write_quantised)(directory, replay, final)
    kind = f"a Hugging Face model directory in {dtype_name(replay.dtype)}"
    shapes, changed = replay.space.shapes, replay.centre_tensors()
    if adapter is not None:
        kind += ", the adapter merged"
        shapes = {info.name: info.shape for info in replay.infos if info.name in adapter.targets}
        changed = _merged(replay, adapter)
    base = BaseFiles(replay.model_name, replay.dtype)
    if base.have(shapes):
        base.write_changed(directory, set(shapes), changed)
    else:
        _save_whole(directory, replay, changed)
    return _model(kind, replay, final)


def _write_quantised(directory: Path, replay: Replay, final: Path) -> Written:
    """The quantised checkpoint with what the run moved, in its own format."""
    checkpoint = quantised_checkpoint(replay.model_name)
    assert checkpoint is not None, "the space moves what it is made of"
    checkpoint.write(directory, replay.centre_tensors())
    load_tokenizer(replay.model_name).save_pretrained(directory)
    kind = "a quantised Hugging Face model directory, in the base's own format"
    notes = (
        f"transformers loads it with {checkpoint.packages} installed; vLLM and engine=torch need "
        "nothing more",
        "where the checkpoint asks for rounded activations (W8A8), transformers and vLLM round "
        "them, and the run did not; merge=true writes the model in plain numbers",
    )
    return dataclasses.replace(_model(kind, replay, final, checkpoint.packages), notes=notes)


def _write_dequantised(directory: Path, replay: Replay, final: Path) -> Written:
    """What the quantised checkpoint with what the run moved stands for."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as quantised:
        _write_quantised(Path(quantised), replay, final)
        BaseFiles(quantised, replay.dtype).write_changed(directory)
    kind = f"a Hugging Face model directory in {dtype_name(replay.dtype)}, dequantised"
    return _model(kind, replay, final)


def _merged(replay: Replay, adapter: AdapterFactors) -> Iterator[tuple[str, torch.Tensor]]:
    """Each adapted weight with its adapter added."""
    architecture = load_architecture(replay.model_name)
    names, dtype = set(adapter.targets), dtype_name(replay.dtype)
    base, _ = base_parameters(replay.model_name, architecture, names, dtype)
    for name, a, b in _factors(replay, adapter):
        yield name, adapter.merged(name, base[name], a, b)


def _factors(
    replay: Replay, adapter: AdapterFactors
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each adapted weight's name, A and B, as soon as all that they need has come."""
    weight_of = {part: name for name, pair in adapter.targets.items() for part in pair}
    waiting: dict[str, torch.Tensor] = {}
    for part, tensor in replay.centre_tensors():
        waiting[part] = tensor
        name = weight_of[part]
        if waiting.keys() >= set(adapter.targets[name]):
            ((a, b),) = adapter.factors(name, [waiting.pop])
            yield name, a, b


def _save_whole(
    directory: Path, replay: Replay, changed: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """As transformers writes it, which takes the memory of the model: it stores it otherwise."""
    model = load_causal_lm(replay.model_name, dtype_name(replay.dtype), torch.device("cpu"))
    parameters = dict(named_weights(model))
    for name, tensor in changed:
        parameters[name].copy_(tensor)
    model.save_pretrained(directory)
    load_tokenizer(replay.model_name).save_pretrained(directory)


def write_own_adapter(directory: Path, replay: Replay, place: Place) -> Written:
    """The adapter of a run whose space is one."""
    adapter = replay.space.adapter
    assert adapter is not None
    factors, rank = _factors(replay, adapter), adapter.lora.rank
    adapted = [info for info in replay.infos if info.name in adapter.targets]
    weights = {info.name: info.out_in for info in adapted}
    write_adapter(directory, adapter.lora, weights, factors, replay.model_name, place.base)
    return _adapter(f"a PEFT adapter of rank {rank}", rank, replay, adapted, place)


def write_fitted_adapter(directory: Path, replay: Replay, rank: int, place: Place) -> Written:
    """The nearest adapter of a rank to what a run over linear weights changed, and how near."""
    squares: dict[str, tuple[float, float]] = {}
    infos = {info.name: info for info in replay.infos if info.name in replay.space.shapes}

    def factors() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, weight in replay.centre_tensors():
            change = weight - replay.base[name].float()
            change = change.T if infos[name].transposed else change
            a, b = fit(change, rank)
            squares[name] = (_squared_norm(change - b @ a), _squared_norm(change))
            yield name, a, b

    weights = {name: info.out_in for name, info in infos.items()}
    lora = LoRA(rank, rank)
    write_adapter(directory, lora, weights, factors(), replay.model_name, place.base)
    errors = {name: _relative_error(*squares[name]) for name in replay.space.shapes}
    over_all = _relative_error(*map(math.fsum, zip(*squares.values(), strict=True)))
    kind = f"a PEFT adapter of rank {rank}, the nearest to it"
    return dataclasses.replace(
        _adapter(kind, rank, replay, infos.values(), place),
        said=tuple(_nearness(rank, replay, errors, over_all)),
        errors=errors | {"over all": over_all},
    )


def fit(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest product B A of two thin matrices to a matrix: A (rank, columns), B (rows, rank).

    The best approximation in the Frobenius norm keeps the largest singular values (Eckart and Young
    1936), here shared evenly between B and A. Small matrices get a full singular value
    decomposition, large ones a randomised one (Halko, Martinsson and Tropp 2011, arXiv:0909.4061)
    with 2 r + 10 directions and four rounds of subspace iteration: on sums of hundreds of noise
    terms, whose singular values hardly fall, its error came within 0.2 % of the best possible one,
    in a tenth of the time and less. A rank above the matrix's own sides is filled up with zeros.

    Args:
        matrix: (rows, columns), float32.
        rank: at least 1.
    """
    rows, columns = matrix.shape
    kept = min(rank, rows, columns)
    if min(rows, columns) <= max(_FULL_UP_TO, 2 * kept + 10):
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    else:
        u, s, vh = _randomised_svd(matrix, 2 * kept + 10)
    a, b = torch.zeros(rank, columns), torch.zeros(rows, rank)
    root = s[:kept].sqrt()
    torch.mul(root[:, None], vh[:kept], out=a[:kept])
    b[:, :kept] = u[:, :kept] * root
    return a, b


def _randomised_svd(
    matrix: torch.Tensor, directions: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Which start it is hardly matters, but the same weights shall give the same adapter.
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(matrix.shape[1], directions, generator=generator)
    basis = torch.linalg.qr(matrix @ start).Q
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    u, s, vh = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ u, s, vh


def _squared_norm(matrix: torch.Tensor) -> float:
    return float(matrix.double().square().sum())


def _relative_error(squared_error: float, squared_norm: float) -> float:
    """Of one matrix, or of several whose squares were added up; 0 for a matrix of zeros."""
    return math.sqrt(squared_error / squared_norm) if squared_norm else 0.0


def _nearness(
    rank: int, replay: Replay, errors: Mapping[str, float], over_all: float
) -> Iterator[str]:
    """How near an adapter of this rank is to what the run changed, the most important first."""
    exact, seeds = exact_rank(replay), plural(_num_seeds(replay), "seed")
    if rank >= exact:
        yield (
            f"this adapter holds all of what the run changed ({seeds} changed a weight by at most "
            f"rank {exact}), and only rounding is left out: relative error {over_all:.4g}"
        )
        return
    yield (
        f"an approximation: {over_all:.0%} of what the run changed is left out (relative error "
        f"{over_all:.4g}); an adapter of rank {exact} would hold all of it: rank=exact"
    )
    worst = sorted(errors, key=lambda name: -errors[name])[:_WORST]
    told = ", ".join(f"{errors[name]:.4g} of {name}" for name in worst)
    yield f"the largest errors are {told}; those of all weights are in its README.md"


def exact_rank(replay: Replay) -> int:
    """The smallest rank whose adapter surely holds all of what a run changed."""
    space, seeds = replay.space, _num_seeds(replay)
    moved = seeds * (space.rank or math.inf)
    most = max(min(moved, *shape) for shape in space.shapes.values()) if seeds else 0
    return max(int(most), 1)


def _num_seeds(replay: Replay) -> int:
    return len({term.seed for step in replay.steps for term in step.terms})


def _model(kind: str, replay: Replay, final: Path, packages: str | None = None) -> Written:
    loading = of_model(final, dtype_name(replay.dtype), packages)
    return Written(kind, "transformers", "finetune", loading)


def _adapter(
    kind: str, rank: int, replay: Replay, adapted: Collection[ParameterInfo], place: Place
) -> Written:
    # vLLM itself takes no adapters of GPT-2, nor PEFT's of experts.
    in_vllm = not any(info.transposed or split_member(info.name)[1] is not None for info in adapted)
    loading = of_adapter(place.final, place.base, dtype_name(replay.dtype), rank, in_vllm)
    return Written(kind, "peft", "adapter", loading, notes=place.notes)

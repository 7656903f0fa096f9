"""What a run's centre can be written as: a model directory, or a PEFT adapter.

Weights that the run moved, or its merged adapter, make a whole model. Its adapter alone is a PEFT
adapter, and so is the nearest of a rank to what the run changed: per weight a truncated singular
value decomposition of centre - base. Each is written into a directory that is there and empty, as
the centre's tensors come, one at a time, and none of them outlives its turn.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from es_cookbook.checkpoints.gguf.conversion import FloatType
from es_cookbook.checkpoints.gguf_export import write_gguf, write_gguf_adapter
from es_cookbook.checkpoints.linear_weights import named_weights, split_member
from es_cookbook.checkpoints.models import (
    base_parameters,
    load_architecture,
    load_causal_lm,
    load_tokenizer,
)
from es_cookbook.checkpoints.peft import location, write_adapter
from es_cookbook.checkpoints.quantised_files import quantised_checkpoint
from es_cookbook.checkpoints.tensors import dtype_name
from es_cookbook.common.terminal import plural
from es_cookbook.evolution.spaces.base import ParameterInfo
from es_cookbook.evolution.spaces.factors import AdapterFactors, LoRA
from es_cookbook.runs.export.model_directory import BaseFiles
from es_cookbook.runs.replay import Replay

_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""`max_lora_rank` that vLLM accepts."""
_FULL_UP_TO = 512
"""Sides: below, a full decomposition costs less than a fifth of a second."""
_ROUNDS = 4
_WORST = 3
"""Weights of an approximation whose errors are told."""
_LOAD_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("this directory")
tokenizer = AutoTokenizer.from_pretrained("this directory")

from vllm import LLM

llm = LLM("this directory", dtype="{dtype}")  # vLLM's own choice may be another dtype"""
_LOAD_ADAPTER = """\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("this directory")  # with PEFT installed"""
_LOAD_ADAPTER_IN_VLLM = """

from vllm import LLM
from vllm.lora.request import LoRARequest

llm = LLM("{base}", enable_lora=True, max_lora_rank={rank}, dtype="{dtype}")
llm.generate("...", lora_request=LoRARequest("adapter", 1, "this directory"))"""


@dataclasses.dataclass(frozen=True)
class Written:
    """What came out.

    Attributes:
        library: the Hub's name of what loads it.
        relation: the Hub's name of how it comes from the base.
        loading: Python that loads it, or a command.
        language: of `loading`.
        said: what else the user has to know, a line each.
        errors: weight -> relative error, where it is an approximation.
    """

    kind: str
    library: str
    relation: str
    loading: str
    said: tuple[str, ...] = ()
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    language: str = "python"


def write_model(directory: Path, replay: Replay) -> Written:
    """A whole model: the base with the weights that the run moved, or with its adapter merged."""
    adapter = replay.space.adapter
    if replay.search_space.moves_quantised:
        return _write_quantised(directory, replay)
    kind = f"a Hugging Face model directory in {dtype_name(replay.dtype)}"
    shapes, changed = replay.space.shapes, replay.centre_tensors()
    if adapter is not None:
        kind += ", the adapter merged"
        shapes = {info.name: info.shape for info in replay.infos if info.name in adapter.targets}
        changed = _merged(replay, adapter)
    base = BaseFiles(replay.model_name)
    if base.have(shapes):
        base.write_changed(directory, set(shapes), changed, replay.dtype)
    else:
        _save_whole(directory, replay, changed)
    return _model(kind, replay)


def _write_quantised(directory: Path, replay: Replay) -> Written:
    """The quantised checkpoint with what the run moved, in its own format."""
    quantised_checkpoint(replay.model_name).write(directory, replay.centre_tensors())
    load_tokenizer(replay.model_name).save_pretrained(directory)
    kind = "a quantised Hugging Face model directory, in the base's own format"
    said = (
        "transformers loads it with the package of its format (gptqmodel or compressed-tensors); "
        "vLLM and engine=torch need none"
    )
    return _model(kind, replay, said)


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


def write_own_adapter(directory: Path, replay: Replay, adapter: AdapterFactors) -> Written:
    """The adapter of a run whose space is one."""
    factors, rank = _factors(replay, adapter), adapter.lora.rank
    adapted = [info for info in replay.infos if info.name in adapter.targets]
    weights = {info.name: info.out_in for info in adapted}
    write_adapter(directory, adapter.lora, weights, factors, replay.model_name)
    return _adapter(f"a PEFT adapter of rank {rank}", rank, replay, adapted)


def write_fitted_adapter(directory: Path, replay: Replay, rank: int) -> Written:
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
    write_adapter(directory, LoRA(rank, rank), weights, factors(), replay.model_name)
    errors = {name: _relative_error(*squares[name]) for name in replay.space.shapes}
    over_all = _relative_error(*map(math.fsum, zip(*squares.values(), strict=True)))
    return dataclasses.replace(
        _adapter(f"a PEFT adapter of rank {rank}, the nearest to it", rank, replay, infos.values()),
        said=tuple(_nearness(rank, replay, errors, over_all)),
        errors=errors | {"over all": over_all},
    )


def as_gguf(
    directory: Path, file: Path, replay: Replay, written: Written, matrices: FloatType
) -> Written:
    """What was written into a directory, as one file for llama.cpp.

    Raises:
        ModelError: llama.cpp has no form for it.
    """
    if written.library == "peft":
        write_gguf_adapter(directory, file, replay.model_name)
        kind = f"{written.kind}, as a GGUF file"
        loading = f"llama-cli --model BASE.gguf --lora {file.name}"
    else:
        write_gguf(directory, file, matrices, replay.model_name)
        kind = f"a GGUF file, its matrices {matrices}"
        loading = f"llama-cli --model {file.name}"
    changed = {"kind": kind, "library": "gguf", "loading": loading, "language": "bash"}
    return dataclasses.replace(written, **changed)


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


def _model(kind: str, replay: Replay, *said: str) -> Written:
    loading = _LOAD_MODEL.format(dtype=dtype_name(replay.dtype))
    return Written(kind, "transformers", "finetune", loading, said)


def _adapter(kind: str, rank: int, replay: Replay, adapted: Collection[ParameterInfo]) -> Written:
    loading = _LOAD_ADAPTER
    # vLLM itself takes no adapters of GPT-2, nor PEFT's of experts.
    if not any(info.transposed or split_member(info.name)[1] is not None for info in adapted):
        loading += _LOAD_ADAPTER_IN_VLLM.format(
            base=location(replay.model_name),
            rank=next((accepted for accepted in _VLLM_RANKS if accepted >= rank), rank),
            dtype=dtype_name(replay.dtype),
        )
    return Written(kind, "peft", "adapter", loading)

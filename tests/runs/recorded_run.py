"""A run directory as a run would leave it: the centre moves, and nothing is sampled."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from es_cookbook.checkpoints.linear_weights import named_weights
from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.checkpoints.quantised import parameter_name, quantised_layers
from es_cookbook.checkpoints.tensors import dtype_name
from es_cookbook.common.configs import config_to_json
from es_cookbook.engines.base import EngineBuilder
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.runs.centre.replay import space_of
from es_cookbook.runs.centre.snapshots import SnapshotWriter
from es_cookbook.runs.history.format import Record
from es_cookbook.runs.history.store import HistoryStore, header_of
from tests.tiny_run import TinyConfig

STEPS = (
    Step((Term(1, 0.02), Term(2, -0.03))),
    Step((Term(3, 0.5),), decay=0.1),
    Step(),
    Step((Term(4, -0.01), Term(1, 1.5), Term(5, 0.001))),
    Step(decay=0.01),
    Step((Term(6, 0.25),)),
)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A run and what its centre was.

    Attributes:
        path: run directory.
        fingerprints: `[t]`, of the centre after t generations.
        weights: `[t]`, its parameters then.
    """

    path: Path
    fingerprints: list[int]
    weights: list[dict[str, torch.Tensor]]


def record_run(
    path: Path,
    model: Path,
    space: SearchSpaceBuilder,
    steps: Sequence[Step] = STEPS,
    engine: EngineBuilder | None = None,
    dtype: str = "auto",
) -> Recorded:
    """Move the centre of a model that is loaded whole, as an engine's is, and write it down."""
    path.mkdir(parents=True)
    config = TinyConfig(
        model_name=str(model),
        log_path=str(path),
        search_space=space,
        engine=engine or TorchEngineBuilder(dtype=dtype),
        num_generations=max(1, len(steps)),
    )
    (path / "config.json").write_text(config_to_json(config))
    loaded = load_causal_lm(str(model), dtype, torch.device("cpu"))
    parameters = dict(named_weights(loaded))
    for layer, weight in quantised_layers(loaded):
        parts = weight.parameters().items()
        parameters |= {parameter_name(layer, kind): tensor for kind, tensor in parts}
    centre = Centre(parameters, space_of(space, str(model)))
    recorded = Recorded(path, [centre.fingerprint()], [clone(centre.weights)])
    header = header_of(str(model), dtype_name(loaded.dtype), space.starts)
    history = HistoryStore(path / "history.jsonl", header)
    for generation, step in enumerate(steps):
        recorded.fingerprints.append(centre.apply(step))
        recorded.weights.append(clone(centre.weights))
        record = Record(generation, step, (0.0,), recorded.fingerprints[-1])
        history.append(record)
    history.close()
    return recorded


def clone(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in weights.items()}


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        weight.dtype == torch.float32
        and torch.equal(weight.view(torch.int32), expected[name].view(torch.int32))
        for name, weight in found.items()
    )


def as_bfloat16(model: Path, to: Path) -> Path:
    """The model as a bfloat16 checkpoint."""
    shutil.copytree(model, to)
    load_causal_lm(str(model), "bfloat16", torch.device("cpu")).save_pretrained(to)
    return to


def take_snapshots(path: Path, *generations: int) -> list[Path]:
    for generation in generations:
        writer = SnapshotWriter(path, every=generation)
        writer.recorded(generation)
        writer.finish()
    return [path / "snapshots" / f"{generation:06d}.safetensors" for generation in generations]

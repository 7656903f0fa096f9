"""docs/history_format.md is enough: weights come back from it without es_cookbook, bit for bit."""

import json
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from es_cookbook import ES, FullRank, LowRank, TorchEngineBuilder, run
from es_cookbook.checkpoints.model_files import base_identity
from es_cookbook.evolution import noise as philox
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import AdamRule, ErrorFeedbackRule, MuonRule, Step, Term
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.optimizers.adam import Adam
from es_cookbook.evolution.spaces.base import SearchSpace, Shares
from es_cookbook.evolution.spaces.full_rank import FullRankSpace
from es_cookbook.evolution.spaces.low_rank import LowRankSpace
from es_cookbook.plugins.genetic.optimizer import Genetic
from es_cookbook.plugins.quantised.spaces import QuantCodesSpace
from es_cookbook.runs.centre.replay import open_replay
from es_cookbook.runs.history.store import read_header, read_history
from tests.runs.recorded_run import as_bfloat16
from tests.tiny_run import tiny, write_tiny_model

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/history_format.md").read_text(encoding="utf-8")
SCRIPT = Path(__file__).parent / "rebuild.py"

RECORDED = ROOT / "tests/data/recorded/low_rank"

SETTINGS: dict[str, Any] = {"population_size": 4, "sigma": 0.1, "learning_rate": 0.05}
DIVIDED = {**SETTINGS, "population_size": 12}
CROSSING = Genetic(population_size=6, sigma=0.1, num_elites=0, crossover_rate=1.0)
"""Parents have little in common, so the centre goes back to the base now and then."""
RUNS: dict[str, dict[str, Any]] = {
    "low rank": {"search_space": LowRank(rank=3)},
    "dense": {"search_space": FullRank(noise="rademacher")},
    "divided": {"search_space": FullRank(partitions=3), "optimizer": ES(**DIVIDED)},
    "decayed": {"optimizer": ES(**SETTINGS, weight_decay=0.2)},
    "decayed to the base": {"search_space": FullRank(), "optimizer": CROSSING},
    "adam": {"optimizer": Adam(**SETTINGS, window=3, weight_decay=0.1)},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model, by the dtype in which it is stored."""
    path = tmp_path_factory.mktemp("models")
    model = write_tiny_model(path / "float32")
    return {"float32": model, "bfloat16": as_bfloat16(model, path / "bfloat16")}


@pytest.mark.daily
@pytest.mark.parametrize(
    ("which", "stored", "dtype"),
    [
        ("low rank", "bfloat16", "auto"),
        ("dense", "float32", "auto"),
        ("divided", "float32", "auto"),
        ("decayed", "float32", "bfloat16"),
        ("decayed to the base", "float32", "auto"),
        ("adam", "float32", "auto"),
    ],
)
def test_the_page_alone_rebuilds_a_trained_run(
    tmp_path: Path, models: dict[str, Path], which: str, stored: str, dtype: Any
) -> None:
    own = {"model_name": str(models[stored]), "engine": TorchEngineBuilder(dtype=dtype)}
    run(tiny(tmp_path / "run", num_generations=6, **own, **RUNS[which]))
    header = read_header(tmp_path / "run/history.jsonl")
    assert header is not None and header.dtype == (stored if dtype == "auto" else dtype)
    steps = [record.step for record in read_history(tmp_path / "run/history.jsonl")]
    assert sum(len(step.terms) for step in steps) > 3
    assert any(0 < step.decay < 1 for step in steps) == (which in ("decayed", "adam"))
    assert any(step.decay == 1 for step in steps) == (which == "decayed to the base")
    assert any(step.rule is not None for step in steps) == (which == "adam")
    assert_the_page_rebuilds(tmp_path / "run", models[stored], 6, tmp_path)


def test_the_page_alone_rebuilds_a_recorded_run(tmp_path: Path) -> None:
    model = ROOT / "es_cookbook/recipes/countdown/model"
    assert_the_page_rebuilds(RECORDED, model, 3, tmp_path)


def assert_the_page_rebuilds(log_path: Path, model: Path, generation: int, path: Path) -> None:
    """The script's weights are the centre, which replay compares with the engine's fingerprint."""
    command = [sys.executable, "-I", SCRIPT, log_path, model, path / "found.npz", str(generation)]
    subprocess.run(command, check=True, cwd=path)
    weights = dict(open_replay(log_path, generation, model_name=str(model)).centre_tensors())
    with np.load(path / "found.npz") as found:
        assert found.keys() == weights.keys()
        for name, weight in weights.items():
            assert found[name].shape == tuple(weight.shape)
            assert found[name].tobytes() == weight.numpy().tobytes(), name


W = {"w": (2, 3)}
BASE = torch.tensor([[0.5, -0.25, 0.125], [1, -2, 0.75]])
CODES = torch.tensor([[7.0, 0, 15], [3, 8, 12]])
TERMS = (Term(1, 0.1), Term(2, -0.2))
ADAM = AdamRule((1, 1), (0.1, 0.9), (0.5, 0.5), rate=0.01, epsilon=1e-8)
MUON = MuonRule(0.2, 5)
FEEDBACK = ErrorFeedbackRule((1, 2), (1.3, 0.7, -2.4), residual_decay=0.9, highest=15)
HALVES = Shares(num_partitions=2)
DENSE, QUANTISED = FullRankSpace(W), QuantCodesSpace(W, highest_code=15)
EXAMPLES: dict[str, tuple[SearchSpace, torch.Tensor, list[Step]]] = {
    "nothing": (DENSE, BASE, []),
    "`LowRank`, `rank` 2": (LowRankSpace(W, rank=2), BASE, [Step(TERMS)]),
    "`FullRank`": (DENSE, BASE, [Step(TERMS)]),
    "`FullRank`, `partitions` 2": (FullRankSpace(W, shares=HALVES), BASE, [Step(TERMS)]),
    "`FullRank`, `noise` `rademacher`": (FullRankSpace(W, "rademacher"), BASE, [Step(TERMS)]),
    "`FullRank`, one term and then, with decay 0.3, the other": (
        DENSE,
        BASE,
        [Step(TERMS[:1]), Step(TERMS[1:], decay=0.3)],
    ),
    "`FullRank`, the rule `adam` below": (DENSE, BASE, [Step(TERMS, rule=ADAM)]),
    "`FullRank`, the rule `muon` below": (DENSE, BASE, [Step(TERMS, rule=MUON)]),
    "`QuantCodes`, the other terms": (
        QUANTISED,
        CODES,
        [Step((Term(1, 2.5), Term(2, 1.5), Term(3, -1.5)))],
    ),
    "`QuantCodes`, the rule `error_feedback` below": (
        QUANTISED,
        CODES,
        [Step((Term(1, 2.5), Term(2, 1.5), Term(3, -1.5)), rule=FEEDBACK)],
    ),
}
"""As the page says it -> the space, the base and the steps."""


def hexadecimal(values: NDArray[Any]) -> str:
    """Bit patterns of the elements."""
    size = values.dtype.itemsize
    return " ".join(f"{pattern:0{2 * size}x}" for pattern in values.view(f"u{size}").ravel())


def test_the_examples_on_the_page_are_what_the_centre_comes_to() -> None:
    rows = re.findall(r"^\| (.+?) \| `([0-9a-f ]{53})` \| `(\w{16})` \|$", PAGE, flags=re.MULTILINE)
    expected: list[tuple[str, str, str]] = []
    for label, (space, base, steps) in EXAMPLES.items():
        centre = Centre({"w": base}, space)
        fingerprint = [centre.fingerprint(), *map(centre.apply, steps)][-1]
        expected.append((label, hexadecimal(centre.weights["w"].numpy()), f"{fingerprint:016x}"))
    assert rows == expected
    for rule in (ADAM, MUON, FEEDBACK):
        fields = rule.__dataclass_fields__
        assert ", ".join(f"`{name}` {as_text(getattr(rule, name))}" for name in fields) in PAGE


def as_text(value: object) -> str:
    return json.dumps(value).replace("-", "−")  # as the page has it


def test_the_examples_of_noise_are_the_noise() -> None:
    table = philox.normal_table()
    signs = noise(1, "model.weight", (8,), "rademacher")
    for found in (
        f"k1 is `{philox.name_key('model.weight'):016x}`",
        f"`{hexadecimal(philox.words(1, 'model.weight', 0, 1))}`",
        f"`{hexadecimal(noise(1, 'model.weight', (4,)))}`",
        " ".join("+" if sign > 0 else "−" for sign in signs),
        *(f"`{hexadecimal(table[[k]])}`" for k in (0, 2**15, 2**16 - 1)),
        f"`{philox.CHECKSUM}`",
        f"{philox.SCALE} · Q",
    ):
        assert found in PAGE


def test_the_pages_digests_are_those_of_the_header(models: dict[str, Path]) -> None:
    def digest(named: dict[str, bytes]) -> str:
        parts = [part for name, of in named.items() for part in (name, sha256(of).hexdigest())]
        return sha256(json.dumps(parts).encode()).hexdigest()

    model = models["float32"]
    tensors = load_file(model / "model.safetensors")
    described = {
        name: f"torch.{tensor.dtype} {tensor.shape} ".encode() + tensor.tobytes()
        for name, tensor in sorted(tensors.items())
    }
    files = ["tokenizer.json", "tokenizer_config.json"]
    of_files = digest({file: (model / file).read_bytes() for file in files})
    assert base_identity(str(model)) == (digest(described), of_files)

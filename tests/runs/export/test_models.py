"""A run of either kind is a model: its centre, or its checkpoint, wherever a model is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import chz
import pytest
import torch

from es_cookbook.checkpoints.model_files import CACHE, base_identity, model_directory
from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.common.errors import ModelError
from es_cookbook.common.terminal import as_program
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.plugins.gradients.policy_gradient import Config as GradientConfig
from es_cookbook.plugins.gradients.policy_gradient import main as train_by_gradient
from es_cookbook.runs.centre.replay import open_replay
from es_cookbook.runs.export.export import write_export
from es_cookbook.runs.history.store import read_header
from es_cookbook.runs.program import run as run_config
from tests.grpo_runs import gradient_config
from tests.runs.recorded_run import STEPS, Recorded, record_run
from tests.tiny_run import TinyConfig, write_tiny_model


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache/models"


@pytest.fixture
def run(tmp_path: Path) -> Recorded:
    return record_run(tmp_path / "run", write_tiny_model(tmp_path / "model"), LowRank())


def weights(model_name: str | Path) -> dict[str, torch.Tensor]:
    model = load_causal_lm(str(model_name), "auto", torch.device("cpu"))
    return dict(model.named_parameters())


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_generation_is_the_model_that_its_export_is(
    run: Recorded, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"{run.path}@2"
    with as_program():
        found = weights(name)
    for parameter, value in run.weights[2].items():
        assert torch.equal(found[parameter], value)
    write_export(open_replay(run.path, 2), tmp_path / "exported")
    assert base_identity(name) == base_identity(str(tmp_path / "exported"))
    assert capfd.readouterr().err.count("rebuilding its centre after 2 generations once") == 1
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1
    # Without a number it is the last one, whichever that is; the base is the one of number 0.
    assert_same(weights(run.path), weights(f"{run.path}@{len(STEPS)}"))
    assert_same(weights(f"{run.path}@0"), weights(tmp_path / "model"))
    for parameter, value in run.weights[-1].items():
        assert torch.equal(weights(run.path)[parameter], value)


def test_what_was_kept_is_not_taken_for_a_run_that_was_rewound(run: Recorded) -> None:
    before = model_directory(f"{run.path}@3")
    lines = (run.path / "history.jsonl").read_bytes().splitlines(keepends=True)
    other = record_run(
        run.path.with_name("other"), run.path.with_name("model"), LowRank(), STEPS[::-1]
    )
    shutil.copy(other.path / "history.jsonl", run.path)
    assert model_directory(f"{run.path}@3") != before
    (run.path / "history.jsonl").write_bytes(b"".join(lines[:4]))  # The header, and three.
    assert model_directory(f"{run.path}@3") == before == model_directory(str(run.path))


def tiny(model_name: str, log_path: Path, **fields: Any) -> TinyConfig:
    return TinyConfig(
        model_name=model_name,
        log_path=str(log_path),
        num_generations=2,
        eval_every=0,
        behavior_if_log_dir_exists="resume",
        **fields,
    )


@pytest.mark.slow
def test_runs_of_both_kinds_go_on_from_each_other(
    run: Recorded, cache: Path, tmp_path: Path
) -> None:
    """Evolution strategies from a generation, a gradient from that run, and back."""
    second, third, fourth = (tmp_path / name for name in ("second", "third", "fourth"))
    run_config(tiny(f"{run.path}@2", second))
    header = read_header(second / "history.jsonl")
    assert header is not None and header.model_name == f"{run.path}@2"
    assert header.weights == base_identity(f"{run.path}@2")[0]
    gradient = gradient_config(GradientConfig, Path(f"{second}@1"), third)
    anyio.run(train_by_gradient, gradient)
    assert model_directory(str(third)) == third / f"checkpoints/{gradient.num_generations}/model"
    run_config(tiny(f"{third}@{gradient.num_generations}", fourth))
    then = weights(f"{fourth}@2")
    shutil.rmtree(cache)
    run_config(chz.replace(tiny(f"{run.path}@2", second), num_generations=3))
    assert_same(weights(f"{fourth}@2"), then)
    assert open_replay(second).generation == 3


def edited(run: Path, **fields: object) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | fields))


def other_base(run: Path) -> None:
    edited(run, model_name=str(write_tiny_model(run.with_name("other"), seed=1)))


@pytest.mark.parametrize(
    ("change", "name", "sentence"),
    [
        (None, "{run}@99", r"generation must be 0 to 6, since .* holds as many .* found 99"),
        (None, "{run}@last", r"after @ must be the number of generations .* found 'last'"),
        (None, f"{{run}}@{'9' * 5000}", r"after @ must be the number of generations"),
        (None, "{run}/../model@1", r"is not the directory of a run"),
        (None, "{run}x@1", r"there is no directory '.*x@1'$"),
        (lambda run: edited(run, model_name=str(run)), "{run}", r"goes back to .* itself"),
        (other_base, "{run}@2", r"its weights was [0-9a-f]+, is [0-9a-f]+; give what"),
        (lambda run: (run / "history.jsonl").unlink(), "{run}@1", "history"),
        (
            lambda run: edited(run, search_space={"$class": "strangers:Space"}),
            "{run}@1",
            r"of strangers; if you trust .* add trust=.*; export it, and give model_name=that",
        ),
    ],
)
def test_what_is_no_model_is_refused(
    run: Recorded, cache: Path, change: Callable[[Path], object] | None, name: str, sentence: str
) -> None:
    if change is not None:
        change(run.path)
    with pytest.raises(ModelError, match=sentence):
        model_directory(name.format(run=run.path))
    assert not [path for path in cache.glob("*") if path.is_dir()], "nothing is left of it"

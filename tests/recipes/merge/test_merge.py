"""The recipe that merges adapters: two tasks in one run, and what is refused."""

from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.merge.dataset import ChatMixture
from es_cookbook.recipes.merge.train_cli import CLIConfig
from es_cookbook.runs.program import train_and_tell
from tests.adapters import make_adapter
from tests.recipe_problems import parsed, short_run
from tools.small_model import build_model, build_tokenizer, save

APART = "optimizer.sigma=1", "sampling.temperature=1"
"""With these the answers of genomes differ."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merge") / "model"
    tokenizer = build_tokenizer("".join(map(chr, range(33, 127))) + "ĠĊ")
    save(build_model(tokenizer, 0, width=32, depth=2), tokenizer, path)
    for seed, name in enumerate(("first", "second")):
        make_adapter(path, path.parent / name, seed=seed)
    return path


@pytest.mark.parametrize("optimizer", ["es", "cma"])
def test_both_tasks_are_measured_and_the_coefficients_move(
    model: Path, tmp_path: Path, optimizer: str
) -> None:
    adapters = f"search_space.adapters={model.parent / 'first'},{model.parent / 'second'}"
    given = f"model_name={model}", adapters, f"optimizer={optimizer}"
    # Sampled answers of a random model differ in length, and are hardly ever right.
    tasks = "dataset.tasks=conciseness,extraction", "dataset.problems_per_generation=8"
    first, *_, last = short_run("merge", tmp_path / "run", *given, *tasks, *APART)
    for task in ("conciseness", "extraction"):
        assert {f"env/{task}/correct", f"test/env/{task}/correct"} <= first.keys()
        assert first["test/problems"] == 8
    assert last["centre/drift_rms"] > 0


def test_a_part_holds_out_its_tasks_fold() -> None:
    members = ChatMixture(tasks=("sums", "differences"), fold=1, num_test=7).members
    assert [part.tag for part in members] == ["sums", "differences"]
    assert {(p.dataset.fold, p.dataset.num_test) for p in members} == {(1, 7)}  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "adapters: 'adapters/sums'"),
        (("search_space=adapter", "search_space.start=a"), "start: 'a'"),
        (("search_space=singular_values", "search_space.start=b"), "start: 'b'"),
    ],
)
def test_adapters_that_are_not_there_are_refused_before_the_model_is_loaded(
    options: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = "model_name=nowhere", f"log_path={tmp_path / 'run'}", *options
    with pytest.raises(ConfigError, match=f"search_space.{said} holds no PEFT adapter"):
        train_and_tell(parsed(CLIConfig, *given))

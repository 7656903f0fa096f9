"""What a report holds: all that run directories have, and a sentence for what they have not."""

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.plugins.report import writing as module
from es_cookbook.plugins.report.rollouts import RolloutTable
from es_cookbook.plugins.report.writing import contents
from tests.plugins.report.made_runs import make_run, rollout
from tests.runs.directory.test_damaged_directories import RUNS, content, damage


def charts(*log_paths: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(contents(log_paths)["charts"]))


def rollouts(*log_paths: Path, megabytes: float = 5) -> dict[str, Any]:
    return json.loads(gzip.decompress(contents(log_paths, megabytes=megabytes)["rollouts"]))


def actions(packed: dict[str, Any]) -> list[Any]:
    """The action of every turn, as the page takes them apart."""
    found, new = [], 0
    for number in packed["columns"]["action"]:
        found.append(packed["texts"]["action"][new if number == 0 else number - 1])
        new += number == 0
    return found


def test_a_run_is_told_in_a_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (group,) = charts(run)["groups"]
    assert group["sentence"] == (
        "Countdown by ES: 4 generations, 512 rollouts, 10,240 sampled tokens, 16 s. "
        "Held-out correct: 25.0 % → 75.0 % (+50.0 points)."
    )


def test_metrics_are_columns_with_nothing_where_nothing_was_measured(tmp_path: Path) -> None:
    (run,) = charts(make_run(tmp_path / "run"))["runs"]
    assert run["columns"]["progress/generation"] == [0, 1, 2, 3, 4]
    assert run["columns"]["test/env/all/correct"] == [0.25, None, 0.45, None, 0.75]
    assert run["columns"]["time/total"] == [4, 4, 4, 4, None]
    assert run["state"] == "complete"
    assert ["optimizer.sigma", "0.01"] in run["config"]


def test_fitness_is_drawn_by_genome_and_in_quantiles(tmp_path: Path) -> None:
    (run,) = charts(make_run(tmp_path / "run"))["runs"]
    genomes, quantiles = run["fitness"]["genomes"], run["fitness"]["quantiles"]
    assert len(genomes) == len(quantiles) == 4
    assert (quantiles[0][0], quantiles[0][-1]) == pytest.approx(
        (min(genomes[0]), max(genomes[0])), abs=1e-3
    )


def test_runs_that_differ_in_their_seed_are_one_group(tmp_path: Path) -> None:
    seeds = [make_run(tmp_path / f"es-{seed}", seed=seed) for seed in range(3)]
    wider = make_run(
        tmp_path / "wider",
        optimizer={"$class": "es_cookbook.evolution.optimizers.es:ES", "sigma": 0.02},
    )
    found = charts(*seeds, wider)
    assert [group["runs"] for group in found["groups"]] == [[0, 1, 2], [3]]
    assert found["groups"][0]["differs"]["optimizer.sigma"] == "0.01"
    assert found["groups"][1]["label"].startswith("ES, sigma=0.02")
    assert "3 runs" in found["groups"][0]["sentence"]
    assert "75.0 to 75.0 over runs" in found["groups"][0]["sentence"]


def test_rollouts_come_back_from_their_columns(tmp_path: Path) -> None:
    lines = [
        rollout(0, 0, "first"),
        rollout(0, 1, "second", prompt="other\n", tags=["a", "b"]),
        rollout(1, 0, "first"),
        {
            "generation": 1,
            "problem": 3,
            "genome": 2,
            "attempt": 0,
            "reward": None,
            "lost": "timeout",
        },
    ]
    packed = rollouts(make_run(tmp_path / "run", rollouts=lines))
    assert actions(packed) == ["first", "second", "first"]
    assert packed["columns"]["seen"] == [0, 0, 1], "a prompt that comes again is stored once"
    assert packed["columns"]["generation"] == [0, 0, 1, 1]
    assert packed["columns"]["turns"] == [1, 1, 1, 0]
    assert packed["columns"]["reward"] == [0.25, 0.5, 0.25, None]
    assert packed["parts"][packed["columns"]["tags"][1]] == ["a", "b"]
    assert packed["texts"]["other"][packed["columns"]["lost"][3]] == "timeout"


def test_a_long_text_loses_its_middle_and_says_how_much(tmp_path: Path) -> None:
    text = "start " + "x" * 100_000 + " end"
    run = make_run(tmp_path / "run", rollouts=[rollout(0, 0, text)])
    ((start, missing, end),) = actions(rollouts(run))
    assert start.startswith("start xxx")
    assert end.endswith("xxx end")
    assert len(start) + missing + len(end) == len(text)
    assert len(start) + len(end) == 20_000
    assert "Texts of more than 20,000 characters" in " ".join(charts(run)["notes"])


def test_texts_are_cut_until_the_page_is_small_and_no_rollout_is_left_out() -> None:
    letters = random.Random(0)
    table = RolloutTable()
    texts = [bytes(letters.choices(range(33, 127), k=2000)).decode() for _ in range(400)]
    for i, text in enumerate(texts):
        table.add(0, rollout(i, 0, text))
    assert table.compressed(10_000_000)[1] is None
    small, cut_to = table.compressed(100_000)
    assert 70_000 < len(small) <= 100_000
    assert cut_to is not None
    found = actions(json.loads(gzip.decompress(small)))
    assert [start for start, _, _ in found] == [text[: 2 * cut_to // 3] for text in texts]
    assert {len(start) + missing + len(end) for start, missing, end in found} == {2000}


def test_of_too_many_rollouts_evenly_spaced_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ROLLOUTS", 6)
    run = make_run(tmp_path / "run")
    assert rollouts(run)["columns"]["generation"] == [0, 0, 1, 2, 3, 3]
    assert any("one in 3 is shown" in note for note in charts(run)["notes"])


@pytest.mark.parametrize(
    "line",
    [
        {"generation": 0, "turns": "none"},
        {"generation": 0, "turns": [3, {"prompt": ["x"], "action": {"a": 1}, "metrics": [1]}]},
        {"generation": 2**80, "genome": -5, "problem": True, "reward": 1e308, "tags": [1, None]},
        {"generation": 0, "reward": "high", "lost": 5, "group_logs": {"a": 3}},
    ],
)
def test_fields_of_unexpected_types_are_left_out(tmp_path: Path, line: dict[str, object]) -> None:
    packed = rollouts(make_run(tmp_path / "run", rollouts=[line, rollout(1, 0, "good")]))
    assert len(packed["columns"]["generation"]) == 2
    assert actions(packed)[-1] == "good"


def test_a_directory_that_is_no_run_is_said_on_the_page_of_others(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = charts(make_run(tmp_path / "run"), tmp_path / "empty", tmp_path / "nothing")
    assert len(found["runs"]) == 1
    assert [
        str(tmp_path / name) in text
        for name, text in zip(("empty", "nothing"), found["unread"], strict=True)
    ] == [True, True]


def test_a_run_that_has_only_begun_is_a_page_that_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rollouts=[])
    for name in ("history.jsonl", "metrics.jsonl"):
        (run / name).unlink()
    (found,) = charts(run)["runs"]
    assert found["state"] == "not begun"
    assert found["problems"] == ["it has measured nothing yet, so there is nothing to draw"]


@pytest.mark.slow
def test_every_damaged_directory_is_a_page_or_a_sentence(tmp_path: Path) -> None:
    for case in range(200):
        chance = random.Random(case)
        files = content(chance.choice(RUNS))
        damage(chance, files)
        path = tmp_path / "run"
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
        try:
            assert charts(path)["groups"], case
        except RunDirectoryError as error:
            assert str(path) in str(error), case
        shutil.rmtree(path)

import dataclasses
import json
import os
import pty
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from es_cookbook.common.errors import EngineError, HistoryError, RunDirectoryError
from es_cookbook.plugins.branches.branches import fork_run, rewind_run
from es_cookbook.runs.directory.directory import Recorded, failures_logged
from es_cookbook.runs.directory.opening import Behavior, begin_in, run_state
from es_cookbook.runs.files import LineFile, replace_file
from es_cookbook.runs.history.store import HistoryStore
from tests.runs.records import HEADER, make_record

CONFIG = json.dumps(
    {
        "$format": 1,
        "$class": "recipe:Config",
        "engine": {"$class": "engines:Torch", "device": "cpu", "threads": 2},
        "num_generations": 10,
        "tags": {"$tuple": ["a", "b"]},
        "sigma": 0.005,
    }
)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A run directory in which a run has begun."""

    path: Path
    history: HistoryStore
    resumed: bool


def opened(
    path: Path, config_json: str, behavior: Behavior, may_differ: Collection[str] = ()
) -> Opened:
    length = json.loads(config_json)["num_generations"]
    state = run_state(Recorded(path), config_json, length, behavior, may_differ)
    history = begin_in(path, HEADER, state, config_json, length)
    assert history.next_generation == state.history.generations
    return Opened(path, history, history.next_generation > 0)


def changed(**fields: object) -> str:
    return json.dumps(json.loads(CONFIG) | fields)


def record_run(path: Path, generations: int) -> Opened:
    """A run as it stands between generations, with lines in the order that a run writes them."""
    run = opened(path, CONFIG, "raise")
    for generation in range(generations):
        append(path / "metrics.jsonl", {"progress/generation": generation, "reward/mean": 0.5})
        append(path / "rollouts.jsonl", {"generation": generation, "turns": []})
        run.history.append(make_record(generation))
    return run


def append(path: Path, row: dict[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_what_a_resumed_run_changes_is_not_kept_but_its_length_is(tmp_path: Path) -> None:
    record_run(tmp_path, 1)
    elsewhere = changed(engine={"$class": "engines:VLLM"})
    longer = changed(num_generations=20, engine={"$class": "engines:Torch", "threads": 4})
    with pytest.raises(RunDirectoryError, match="num_generations"):
        opened(tmp_path, longer, "resume", may_differ=["engine", "num"])
    assert opened(tmp_path, elsewhere, "resume", may_differ=["engine"]).resumed
    assert (tmp_path / "config.json").read_text() == CONFIG
    run = opened(tmp_path, longer, "resume", may_differ=["engine", "num_generations"])
    kept = json.loads((tmp_path / "config.json").read_text())
    assert run.resumed and kept == json.loads(CONFIG) | {"num_generations": 20}


@pytest.mark.parametrize("missing", [True, False])
def test_a_history_that_is_lost_is_not_begun_again(tmp_path: Path, missing: bool) -> None:
    record_run(tmp_path, 3).history.close()
    history = tmp_path / "history.jsonl"
    if missing:
        history.unlink()
    else:
        history.write_bytes(history.read_bytes().splitlines(keepends=True)[0])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    said = rf"{history} {'is missing' if missing else 'holds 0 generations'}, but metrics\.jsonl "
    for behavior in ("resume", "raise"):
        with pytest.raises((HistoryError, RunDirectoryError), match=f"{said}|already holds a run"):
            opened(tmp_path, CONFIG, behavior)
    with pytest.raises(HistoryError, match=said):
        opened(tmp_path, CONFIG, "resume")
    for change in (
        lambda: rewind_run(tmp_path, 0),
        lambda: fork_run(tmp_path, None, tmp_path / "fork", CONFIG, {}),
    ):
        with pytest.raises(HistoryError, match=said):
            change()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert not opened(tmp_path, CONFIG, "delete").resumed


def test_delete_starts_again_also_with_another_config(tmp_path: Path) -> None:
    record_run(tmp_path, 2)
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "centre.safetensors").write_bytes(b"x")
    other = changed(sigma=1.0)
    run = opened(tmp_path, other, "delete")
    assert not run.resumed and run.history.next_generation == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.json", "history.jsonl"]
    assert (tmp_path / "config.json").read_text() == other


def test_delete_spares_a_model_directory_though_it_has_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(RunDirectoryError, match=r"not deleted.*model\.safetensors"):
        opened(tmp_path, CONFIG, "delete")
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"
    assert (tmp_path / "config.json").read_text() == '{"model_type": "qwen2"}'


@pytest.mark.parametrize("behavior", ["ask", "resume", "delete", "raise"])
def test_a_directory_of_other_things_is_refused_and_untouched(
    tmp_path: Path, behavior: Behavior
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirectoryError, match=r"thesis\.tex.*not a run directory"):
        opened(tmp_path, CONFIG, behavior)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_is_known_of_an_engines_failure_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for reason in ("out of memory", "out of luck"):
        failure = EngineError(reason)
        failure.add_note("pages of a library")
        with pytest.raises(ExceptionGroup), failures_logged(tmp_path):
            raise ExceptionGroup("tasks", [failure])
    log = (tmp_path / "log.txt").read_text()
    for part in ("EngineError: out of memory\npages of a library\n", "EngineError: out of luck\n"):
        assert part in log
    assert caplog.messages == [f"what is known of this failure is in {tmp_path / 'log.txt'}"] * 2
    with pytest.raises(ValueError, match="not an engine's"), failures_logged(tmp_path):
        raise ValueError("not an engine's")
    assert (tmp_path / "log.txt").read_text() == log
    opened(tmp_path, CONFIG, "raise").history.close()  # Where it did not even start is fresh.


@pytest.mark.parametrize("behavior", ["ask", "resume", "delete", "raise"])
def test_a_run_that_ended_before_its_first_generation_makes_way(
    tmp_path: Path, behavior: Behavior
) -> None:
    record_run(tmp_path, 0)
    append(tmp_path / "metrics.jsonl", {"progress/generation": 0})
    other = changed(sigma=1.0)
    assert not opened(tmp_path, other, behavior).resumed
    assert (tmp_path / "config.json").read_text() == other
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_ask_without_a_terminal_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(tmp_path, 1)
    with open(os.devnull) as nowhere:
        monkeypatch.setattr(sys, "stdin", nowhere)
        with pytest.raises(RunDirectoryError, match=r"no terminal.*behavior_if_log_dir_exists="):
            opened(tmp_path, CONFIG, "ask")


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Type at a real terminal that is standard input."""
    ours, theirs = pty.openpty()
    os.write(ours, text.encode())
    monkeypatch.setattr(sys, "stdin", os.fdopen(theirs))


def test_ask_resumes_deletes_or_aborts_as_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run(tmp_path, 1)
    answer(monkeypatch, "what\nresume\n")
    assert opened(tmp_path, CONFIG, "ask").resumed
    answer(monkeypatch, "abort\n")
    with pytest.raises(RunDirectoryError, match="left as it is"):
        opened(tmp_path, CONFIG, "ask")
    capsys.readouterr()
    answer(monkeypatch, "resume\ndelete\n")  # Another Config cannot be resumed.
    run = opened(tmp_path, changed(sigma=1.0), "ask")
    assert not run.resumed and run.history.next_generation == 0
    printed = capsys.readouterr().out
    assert "sigma was 0.005, is 1.0" in printed and "[delete/abort]" in printed


def test_a_log_path_that_is_or_lies_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunDirectoryError, match=r"must be a directory, found a file"):
        opened(tmp_path / "file", CONFIG, "raise")
    with pytest.raises(RunDirectoryError, match=r"cannot be used as a directory"):
        opened(tmp_path / "file" / "run", CONFIG, "raise")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("damage", ["torn", "checksum"])
def test_a_damaged_last_line_takes_its_metrics_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    record_run(tmp_path, 3)
    history = tmp_path / "history.jsonl"
    whole = history.read_bytes()
    history.write_bytes(whole[:-1] if damage == "torn" else whole[:-4] + b"x" + whole[-3:])
    run = opened(tmp_path, CONFIG, "resume")
    assert run.history.next_generation == 2 and "dropped a torn last line" in caplog.text
    assert history.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_link_in_place_of_a_temporary_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("one line")
    (tmp_path / "config.json.partial").symlink_to(tmp_path / "precious")
    replace_file(tmp_path / "config.json", [b"{}"])
    assert (tmp_path / "config.json").read_text() == "{}"
    assert (tmp_path / "precious").read_text() == "one line"


def test_a_directory_that_is_deleted_while_the_run_goes_on_ends_it(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "history.jsonl")
    file.append(b"{}\n")
    (tmp_path / "history.jsonl").unlink()
    with pytest.raises(RunDirectoryError, match="it was deleted while the run went on"):
        file.append(b"{}\n")
    file.close()

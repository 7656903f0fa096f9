"""A snapshot is written whole or not at all, and used only if it is this history's centre."""

import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.runs.centre import replay as replay_module
from es_cookbook.runs.centre.replay import open_replay
from es_cookbook.runs.centre.snapshots import SnapshotWriter
from tests.runs.recorded_run import Recorded, record_run, same_bits, take_snapshots


@pytest.fixture
def recorded(tiny_model: Callable[[str], Path], tmp_path: Path) -> Recorded:
    return record_run(tmp_path / "run", tiny_model("qwen2"), LowRank())


def test_it_is_a_plain_safetensors_file_that_says_what_it_is(recorded: Recorded) -> None:
    (path,) = take_snapshots(recorded.path, 3)
    assert same_bits(load_file(path), recorded.weights[3])
    with safe_open(path, "pt") as file:
        said = file.metadata()
    fingerprint = f"{recorded.fingerprints[3]:x}"
    assert said == {"format": "pt", "generation": "3", "fingerprint": fingerprint}
    assert list(path.parent.iterdir()) == [path]


def _flip_a_bit(path: Path, recorded: Recorded) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)


def _cut(path: Path, recorded: Recorded) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _rename(path: Path, recorded: Recorded) -> None:
    path.replace(path.with_name("000006.safetensors"))


def _of_another_run(path: Path, recorded: Recorded) -> None:
    config = json.loads((recorded.path / "config.json").read_text())
    model = Path(config["model_name"])
    steps = [Step((Term(9, 0.1),))] * 6
    other = record_run(path.parents[2] / "other", model, LowRank(), steps)
    (foreign,) = take_snapshots(other.path, 5)
    shutil.copy(foreign, path)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_flip_a_bit, "000005.safetensors is damaged"),
        (_cut, "000005.safetensors cannot be read as a snapshot"),
        (_rename, "000006.safetensors says that it is of generation 5"),
        (_of_another_run, "it is another run's"),
    ],
)
def test_one_that_cannot_be_trusted_is_left_out_with_a_warning(
    recorded: Recorded,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path, Recorded], None],
    sentence: str,
) -> None:
    _, later = take_snapshots(recorded.path, 2, 5)
    spoil(later, recorded)
    replay = open_replay(recorded.path)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert sentence in caplog.text and caplog.records[0].message.endswith("; it is not used")
    assert replay.snapshot is not None and replay.snapshot.generation == 2
    assert same_bits(dict(replay.centre_tensors()), recorded.weights[6])


def held_up(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Whoever moves a parameter says so by the first event, and waits for the second."""
    begun, may_go_on = threading.Event(), threading.Event()
    moved = replay_module.moved

    def held(*arguments: object) -> torch.Tensor:
        begun.set()
        assert may_go_on.wait(20)
        return moved(*arguments)  # pyright: ignore

    monkeypatch.setattr(replay_module, "moved", held)
    return begun, may_go_on


def test_what_is_being_written_when_a_run_stops_is_given_up(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = held_up(monkeypatch)
    writer = SnapshotWriter(recorded.path, 2)
    writer.recorded(2)
    assert begun.wait(20)
    closing = threading.Thread(target=writer.close)
    closing.start()
    may_go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    assert list((recorded.path / "snapshots").iterdir()) == []


def test_while_one_is_written_the_next_waits_and_gives_way_to_a_later_one(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = held_up(monkeypatch)
    writer = SnapshotWriter(recorded.path, 2)
    for generation in range(1, 7):
        writer.recorded(generation)
        if generation == 2:
            assert begun.wait(20)
    may_go_on.set()
    writer.finish()
    names = sorted(path.name for path in (recorded.path / "snapshots").iterdir())
    assert names == ["000002.safetensors", "000006.safetensors"]


def test_one_that_cannot_be_written_is_a_warning(
    recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    (recorded.path / "snapshots").write_text("in the way")
    take_snapshots(recorded.path, 2)
    assert "no snapshot of generation 2: " in caplog.text
    assert "snapshots must be a directory, and no link" in caplog.text

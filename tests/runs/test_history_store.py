import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.errors import HistoryError, RunDirectoryError
from es_cookbook.evolution.genome import MAX_SEED, Step, Term
from es_cookbook.runs.history_store import HistoryStore, Record, decode, encode, read_history
from tests.runs.records import make_record


def write_history(path: Path, generations: int) -> list[Record]:
    records = [make_record(generation) for generation in range(generations)]
    store = HistoryStore(path)
    for record in records:
        store.append(record)
    store.close()
    return records


def test_reads_back_what_was_appended_also_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    records = write_history(path, 3)
    store = HistoryStore(path)
    assert (store.next_generation, store.warning) == (3, None)
    store.append(make_record(3))
    assert list(store.records()) == [*records, make_record(3)]
    assert list(store.steps()) == [record.step for record in store.records()]


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(
    terms=st.lists(st.builds(Term, st.integers(0, MAX_SEED), finite), max_size=5),
    fitness_G=st.lists(st.floats(allow_infinity=False), max_size=5),
    decay=st.floats(0, 1, exclude_max=True),
    fingerprint=st.integers(0, 2**64 - 1),
)
def test_every_bit_of_a_record_survives_the_disk(
    terms: list[Term], fitness_G: list[float], decay: float, fingerprint: int
) -> None:
    record = Record(7, Step(tuple(terms), decay), tuple(fitness_G), 7, fingerprint)
    back = decode(encode(record))
    assert repr(back) == repr(record)  # repr tells -0.0 from 0.0, and NaN equals NaN.
    json.loads(encode(record), parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))


def test_a_generation_takes_at_most_64_bytes_a_genome_and_a_kilobyte() -> None:
    for num_genomes in (1, 64, 1_000):
        assert len(encode(make_record(0, num_genomes))) <= 64 * num_genomes + 1_000


@pytest.mark.parametrize("fitness", [math.inf, -math.inf])
def test_infinite_fitness_is_no_record(fitness: float) -> None:
    with pytest.raises(ValueError, match="finite or NaN"):
        Record(0, Step(), (fitness,), 0, 0)


def test_a_last_line_torn_at_any_byte_is_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    records = write_history(path, 3)
    whole = path.read_bytes()
    start_of_last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(start_of_last + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert list(read_history(path)) == records[:2]
        store = HistoryStore(path)
        assert store.warning is not None and f"{end - start_of_last} bytes" in store.warning
        assert path.read_bytes() == whole[:start_of_last]
        store.append(records[2])
        store.close()
        assert path.read_bytes() == whole


def test_a_last_line_of_zeros_after_a_power_cut_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    records = write_history(path, 2)
    with path.open("ab") as file:
        file.write(bytes(300))
    assert HistoryStore(path).next_generation == 2
    assert list(read_history(path)) == records


def test_any_flipped_byte_before_the_last_line_is_refused_by_line_number(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write_history(path, 3)
    whole = path.read_bytes()
    first_newline = whole.index(b"\n")
    second_newline = whole.index(b"\n", first_newline + 1)
    for i in range(first_newline + 1, second_newline):
        damaged = bytearray(whole)
        damaged[i] ^= 0x04
        path.write_bytes(damaged)
        with pytest.raises(HistoryError, match="line 2 is damaged"):
            HistoryStore(path)
        assert path.read_bytes() == damaged, "a damaged history is evidence; it is not touched"


def test_a_missing_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write_history(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(HistoryError, match="line 2 must hold generation 1, found generation 2"):
        HistoryStore(path)


def test_another_format_version_is_refused_even_in_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.jsonl"
    monkeypatch.setattr("es_cookbook.runs.history_store.FORMAT_VERSION", 2)
    write_history(path, 1)
    monkeypatch.undo()
    with pytest.raises(HistoryError, match=r"line 1: .*format version 2.*reads 1"):
        HistoryStore(path)


def test_only_the_next_generation_can_be_appended(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path / "history.jsonl")
    with pytest.raises(HistoryError, match="expects generation 0, found 1"):
        store.append(make_record(1))


def test_a_full_disk_costs_only_the_generation_it_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.jsonl"
    store = HistoryStore(path)
    store.append(make_record(0))
    real_write = os.write
    room = [50]

    def full_disk(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = real_write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        store.append(make_record(1))
    monkeypatch.undo()
    assert not room[0], "the write stopped half-way"
    assert path.read_bytes() == encode(make_record(0)), "and what it left was cut"
    store.append(make_record(1))  # The disk has room again, and the same store goes on.
    assert list(read_history(path)) == [make_record(0), make_record(1)]


WRITER = """
import sys
from pathlib import Path
from tests.runs.records import make_record
from es_cookbook.runs.history_store import HistoryStore
store = HistoryStore(Path(sys.argv[1]))
while True:
    store.append(make_record(store.next_generation, num_genomes=64))
    print(store.next_generation, flush=True)
"""


def test_sigkill_never_loses_a_reported_generation(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    reported = 0
    for attempt in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            reported = int(writer.stdout.readline())
            time.sleep(0.013 * attempt)  # Another moment of the loop each time.
            writer.send_signal(signal.SIGKILL)
            for line in writer.stdout:
                if line.endswith("\n"):
                    reported = int(line)
        recorded = list(read_history(path))
        assert len(recorded) >= reported > 0
        assert recorded == [make_record(i, num_genomes=64) for i in range(len(recorded))]

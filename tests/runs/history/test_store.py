import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.common.errors import HistoryError
from es_cookbook.evolution.genome import MAX_COEFFICIENT, MAX_SEED, RULES, MuonRule, Step, Term
from es_cookbook.rl.types import ProblemResult
from es_cookbook.runs.history.format import Fork, Header, Record, decode, encode
from es_cookbook.runs.history.store import HistoryStore, read_header, read_history
from tests.runs.records import HEADER, make_record

ROOT = Path(__file__).parents[3]


def write_history(path: Path, generations: int) -> list[Record]:
    records = [make_record(generation) for generation in range(generations)]
    store = HistoryStore(path, HEADER)
    for record in records:
        store.append(record)
    store.close()
    return records


finite = st.floats(-MAX_COEFFICIENT, MAX_COEFFICIENT)


@given(
    terms=st.lists(st.builds(Term, st.integers(0, MAX_SEED), finite), max_size=5),
    fitness_G=st.lists(st.floats(allow_infinity=False), max_size=5),
    decay=st.floats(0, 1),
    scale=st.none() | st.floats(0, 1e100),
    fingerprint=st.integers(0, 2**64 - 1),
    num_problems=st.none() | st.integers(0, 3),
)
def test_every_bit_of_a_record_survives_the_disk(
    terms: list[Term],
    fitness_G: list[float],
    decay: float,
    scale: float | None,
    fingerprint: int,
    num_problems: int | None,
) -> None:
    rule = None if scale is None else MuonRule(scale, 5)
    scores_P_G = None if num_problems is None else (tuple(fitness_G[::-1]),) * num_problems
    step = Step(tuple(terms), decay, rule)
    record = Record(7, step, tuple(fitness_G), fingerprint, scores_P_G)
    back = decode(encode(record))
    assert repr(back) == repr(record)  # repr tells -0.0 from 0.0, and NaN equals NaN.
    json.loads(encode(record), parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))


def test_a_generation_takes_at_most_64_bytes_a_genome_and_a_kilobyte() -> None:
    for num_genomes in (1, 64, 1_000):
        assert len(encode(make_record(0, num_genomes))) <= 64 * num_genomes + 1_000


def test_a_last_line_torn_at_any_byte_is_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    records = write_history(path, 3)
    whole = path.read_bytes()
    start_of_last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in (*range(start_of_last + 1, len(whole), 9), len(whole) - 1):
        path.write_bytes(whole[:end])
        assert list(read_history(path)) == records[:2]
        store = HistoryStore(path, HEADER)
        assert path.read_bytes() == whole[:start_of_last]
        store.append(records[2])
        store.close()
        assert path.read_bytes() == whole


def test_any_flipped_byte_before_the_last_line_is_refused_by_line_number(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write_history(path, 3)
    whole = path.read_bytes()
    start_of_third = len(b"".join(whole.splitlines(keepends=True)[:2]))
    for i in range(start_of_third, whole.index(b"\n", start_of_third)):
        damaged = bytearray(whole)
        damaged[i] ^= 0x04
        path.write_bytes(damaged)
        with pytest.raises(HistoryError, match="line 3 is damaged"):
            HistoryStore(path, HEADER)
        assert path.read_bytes() == damaged, "a damaged history is evidence; it is not touched"


# The format: every field, and the reader in the docs.


def test_what_the_run_began_with_is_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    forked = dataclasses.replace(HEADER, fork=Fork("runs/parent", 3))
    assert read_header(path) is None
    # A fork without generations kept its parent's dtype, and could not be resumed in its own.
    HistoryStore(path, dataclasses.replace(forked, dtype="bfloat16")).close()
    HistoryStore(path, forked).close()
    assert read_header(path) == forked
    assert list(read_history(path)) == []
    assert decode(encode(forked)) == forked


def sealed(fields: dict[str, Any]) -> bytes:
    """A line with a checksum that is right, whatever its fields."""
    body = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    return body + f',"checksum":"{zlib.crc32(body):08x}"}}\n'.encode()


def fields_of(entry: Header | Record) -> dict[str, Any]:
    return {k: v for k, v in json.loads(encode(entry)).items() if k != "checksum"}


FORKED = dataclasses.replace(HEADER, fork=Fork("runs/parent", 3))


WITH_RULE = dataclasses.replace(
    make_record(0), step=Step(make_record(0).step.terms, rule=MuonRule(0.5, 5))
)


WITH_REWARDS = dataclasses.replace(
    make_record(0), scores_P_G=((0.0, 1.0, math.nan, 0.25), (-1.5, 0.1, 1.0, 0.0))
)


def test_results_of_problems_come_back() -> None:
    results_P = (ProblemResult("0f3a", 0.25, 1.0), ProblemResult("b2", math.nan, math.nan))
    line = encode(dataclasses.replace(make_record(0), results_P=results_P))
    assert b',"problems":"0f3a b2","results":[[0.25,1.0],[null,null]],"checksum"' in line
    record = decode(line)
    assert isinstance(record, Record)
    assert record.results_P[0] == results_P[0]
    assert math.isnan(record.results_P[1].solved)
    assert b"results" not in encode(make_record(0))
    for wrong in (b'"b2"', b'"0f3a b2 c"'):
        body = line.replace(b'"0f3a b2"', wrong).rpartition(b',"checksum":"')[0]
        torn = body + b',"checksum":"%08x"}\n' % zlib.crc32(body)
        with pytest.raises(HistoryError, match="two numbers for each of the problems"):
            decode(torn)


@pytest.mark.parametrize("entry", [HEADER, FORKED, make_record(0), WITH_RULE, WITH_REWARDS])
def test_every_missing_extra_or_wrongly_typed_field_is_named_with_its_line(
    tmp_path: Path, entry: Header | Record
) -> None:
    path = tmp_path / "history.jsonl"
    number = 1 if isinstance(entry, Header) else 2
    before = b"" if number == 1 else encode(HEADER)
    fields = fields_of(entry)
    assert sealed(fields) == encode(entry)
    wrong = {
        f"{name} is missing": {k: v for k, v in fields.items() if k != name}
        for name in fields
        if name not in ("format", "kind", "rule", "rewards")
    }
    wrong |= {f"{name} must be ": fields | {name: [True]} for name in fields if name != "format"}
    wrong |= {"surprise is no field of the format": fields | {"surprise": 1}}
    wrong |= {"format version 3, and this es_cookbook reads 1": fields | {"format": 3}}
    without = {k: v for k, v in fields.items() if k != "format"}
    wrong |= {"the last commit that reads it is cc874d88": {"version": 2, **without}}
    if isinstance(entry, Record):
        wrong |= {"coefficients must be list[float]": fields | {"coefficients": ["1"]}}
        wrong |= {"seeds and coefficients must be as many": fields | {"seeds": "1 2"}}
        wrong |= {"must be a 63-bit integer": fields | {"seeds": "1 -2 3 4"}}
        wrong |= {"invalid literal for int() with base 16": fields | {"fingerprint": "no"}}
        wrong |= {"decay must be in": fields | {"decay": 1.5}}
        wrong |= {"fitness must be list[float | None]": fields | {"fitness": [0.5, False]}}
        wrong |= {"coefficient must be finite as": fields | {"coefficients": [math.nan] * 4}}
    if "rule" in fields:
        wrong |= {"rule must be dict[str, object], found null": fields | {"rule": None}}
        wrong |= {"a rule's kind must be one of": fields | {"rule": {"kind": "magic"}}}
        wrong |= {"has the fields scale, iterations": fields | {"rule": {"kind": "muon"}}}
    if "rewards" in fields:
        wrong |= {"found null": fields | {"rewards": None}}
        wrong |= {
            "rewards must be list[list[float | None]], found [[": fields
            | {"rewards": [[0.5, 1, 0.0, 0.0]]}
        }
        wrong |= {"rewards must be as many as fitness": fields | {"rewards": [[0.5]]}}
    if fields.get("fork"):
        wrong |= {"fork.generation must be": fields | {"fork": {"log_path": "a", "generation": -1}}}
        wrong |= {"fork.log_path is missing": fields | {"fork": {"generation": 1}}}
    for sentence, changed in wrong.items():
        path.write_bytes(before + sealed(changed))
        with pytest.raises(HistoryError) as caught:
            list(read_history(path))
        assert str(caught.value).startswith(f"{path}, line {number}: ")
        assert sentence in str(caught.value)


def test_damage_says_what_can_be_saved_and_how(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    records = write_history(path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"x\n", *lines[4:]]))
    with pytest.raises(HistoryError) as caught:
        list(read_history(path))
    assert str(caught.value) == (
        f"{path}, line 4 is damaged (the checksum does not match); restore the file from a copy, "
        "or go on after 2 generations: in a new run "
        f"(python -m es_cookbook fork log_path={tmp_path} generation=2 output={tmp_path}-from-2) "
        f"or in this one (python -m es_cookbook rewind log_path={tmp_path} generation=2)"
    )
    assert list(itertools.islice(read_history(path), 2)) == records[:2]
    path.write_bytes(b"x" + b"".join(lines[1:]))
    with pytest.raises(HistoryError, match=r"line 1 is damaged .*; restore the file from a copy$"):
        list(read_history(path))


def test_the_reader_in_the_docs_reads_a_history(tmp_path: Path) -> None:
    text = (ROOT / "docs/history_format.md").read_text(encoding="utf-8")
    snippet = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[-1]
    path = tmp_path / "history.jsonl"
    write_history(path, 3)
    program = f"{snippet}\nfor record in read({str(path)!r}):\n    print(record)\n"
    said = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said == [
        str((r.generation, r.step.decay, [(t.seed, t.coefficient) for t in r.step.terms]))
        for r in read_history(path)
    ]


def test_the_docs_name_every_field() -> None:
    text = (ROOT / "docs/history_format.md").read_text(encoding="utf-8")
    for name in {
        **fields_of(FORKED),
        **fields_of(WITH_RULE),
        **fields_of(WITH_REWARDS),
        **{name: 0 for rule in RULES.values() for name in rule.__dataclass_fields__},
        **RULES,
        "fork.log_path": 0,
        "checksum": 0,
    }:
        assert f"`{name}`" in text

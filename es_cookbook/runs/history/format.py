"""A line of the history: its fields, encoded as bytes and decoded.

docs/history_format.md describes the format for those who read it without this package. In short: a
line is one JSON object that ends with a CRC-32 of everything before it. The first line is the
header (what the run began with), every other line a record (one generation). Seeds, fingerprints
and digests are hexadecimal text, since many JSON readers round integers above 2⁵³; floats are
Python's shortest text that reads back to the same bits. That is about 60 bytes a term and genome
together; rewards problem by problem, which few optimizers need, are 4 to 20 bytes each.
"""

import dataclasses
import inspect
import itertools
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, cast, get_args, get_origin

from es_cookbook.common.errors import HistoryError, other_format
from es_cookbook.common.files import parsed
from es_cookbook.common.terminal import one_line
from es_cookbook.evolution.genome import Step, Term, rule_from_plain, rule_to_plain
from es_cookbook.rl.types import ProblemResult

FORMAT_VERSION = 1
LONGEST_LINE = 64 * 2**20
"""Bytes of a line: four million scores."""
_MOST_VALUES = 2**22
CHECKSUM_KEY = b',"checksum":"'


@dataclasses.dataclass(frozen=True, slots=True)
class Fork:
    """The run directory, as given then, from which the first `generation` generations come."""

    log_path: str
    generation: int

    def __post_init__(self) -> None:
        if self.generation < 0:
            raise ValueError(f"fork.generation must be 0 or more, found {self.generation}")


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """The base and settings that a run began with; its steps refer to them.

    Attributes:
        model_name: the base model, as it was given then.
        weights: hexadecimal digest of its weights, `tokenizer`, of its tokenizer's files.
        dtype: dtype of the base weights as the engine held them, "float32" for example.
        fork: None for a run that is not a fork.
        found: values that the run found for options of its optimizer that were `auto`.
        products: dtype of the engine's matrix products, if it had a choice; rollouts depend on it,
            steps and fingerprints do not.
        start: digest of the adapters that the search space starts from, if there are any; a
            fingerprint does not cover them where the centre is something else.
    """

    model_name: str
    weights: str
    tokenizer: str
    dtype: str
    fork: Fork | None = None
    found: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    products: str | None = None
    start: str | None = None


def num_forked(header: Header | None) -> int:
    """Return how many generations of a run come from the run that it was forked from."""
    return header.fork.generation if header and header.fork else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One generation as the history keeps it.

    Attributes:
        generation: 0, 1, 2, …; the step that led from this generation's centre to the next one's.
        step: step that moved the centre.
        fitness_G: finite, or NaN for a genome that was lost.
        fingerprint: 64-bit, of the centre after the step.
        scores_P_G: finite or NaN, "rewards" in the file; None unless the optimizer needs them again
            to go on (`Optimizer.records_scores`).
        results_P: results of the batch's problems; empty unless the dataset (`RLDataset.tell`) or
            the objective (`follows_results`) needs them.
        centre: the genomes stood around the centre after so many generations; None for this one's
            own, after `generation` of them.
    """

    generation: int
    step: Step
    fitness_G: tuple[float, ...]
    fingerprint: int
    scores_P_G: tuple[tuple[float, ...], ...] | None = None
    results_P: tuple[ProblemResult, ...] = ()
    centre: int | None = None

    def __post_init__(self) -> None:
        scores_P_G = self.scores_P_G or ()
        if any(len(scores_G) != len(self.fitness_G) for scores_G in scores_P_G):
            raise ValueError("rewards must be as many as fitness for every problem")
        results = itertools.chain.from_iterable((r.reward, r.solved) for r in self.results_P)
        numbers = itertools.chain(self.fitness_G, *scores_P_G, results)
        if any(map(math.isinf, numbers)):
            raise ValueError("fitness, rewards and results must be finite or NaN")
        if self.generation < 0:
            raise ValueError(f"generation must be 0 or more, found {self.generation}")
        if self.centre is not None and not 0 <= self.centre <= self.generation:
            raise ValueError(f"centre must be 0 to {self.generation}, found {self.centre}")
        if not 0 <= self.fingerprint < 2**64:
            raise ValueError(f"a fingerprint is a 64-bit integer, found {self.fingerprint}")


def encode(entry: Header | Record) -> bytes:
    """Encode a header or a record as one line, including its newline."""
    plain = _plain_header(entry) if isinstance(entry, Header) else _plain_record(entry)
    text = json.dumps({"format": FORMAT_VERSION, **plain}, separators=(",", ":"), allow_nan=False)
    body = text.encode()[:-1]
    return body + CHECKSUM_KEY + f'{zlib.crc32(body):08x}"}}\n'.encode()


def decode(line: bytes) -> Header | Record:
    """Read one line back.

    Raises:
        ValueError: The line is torn or damaged: its checksum does not match.
        HistoryError: The line is whole but of another version, or its fields are not those of the
            format (names them).
    """
    body, _, checksum = line.rpartition(CHECKSUM_KEY)
    if checksum != f'{zlib.crc32(body):08x}"}}\n'.encode():
        raise ValueError("the checksum does not match")
    try:
        found = cast("dict[str, Any]", parsed(body + b"}", _MOST_VALUES))
        if (version := found.get("format")) != FORMAT_VERSION:
            raise HistoryError(other_format(version, FORMAT_VERSION))
        return _header(found) if "kind" in found else _record(found)
    except HistoryError:
        raise
    except ValueError as error:  # What JSON, a Term, a Step or a Record refuses.
        raise HistoryError(f"the line is whole, but {error}") from error


def _plain_header(header: Header) -> dict[str, object]:
    plain: dict[str, object] = {"kind": "header", **dataclasses.asdict(header)}
    return {key: value for key, value in plain.items() if value or key not in _HEADER_OPTIONAL}


def _plain_record(record: Record) -> dict[str, object]:
    rule = record.step.rule
    plain: dict[str, object] = {
        "generation": int(record.generation),
        "position": int(record.generation) + 1,  # where the next batch begins
        "fingerprint": f"{record.fingerprint:x}",
        "decay": float(record.step.decay),
        "seeds": " ".join(f"{term.seed:x}" for term in record.step.terms),
        "coefficients": [float(term.coefficient) for term in record.step.terms],
        "fitness": _numbers_or_null(record.fitness_G),
    }
    if record.centre is not None:
        plain["centre"] = record.centre
    if rule is not None:
        plain["rule"] = rule_to_plain(rule)
    if record.scores_P_G is not None:
        plain["rewards"] = [_numbers_or_null(scores_G) for scores_G in record.scores_P_G]
    if record.results_P:
        plain["problems"] = " ".join(result.problem for result in record.results_P)
        numbers_P = [(result.reward, result.solved) for result in record.results_P]
        plain["results"] = [_numbers_or_null(numbers) for numbers in numbers_P]
    return plain


def _numbers_or_null(values_G: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else float(value) for value in values_G]


def _numbers_or_nan(values_G: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values_G)


def _header(found: Mapping[str, Any]) -> Header:
    _check(found, _HEADER, _HEADER_OPTIONAL)
    fields = {name: value for name, value in found.items() if name not in ("format", "kind")}
    settled: Mapping[str, object] = found.get("found", {})
    _check(settled, dict.fromkeys(settled, float), prefix="found.")
    if (origin := found["fork"]) is not None:
        _check(origin, _FORK, prefix="fork.")
        fields["fork"] = Fork(**origin)
    return Header(**fields)


def _record(found: Mapping[str, Any]) -> Record:
    rule, scores_P_G = found.get("rule"), found.get("rewards")
    _check(found, _RECORD, _RECORD_OPTIONAL)
    seeds_S = [int(seed, 16) for seed in found["seeds"].split()]
    coefficients_S = found["coefficients"]
    problems_P, results_P = found.get("problems", "").split(), found.get("results", [])
    if len(problems_P) != len(results_P) or any(len(result) != 2 for result in results_P):
        raise HistoryError(
            "results must be two numbers for each of the problems, found "
            f"{len(results_P)} of {len(problems_P)}"
        )
    if len(seeds_S) != len(coefficients_S):
        raise HistoryError(
            f"seeds and coefficients must be as many, found {len(seeds_S)} and "
            f"{len(coefficients_S)}"
        )
    return Record(
        generation=found["generation"],
        step=Step(
            tuple(Term(*term) for term in zip(seeds_S, coefficients_S, strict=True)),
            decay=found["decay"],
            rule=None if rule is None else rule_from_plain(rule),
        ),
        fitness_G=_numbers_or_nan(found["fitness"]),
        fingerprint=int(found["fingerprint"], 16),
        scores_P_G=None if scores_P_G is None else tuple(map(_numbers_or_nan, scores_P_G)),
        results_P=tuple(
            ProblemResult(problem, *_numbers_or_nan(numbers))
            for problem, numbers in zip(problems_P, results_P, strict=True)
        ),
        centre=found.get("centre"),
    )


_RECORD: Mapping[str, object] = {
    "format": int,
    "generation": int,
    "position": int,
    "fingerprint": str,
    "decay": float,
    "seeds": str,
    "coefficients": list[float],
    "fitness": list[float | None],
}
_RECORD_OPTIONAL: Mapping[str, object] = {
    "centre": int,
    "rule": dict[str, object],
    "rewards": list[list[float | None]],
    "problems": str,
    "results": list[list[float | None]],
}
_HEADER: Mapping[str, object] = {
    "format": int,
    "kind": str,
    "model_name": str,
    "weights": str,
    "tokenizer": str,
    "dtype": str,
    "fork": dict[str, object] | None,
}
_HEADER_OPTIONAL: Mapping[str, object] = {"products": str, "found": dict[str, float], "start": str}
_FORK: Mapping[str, object] = {"log_path": str, "generation": int}


def _check(
    found: Mapping[str, object],
    types: Mapping[str, object],
    optional: Mapping[str, object] | None = None,
    prefix: str = "",
) -> None:
    """Refuse missing fields, unknown fields and fields of another type, all by name."""
    known = {**types, **(optional or {})}
    wrong = [f"{prefix}{name} is missing" for name in types if name not in found]
    for name, value in found.items():
        if name not in known:
            wrong.append(f"{prefix}{one_line(name)[:60]} is no field of the format")
        elif not _fits(value, known[name]):
            expected = inspect.formatannotation(known[name])
            wrong.append(f"{prefix}{name} must be {expected}, found {json.dumps(value)[:60]}")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if wrong[3:] else ""
        raise HistoryError("; ".join(wrong[:3]) + more)


def _fits(value: object, expected: object) -> bool:
    """Return whether a JSON value has this type, one of a union, or is a list of such values."""
    origin = get_origin(expected)
    if origin is UnionType:
        return any(_fits(value, each) for each in get_args(expected))
    if origin is not list:
        return type(value) is (origin or expected)
    if not isinstance(value, list):
        return False
    items = cast("list[object]", value)
    (of_items,) = get_args(expected)
    if get_origin(of_items) is list:
        return all(_fits(item, of_items) for item in items)
    return set(map(type, items)) <= set(get_args(of_items) or (of_items,))

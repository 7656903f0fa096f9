"""The history on disk: a line a generation, from which the weights come back bit for bit.

A line of `history.jsonl` is JSON: the step (seeds and coefficients in order, decay), fitness_G, the
dataset position and the centre's fingerprint after the step, then a CRC-32 of everything before it.
Seeds and fingerprints are hexadecimal text, since many JSON readers round integers above 2⁵³;
floats are Python's shortest text that reads back to the same bits. That is about 60 bytes a term
and genome together.

A generation counts once its line is fsynced, so a crash leaves at most one torn line, the last.
Opening drops it and says so: the generation is then run again and, being a function of the history
before it, comes out the same. Damage anywhere else is refused, because nothing after it could be
trusted. There is no lock: one run writes a directory.
"""

import dataclasses
import json
import logging
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from es_cookbook.errors import HistoryError
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.runs.files import LineFile

FORMAT_VERSION = 1
_CHECKSUM_KEY = b',"checksum":"'

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One generation as the history keeps it.

    Attributes:
        generation: 0, 1, 2, …; the step that led from this generation's centre to the next one's.
        step: what moved the centre.
        fitness_G: finite, or NaN for a genome that was lost.
        dataset_position: where the next generation's batch begins.
        fingerprint: 64-bit, of the centre after the step.
    """

    generation: int
    step: Step
    fitness_G: tuple[float, ...]
    dataset_position: int
    fingerprint: int

    def __post_init__(self) -> None:
        if any(math.isinf(fitness) for fitness in self.fitness_G):
            raise ValueError(f"fitness_G must be finite or NaN, found {self.fitness_G}")
        if self.generation < 0 or self.dataset_position < 0:
            raise ValueError("generation and dataset_position must not be negative")
        if not 0 <= self.fingerprint < 2**64:
            raise ValueError(f"a fingerprint is a 64-bit integer, found {self.fingerprint}")


def encode(record: Record) -> bytes:
    """A record as one line, its newline included."""
    body = json.dumps(
        {
            "version": FORMAT_VERSION,
            "generation": int(record.generation),
            "position": int(record.dataset_position),
            "fingerprint": f"{record.fingerprint:x}",
            "decay": float(record.step.decay),
            "seeds": " ".join(f"{term.seed:x}" for term in record.step.terms),
            "coefficients": [float(term.coefficient) for term in record.step.terms],
            "fitness": [None if math.isnan(f) else float(f) for f in record.fitness_G],
        },
        separators=(",", ":"),
        allow_nan=False,
    ).encode()[:-1]
    return body + _CHECKSUM_KEY + f'{zlib.crc32(body):08x}"}}\n'.encode()


def decode(line: bytes) -> Record:
    """Read one line back.

    Raises:
        ValueError: The line is torn or damaged: its checksum does not match.
        HistoryError: The line is whole but of another format version.
    """
    body, _, checksum = line.rpartition(_CHECKSUM_KEY)
    if checksum != f'{zlib.crc32(body):08x}"}}\n'.encode():
        raise ValueError("the checksum does not match")
    fields = cast("dict[str, object]", json.loads(body + b"}"))
    if fields["version"] != FORMAT_VERSION:
        raise HistoryError(
            f"the history has format version {fields['version']}, "
            f"this es_cookbook reads {FORMAT_VERSION}"
        )
    seeds_S = [int(seed, 16) for seed in cast(str, fields["seeds"]).split()]
    coefficients_S = cast("list[float]", fields["coefficients"])
    terms = tuple(Term(*term) for term in zip(seeds_S, coefficients_S, strict=True))
    fitness_G = cast("list[float | None]", fields["fitness"])
    return Record(
        generation=cast(int, fields["generation"]),
        step=Step(terms, decay=cast(float, fields["decay"])),
        fitness_G=tuple(math.nan if fitness is None else fitness for fitness in fitness_G),
        dataset_position=cast(int, fields["position"]),
        fingerprint=int(cast(str, fields["fingerprint"]), 16),
    )


def read_history(path: Path) -> Iterator[Record]:
    """The records of a history file in order, without its torn last line if it has one.

    Changes nothing, so it is safe on a run that is still going.

    Raises:
        HistoryError: Damage before the last line, or generations that do not follow one another;
            names the line.
    """
    return (record for record, _ in _read(path))


def _read(path: Path) -> Iterator[tuple[Record, int]]:
    """Each record with the length of its line in bytes."""
    if not path.exists():
        return
    with path.open("rb") as file:
        damage: str | None = None
        for number, line in enumerate(file, start=1):
            if damage is not None:  # Only now is it known that the damaged line was not the last.
                raise HistoryError(damage)
            try:
                record = decode(line)
            except HistoryError as error:
                raise HistoryError(f"{path}, line {number}: {error}") from error
            except ValueError as error:
                damage = (
                    f"{path}, line {number} is damaged ({error}); restore the file from a copy, "
                    f"or cut it before this line to go on from generation {number - 1}"
                )
                continue
            if record.generation != number - 1:
                raise HistoryError(
                    f"{path}, line {number} must hold generation {number - 1}, "
                    f"found generation {record.generation}"
                )
            yield record, len(line)


class HistoryStore:
    """The history of one run, open for appending.

    Attributes:
        next_generation: how many generations are recorded, and the number of the next one.
        warning: what was dropped on opening, or None.

    Args:
        path: `history.jsonl`; made where there is none.

    Raises:
        HistoryError: As `read_history`.
        RunDirectoryError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.next_generation = 0
        self.warning: str | None = None
        good_bytes = 0
        for _, line_bytes in _read(path):
            self.next_generation += 1
            good_bytes += line_bytes
        self._file = LineFile(path)
        torn_bytes = path.stat().st_size - good_bytes
        if torn_bytes:
            self._file.truncate(good_bytes)
            self.warning = (
                f"{path}: dropped a torn last line ({torn_bytes} bytes); "
                f"the run goes on from generation {self.next_generation}"
            )
            logger.warning(self.warning)

    def append(self, record: Record) -> None:
        """Record a generation; it counts when this returns.

        Raises:
            HistoryError: Not the next generation.
            RunDirectoryError: The disk is full or failed; the generation does not count.
        """
        if record.generation != self.next_generation:
            raise HistoryError(
                f"the history expects generation {self.next_generation}, found {record.generation}"
            )
        self._file.append(encode(record))
        self.next_generation += 1

    def records(self) -> Iterator[Record]:
        """What is recorded, in order, read from the disk."""
        return read_history(self._path)

    def steps(self) -> Iterator[Step]:
        """The steps alone: what an engine needs to restore the centre."""
        return (record.step for record in self.records())

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

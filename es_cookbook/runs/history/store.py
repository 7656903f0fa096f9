"""The history on disk: the header, then one line per generation, from which weights are restored.

`format` describes a line. A generation counts once its line is fsynced, so a crash damages at most
the last line. It is dropped when the run continues; that generation is run again and, as a function
of the history before it, gives the same result. Damage anywhere else is refused with file and line,
since nothing behind it can be trusted; the error says how to keep the generations before it.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from es_cookbook.checkpoints.model_files import base_identity
from es_cookbook.common.errors import HistoryError, RunDirectoryError
from es_cookbook.common.files import ANY_SIZE, lines, opened
from es_cookbook.common.terminal import command, one_line, plural
from es_cookbook.runs.files import LineFile
from es_cookbook.runs.history.format import LONGEST_LINE, Header, Record, decode, encode

logger = logging.getLogger(__name__)


def read_history(path: Path) -> Iterator[Record]:
    """Yield the records of a history file in order, without a torn last line.

    Changes nothing, so the run may be in progress. Records before a damaged line are yielded before
    the error.

    Raises:
        HistoryError: Damage before the last line, another format, or generations that do not follow
            one another; names the line.
    """
    return (entry for entry, _ in _read(path) if isinstance(entry, Record))


def read_header(path: Path) -> Header | None:
    """Read the header of a history; None if there is no history yet.

    Raises:
        HistoryError: As `read_history`, of the first line.
    """
    first = next(_read(path), None)
    return first[0] if first is not None and isinstance(first[0], Header) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """The first generations of a history.

    Attributes:
        header: None if nothing is recorded yet.
        num_bytes: bytes of the lines in the file, if these are all that can be read.
        damage: the error of the next line, if it is damaged.
    """

    header: Header | None = None
    records: tuple[Record, ...] = ()
    num_bytes: int = 0
    damage: HistoryError | None = None

    @property
    def generations(self) -> int:
        """Number of records."""
        return len(self.records)

    def encode(self) -> Iterator[bytes]:
        """Yield the lines of a history that holds only these generations."""
        return map(encode, [*([self.header] if self.header else []), *self.records])


NOTHING = Prefix()


def first_generations(found: Prefix, path: Path, generation: int | None) -> Prefix:
    """Return the first generations of a history, all of them if `generation` is None.

    Damage after them is ignored.

    Raises:
        HistoryError: Fewer are recorded; says how many of `path`.
    """
    if found.damage is not None and (generation is None or generation > found.generations):
        raise found.damage
    if generation is None:
        return found
    if not 0 <= generation <= found.generations:
        raise HistoryError(
            f"generation must be 0 to {found.generations}, since {path} holds as many generations; "
            f"found {generation}"
        )
    return dataclasses.replace(found, records=found.records[:generation], damage=None)


def readable_prefix(path: Path) -> Prefix:
    """Read a history as far as possible; `damage` is the error after that."""
    header, records, num_bytes, damage = None, list[Record](), 0, None
    try:
        for entry, line_bytes in _read(path):
            if isinstance(entry, Header):
                header = entry
            else:
                records.append(entry)
            num_bytes += line_bytes
    except (HistoryError, RunDirectoryError) as error:
        damage = HistoryError(str(error))
    return Prefix(header, tuple(records), num_bytes, damage)


def _read(path: Path) -> Iterator[tuple[Header | Record, int]]:
    """Yield the content of each line, and its length in bytes."""
    try:
        file = opened(path, ANY_SIZE, path.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise HistoryError(f"{path} cannot be read: {error.strerror or error}") from error
    with file:
        damage: str | None = None
        expected = 0
        for number, line in enumerate(lines(file, LONGEST_LINE), start=1):
            if damage is not None:  # The damaged line was not the last.
                raise HistoryError(damage)
            try:
                entry = decode(line)
            except HistoryError as error:
                advice = f"; {_advice(path, expected)}" if expected else ""
                raise HistoryError(f"{path}, line {number}: {error}{advice}") from error
            except ValueError as error:
                damage = f"{path}, line {number} is damaged ({error}); {_advice(path, expected)}"
                continue
            if (number == 1) != isinstance(entry, Header):
                raise HistoryError(
                    f"{path}, line {number}: the header must be the first line, and only that; "
                    f"{_advice(path, expected)}"
                )
            if isinstance(entry, Record):
                if entry.generation != expected:
                    raise HistoryError(
                        f"{path}, line {number} must hold generation {expected}, "
                        f"found generation {entry.generation}; {_advice(path, expected)}"
                    )
                expected += 1
            yield entry, len(line)


def _advice(path: Path, whole: int) -> str:
    """Return advice for a history of which only the first `whole` generations can be read."""
    if not whole:
        return "restore the file from a copy"
    run = path.parent
    new = command("fork", log_path=run, generation=whole, output=f"{run}-from-{whole}")
    return (
        f"restore the file from a copy, or go on after {plural(whole, 'generation')}: in a new run "
        f"({new}) or in this one ({command('rewind', log_path=run, generation=whole)})"
    )


class HistoryStore:
    """The history of one run, open for appending.

    Args:
        path: path of the file.
        header: written if the file has no generation.
        found: the recorded history, which is read now if None. A damaged last line behind it is
            cut.

    Attributes:
        next_generation: the number of recorded generations, and of the next one.

    Raises:
        HistoryError: As `read_history`.
        RunDirectoryError: The file cannot be written.
    """

    def __init__(self, path: Path, header: Header, found: Prefix | None = None) -> None:
        found = found or first_generations(readable_prefix(path), path, None)
        self.next_generation = found.generations
        self._file = LineFile(path)
        try:
            cut = self._file.truncate(found.num_bytes if found.records else 0)
            if not found.records:  # It begins here: a fork's first header may be of another dtype.
                self._file.append(encode(header))
            elif cut:
                logger.warning(
                    "%s: dropped a torn last line (%s); the run continues from generation %d",
                    *(path, plural(cut, "byte"), self.next_generation),
                )
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Record) -> None:
        """Record a generation; it counts when this returns.

        Raises:
            RunDirectoryError: The disk is full or failed; the generation does not count.
        """
        self._file.append(encode(record))
        self.next_generation += 1

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()


_COMPARED = {"weights": "", "tokenizer": "", "dtype": " (engine.dtype)", "start": " (search_space)"}
"""Fields of a header that a run keeps, and the options that choose them."""


def header_of(model_name: str, base_dtype: str, starts: Sequence[str] = ()) -> Header:
    """Make the header of a run whose engine holds this base in this dtype.

    It reads all of the base, and the adapters that the search space starts from (`starts`).

    Raises:
        ModelError: It cannot be read.
    """
    files = [file for path in starts for file in sorted(Path(path).glob("adapter_*"))]
    start = hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest() if files else None
    return Header(model_name, *base_identity(model_name), base_dtype, start=start)


def check_same_base(path: Path, then: Header, now: Header) -> None:
    """Refuse another base, or other adapters to start from, than a history (`path`) began with.

    Older histories do not tell their adapters.

    Raises:
        HistoryError: Another base; names what differs.
    """
    differing = [
        f"its {name}{option} was {one_line(was[:16])}, is {found[:16]}"
        for name, option in _COMPARED.items()
        if (was := getattr(then, name)) not in (None, found := str(getattr(now, name)))
    ]
    if differing:
        hint = ": another is there now (of a run that went on: RUN@GENERATION)"
        raise HistoryError(
            f"{path} began with model_name={one_line(then.model_name)} and cannot go on with "
            f"model_name={now.model_name}: {', '.join(differing)}; give what it began with"
            f"{hint if then.model_name == now.model_name else ''}"
        )


def check_fingerprint(generation: int, recorded: int, found: int, model_name: str) -> None:
    """Refuse the centre after so many generations if it is not the recorded one, to the bit.

    Raises:
        HistoryError: They differ.
    """
    if found != recorded:
        raise HistoryError(
            f"after {plural(generation, 'generation')} the centre had fingerprint "
            f"{recorded:016x}, but the history gives {found:016x} from model_name={model_name}; "
            "give the model that began the run"
        )

"""Rows of data files.

Tables go through pyarrow, and nothing in them is decoded: bytes and paths stay as they are. JSON
lines are read one by one, because a table loader reports the first bad batch, if anything, and
users need the line.
"""

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from es_cookbook.common.errors import DataError
from es_cookbook.rl.data.rows import Fields, Row, shown

FILE_TYPES = (
    *(".jsonl", ".jsonl.gz", ".json", ".json.gz"),
    *(".parquet", ".csv", ".csv.gz", ".arrow"),
)
UNREADABLE = (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, RecursionError)
"""TypeError, LookupError: of a file that says of its columns what nobody can read."""
BATCH = 1000
"""Rows that are taken out of a table at a time: as Python's objects they take many times more."""

Tables: TypeAlias = Iterable[Any]
"""Tables or batches of pyarrow."""


def file_rows(path: Path) -> Iterator[Row]:
    """Rows of one file.

    Raises:
        DataError: It cannot be read; names the line if it is one.
    """
    with reading(str(path)):
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _json_lines(path)
        elif path.name.endswith((".json", ".json.gz")):
            yield from _json_array(path)
        else:
            yield from of_tables(tables_of(path), str(path))


@contextlib.contextmanager
def reading(
    where: str, errors: Callable[[], tuple[type[Exception], ...]] = lambda: UNREADABLE
) -> Generator[None]:
    """Inside, these errors of readers become a sentence."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        if not isinstance(error, errors()):
            raise
        said = f"{where}: could not be read as a dataset ({first_line(error)})"
        raise DataError(said) from error


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _json_lines(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        for line_number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {line_number}"
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON ({error})") from None
            yield _row(where, fields)


def _json_array(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        found = json.load(file)
    if not isinstance(found, list):
        raise DataError(f"{path}: must be an array of JSON objects, found {shown(found)}")
    for number, fields in enumerate(cast("list[object]", found), 1):
        yield _row(f"{path}, row {number}", fields)


def _row(where: str, fields: object) -> Row:
    if not isinstance(fields, dict):
        raise DataError(f"{where}: must be a JSON object, found {shown(fields)}")
    return Row(where, cast("dict[str, object]", fields))


def tables_of(path: Path) -> Tables:
    """A file's, one after the other."""
    import pyarrow

    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(BATCH)
    elif path.suffix == ".arrow":
        with pyarrow.memory_map(str(path)) as mapped:
            if mapped.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(mapped)
                yield from map(reader.get_batch, range(reader.num_record_batches))
            else:
                mapped.seek(0)
                yield from pyarrow.ipc.open_stream(mapped)
    else:
        import pyarrow.csv

        parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
        with pyarrow.input_stream(str(path)) as unpacked:
            for table in pyarrow.csv.open_csv(unpacked, parse_options=parsing):
                for column in table.schema:
                    if pyarrow.types.is_binary(column.type):
                        raise DataError(f"{path}: the column {column.name!r} is not UTF-8")
                yield table


def of_tables(tables: Tables, where: str) -> Iterator[Row]:
    """Rows of tables that follow each other."""
    numbers = count(1)
    for table in tables:
        names: Sequence[str] = table.schema.names
        if len(set(names)) < len(names):
            raise DataError(f"{where}: has columns of the same name: {', '.join(names)}")
        for start in range(0, table.num_rows, BATCH):
            for fields in table.slice(start, BATCH).to_pylist():
                yield Row(f"{where}, row {next(numbers)}", cast(Fields, fields))


def first_line(error: Exception) -> str:
    """Of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]

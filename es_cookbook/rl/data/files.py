"""Rows of data files.

Tables go through pyarrow, and only text in them is decoded: images and paths stay as they are, and
bytes are text if they are UTF-8, since writers of Parquet may omit its mark. CSV is text: no type
is guessed, and an empty cell is an empty text. JSON lines are read one by one, because a table
loader reports at most the first bad batch, and users need the line.
"""

import contextlib
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from es_cookbook.common.errors import DataError, first_line
from es_cookbook.rl.data.rows import Row, changed, shown

CSV = (".csv", ".csv.gz")
FILE_TYPES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", *CSV, ".arrow")
UNREADABLE = (
    *(OSError, EOFError, zlib.error, csv.Error, ValueError, RecursionError),
    *(TypeError, LookupError),  # Of a table whose description of its columns is damaged.
)
BATCH = 1000
"""Rows converted at a time: Python objects take many times a table's memory."""

Tables: TypeAlias = Iterable[Any]
"""Tables or batches of pyarrow."""


def file_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of one file.

    Raises:
        DataError: It cannot be read; names the line if it is one.
    """
    with reading(str(path)):
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _json_lines(path)
        elif path.name.endswith((".json", ".json.gz")):
            yield from _json_array(path)
        elif path.name.endswith(CSV):
            yield from _csv_rows(path)
        else:
            yield from of_tables(tables_of(path), str(path))


@contextlib.contextmanager
def reading(
    where: str, errors: Callable[[], tuple[type[Exception], ...]] = lambda: UNREADABLE
) -> Generator[None]:
    """Turn errors of readers in the block into a `DataError`."""
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


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with _open(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        lines = (cells for cells in csv.reader(text, strict=True) if cells)
        names = next(lines, [])
        if not names:
            raise DataError(f"{path}: has no header")
        if len(set(names)) < len(names):
            raise DataError(f"{path}: has columns of the same name: {', '.join(names)}")
        for number, cells in enumerate(lines, 1):
            where = f"{path}, row {number}"
            if len(cells) != len(names):
                raise DataError(f"{where}: has {len(cells)} cells, and the header {len(names)}")
            yield Row(where, dict(zip(names, cells, strict=True)), are_texts=True)


def _row(where: str, fields: object) -> Row:
    if not isinstance(fields, dict):
        raise DataError(f"{where}: must be a JSON object, found {shown(fields)}")
    return Row(where, cast("dict[str, object]", fields))


def tables_of(path: Path) -> Tables:
    """Yield the tables of a Parquet or Arrow file."""
    import pyarrow

    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(BATCH)
    else:
        with pyarrow.memory_map(str(path)) as mapped:
            if mapped.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(mapped)
                yield from map(reader.get_batch, range(reader.num_record_batches))
            else:
                mapped.seek(0)
                yield from pyarrow.ipc.open_stream(mapped)


def of_tables(tables: Tables, where: str) -> Iterator[Row]:
    """Yield the rows of consecutive tables."""
    numbers = count(1)
    for table in tables:
        names: Sequence[str] = table.schema.names
        if len(set(names)) < len(names):
            raise DataError(f"{where}: has columns of the same name: {', '.join(names)}")
        binary = [column.name for column in table.schema if "binary" in str(column.type)]
        for start in range(0, table.num_rows, BATCH):
            for fields in cast("list[dict[str, object]]", table.slice(start, BATCH).to_pylist()):
                fields.update({name: changed(fields[name], _decoded) for name in binary})
                yield Row(f"{where}, row {next(numbers)}", fields)


def _decoded(value: object) -> object:
    """Decode bytes to text if they are UTF-8."""
    with contextlib.suppress(UnicodeDecodeError):
        return value.decode() if isinstance(value, bytes) else value
    return value

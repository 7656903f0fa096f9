"""Rows of data files.

Tables go through pyarrow, and nothing in them is decoded but text: images and paths stay as they
are, and bytes are text where they are UTF-8, since writers of Parquet may leave its mark out. CSV
is text: no type is guessed, and an empty cell is an empty text. JSON lines are read one by one,
because a table loader reports the first bad batch, if anything, and users need the line.
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
from es_cookbook.rl.data.rows import Row, changed, shown

CSV = (".csv", ".csv.gz")
FILE_TYPES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", *CSV, ".arrow")
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
            are_texts = path.name.endswith(CSV)
            yield from of_tables(tables_of(path), str(path), are_texts=are_texts)


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
        yield from _csv_tables(path)


def _csv_tables(path: Path) -> Tables:
    import pyarrow.csv

    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    with pyarrow.input_stream(str(path)) as unpacked:
        names = pyarrow.csv.open_csv(unpacked, parse_options=parsing).schema.names
    types = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.binary()))
    with pyarrow.input_stream(str(path)) as unpacked:
        tables = pyarrow.csv.open_csv(unpacked, parse_options=parsing, convert_options=types)
        yield from _as_text(tables, path)


def _as_text(tables: Tables, path: Path) -> Tables:
    """Tables of CSV with texts for bytes."""
    import pyarrow

    for table in tables:
        for at, name in enumerate(table.schema.names):
            try:
                table = table.set_column(at, name, table.column(at).cast(pyarrow.string()))
            except pyarrow.ArrowInvalid:
                raise DataError(f"{path}: the column {name!r} is not UTF-8") from None
        yield table


def of_tables(tables: Tables, where: str, *, are_texts: bool = False) -> Iterator[Row]:
    """Rows of tables that follow each other; `are_texts`: of CSV."""
    numbers = count(1)
    for table in tables:
        names: Sequence[str] = table.schema.names
        if len(set(names)) < len(names):
            raise DataError(f"{where}: has columns of the same name: {', '.join(names)}")
        binary = [column.name for column in table.schema if "binary" in str(column.type)]
        for start in range(0, table.num_rows, BATCH):
            for fields in cast("list[dict[str, object]]", table.slice(start, BATCH).to_pylist()):
                fields.update({name: changed(fields[name], _decoded) for name in binary})
                yield Row(f"{where}, row {next(numbers)}", fields, are_texts=are_texts)


def _decoded(value: object) -> object:
    """Bytes as text, where they are UTF-8."""
    with contextlib.suppress(UnicodeDecodeError):
        return value.decode() if isinstance(value, bytes) else value
    return value


def first_line(error: Exception) -> str:
    """Of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]

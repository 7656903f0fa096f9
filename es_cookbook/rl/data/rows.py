"""Rows of local files and of Hugging Face Hub sets, each with its origin.

A `Row` returns its fields by name and type, and names file and line in the error about a wrong one.
A template is text with a row's fields in braces: `"{question} = ?"`.

Parquet and the Hub go through `datasets`, which decodes nothing here: bytes and paths stay as they
are. JSON lines are read one by one instead, because a table loader reports the first bad batch, if
anything, and users need the line.
"""

import copy
import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, TypeAlias, cast

from es_cookbook.common.errors import ConfigError, DataError, HubError
from es_cookbook.common.servers.hub import check_repository, endpoint
from es_cookbook.rl.rewards.answers import first_field

if TYPE_CHECKING:
    from datasets.packaged_modules.cache.cache import Cache

_logger = logging.getLogger(__name__)

Fields: TypeAlias = Mapping[str, object]

FILE_TYPES = (".jsonl", ".parquet")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row; `where`, for example "train.jsonl, line 3", opens every error sentence."""

    where: str
    fields: Fields

    def integer(self, *names: str) -> int:
        """The integer under the first of `names` that is there: sets differ in names."""
        return cast(int, self._fitting(names, _is_integer, "a whole number"))

    def integers(self, *names: str) -> tuple[int, ...]:
        """The list of integers under the first of `names` that is there; not empty."""
        return tuple(
            cast(list[int], self._fitting(names, _are_integers, "a list of whole numbers"))
        )

    def text(self, *names: str) -> str:
        """The text under the first of `names` that is there; not empty."""
        return cast(str, self._fitting(names, _is_some_text, "text, and some"))

    def optional_text(self, name: str) -> str | None:
        """The text under `name`, or None where the row has none."""
        if self.fields.get(name) is None:
            return None
        return cast(str, self._fitting((name,), lambda value: isinstance(value, str), "text"))

    def value(self, name: str) -> object:
        """What stands under `name`, which must be there."""
        return self._first((name,))[1]

    def error(self, what: str) -> DataError:
        """An error about this row, to raise."""
        return DataError(f"{self.where}: {what}")

    def _fitting(self, names: tuple[str, ...], fits: Callable[[object], bool], what: str) -> object:
        name, value = self._first(names)
        if not fits(value):
            raise self.error(f"field {name!r} must be {what}, found {_show(value)}")
        return value

    def _first(self, names: tuple[str, ...]) -> tuple[str, object]:
        try:
            return first_field(self.fields, *names)
        except DataError as error:
            raise self.error(str(error)) from None


def check_template(template: str, option: str = "prompt") -> None:
    """Refuse what is no template; `option` is the user's name for it.

    Raises:
        ConfigError: It cannot be read, or asks for more than a field.
    """
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"{option}={template!r:.80}: {error}; write {{{{ for a brace") from error
    for _, field, form, conversion in pieces:
        if field is not None and (not field.isidentifier() or form or conversion):
            raise ConfigError(
                f"{option}={template!r:.80}: in braces stands the name of one field of the row, "
                f"found {field!r:.40}; write {{{{ for a brace"
            )


def filled(template: str, row: Row) -> str:
    """The template with a row's values in it, in one pass: braces of a value stay.

    >>> filled("{question} = ?", Row("row 1", {"question": "6 * {7}"}))
    '6 * {7} = ?'

    Raises:
        DataError: The row lacks a field.
    """
    return "".join(
        literal + ("" if field is None else str(row.value(field)))
        for literal, field, _, _ in Formatter().parse(template)
    )


def check_source(source: str, option: str) -> None:
    """Refuse a source that is not there, without reading it; `option` is the user's name for it.

    Raises:
        DataError: There is no such file, or the Hub does not give the set and no cache has it.
    """
    if not _is_file(source) and (unavailable := _why_unavailable(source)):
        _cached_set(source, option, unavailable)


def check_sources(source: str | None, test_source: str | None) -> None:
    """Refuse a data set's `dataset.source` and `dataset.test_source` where they are not there.

    Raises:
        DataError: As `check_source`; None is no source.
    """
    for option, given in (("dataset.source", source), ("dataset.test_source", test_source)):
        if given is not None:
            check_source(given, option)


def load_rows(source: str, *, option: str = "source", hub_split: str = "train") -> Iterator[Row]:
    """Rows of a `.jsonl` or `.parquet` file, or else of a Hub set, in order.

    A set is asked for on the Hub, and read from the cache if that cannot give it.

    Args:
        source: a path that ends in one of `FILE_TYPES`, or a Hub name such as "owner/name".
        option: the user's name for the source.
        hub_split: which split of a Hub set.

    Raises:
        DataError: The source cannot be found or read, or a line is not a JSON object.
    """
    if _is_file(source) and source.endswith(".jsonl"):
        return _json_lines(Path(source))
    return _table_rows(source, option, hub_split)


def write_rows(output: str, rows: Sequence[Fields]) -> None:
    """Write rows as JSON lines to a file that is not there yet.

    Raises:
        ConfigError: It is there, or cannot be written; `output` is the user's name for it.
    """
    try:
        with Path(output).open("x", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise ConfigError(f"cannot write output {output!r}: {error.strerror}") from error


def _is_file(source: str) -> bool:
    """Whether a source is a file, or else a set's name; refuses a path to nothing or to others."""
    path = Path(source)
    if path.suffix not in FILE_TYPES and (path.exists() or source.count("/") > 1):
        kinds = " or ".join(FILE_TYPES)
        raise DataError(f"{source}: a data file's name must end in {kinds}, found {path.suffix!r}")
    if path.suffix in FILE_TYPES and not path.is_file():
        raise DataError(f"{source}: there is no such file")
    return path.suffix in FILE_TYPES


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for line_number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {line_number}"
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON ({error})") from None
            if not isinstance(fields, dict):
                raise DataError(f"{where}: must be a JSON object, found {_show(fields)}")
            yield Row(where, cast(dict[str, object], fields))


def _table_rows(source: str, option: str, hub_split: str) -> Iterator[Row]:
    local = source.endswith(".parquet")
    unavailable = None if local else _why_unavailable(source)
    # Slow to import, and generated problems do not need it.
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        if local:
            table = datasets.Dataset.from_parquet(source)
        elif unavailable is None:
            revision = _checked_revision(source)
            table = datasets.load_dataset(source, split=hub_split, revision=revision)
        else:
            table = _cached_set(source, option, unavailable).as_dataset(hub_split)
            _logger.warning("%s: %s is read from the cache: %s", option, source, unavailable)
        rows = cast("datasets.Dataset", table)
        rows.info.features = cast("datasets.Features", _undecoded(rows.features))
    # TypeError, LookupError: of a file that says of its columns what nobody can read.
    except (OSError, ValueError, TypeError, LookupError, DatasetsError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{source}: could not be read as a dataset ({_first_line(error)})"
        ) from error
    where = source if local else f"{source} [{hub_split}]"
    for row_number, fields in enumerate(cast(Iterable[Fields], rows), 1):
        yield Row(f"{where}, row {row_number}", fields)


def _checked_revision(source: str) -> str:
    """A set's latest commit, if its configurations name files of its repository alone.

    `datasets` refuses others too, but asks other hosts and searches this machine's disks first.

    Raises:
        DataError: They name others.
    """
    import yaml
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    revision = str(HfApi().dataset_info(source).sha)
    for name in ("README.md", ".huggingface.yaml"):
        try:
            path = hf_hub_download(source, name, repo_type="dataset", revision=revision)
            for text in _files_named(_described(Path(path))):
                if not _is_own(text, source):
                    raise DataError(
                        f"{source}: its {name} names the data file {_show(text)}; accepted: paths "
                        "in its own repository"
                    )
        except LocalEntryNotFoundError:  # The Hub does not answer any more.
            raise
        except EntryNotFoundError:
            continue
        except (yaml.YAMLError, RecursionError) as error:
            raise DataError(f"{source}: its {name} is no YAML: {_first_line(error)}") from error
    return revision


def _described(path: Path) -> object:
    import yaml
    from huggingface_hub import DatasetCard

    if path.suffix == ".md":
        return DatasetCard.load(path).data.to_dict()
    return yaml.safe_load(path.read_bytes())


def _files_named(described: object) -> Iterator[str]:
    """All texts below `data_files` and `data_dir`.

    Raises:
        ValueError: A list is there twice: YAML may refer to itself, and double with each line.
    """
    left, seen = [(described, False)], set[tuple[int, bool]]()
    while left:
        value, inside = left.pop()
        if inside and isinstance(value, str):
            yield value
        if not isinstance(value, dict | list):
            continue
        if (id(value), inside) in seen:
            if inside:
                raise ValueError("data_files must not refer to other parts of the YAML")
            continue
        seen.add((id(value), inside))
        if isinstance(value, list):
            left += [(each, inside) for each in cast("list[object]", value)]
        else:
            for key, each in cast("dict[object, object]", value).items():
                left.append((each, inside or key in ("data_files", "data_dir")))


def _is_own(text: str, source: str) -> bool:
    """Whether a pattern of a set's files stays in its repository."""
    text = text.removeprefix(f"hf://datasets/{source}@")
    text = text.removeprefix(f"{endpoint()}/datasets/{source}/resolve/")
    return not re.match(r"[/\\~]|\w+:", text) and "::" not in text and ".." not in text.split("/")


def _undecoded(feature: object) -> object:
    """A column's type, without decoding: an image or a sound may name a file or an address."""
    if isinstance(feature, dict):
        of_columns = cast("dict[str, object]", feature)
        return type(of_columns)({name: _undecoded(each) for name, each in of_columns.items()})
    if isinstance(feature, list | tuple):
        return [_undecoded(each) for each in cast("list[object]", feature)]
    changed = copy.copy(feature)
    if hasattr(changed, "decode"):
        vars(changed)["decode"] = False
    if inner := getattr(changed, "feature", None):
        vars(changed)["feature"] = _undecoded(inner)
    return changed


def _why_unavailable(source: str) -> HubError | None:
    """Why a set cannot be had from the Hub; None if it can."""
    try:
        check_repository("dataset", source)
    except HubError as error:
        return error
    return None


def _cached_set(source: str, option: str, unavailable: HubError) -> "Cache":
    """A set as it was when it was last loaded.

    Raises:
        DataError: It was never loaded here, or in several configurations.
    """
    from datasets import config
    from datasets.packaged_modules.cache.cache import Cache

    name = source.rpartition("/")[2]
    try:
        return Cache(repo_id=source, dataset_name=name, version="auto", hash="auto")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{option}: {source!r} is no {' or '.join(FILE_TYPES)} file, it cannot be had from the "
            f"cache in {config.HF_DATASETS_CACHE} ({_first_line(error)}), and {unavailable}; "
            "accepted: such a file, a set that is in the cache, and with a network one on the Hub "
            "(HF_ENDPOINT for a mirror)"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_some_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _are_integers(value: object) -> bool:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return bool(items) and all(map(_is_integer, items))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: object) -> str:
    text = repr(value)
    return f"{text[:60]}…" if len(text) > 60 else text

"""Rows of sets: directories of `datasets` or in the layout of the Hub, and those of the Hub.

They are read as tables without decoding (`files`). What a set's card says is a stranger's word: it
may name files of the set alone, and no code of a set is run.
"""

import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from es_cookbook.common.errors import DataError, HubError
from es_cookbook.common.servers.hub import check_repository, endpoint
from es_cookbook.common.servers.library import guard
from es_cookbook.rl.data.readers.files import (
    BATCH,
    CSV,
    FILE_TYPES,
    UNREADABLE,
    Tables,
    file_rows,
    first_line,
    of_tables,
    reading,
    tables_of,
)
from es_cookbook.rl.data.rows import Row, shown

if TYPE_CHECKING:
    from datasets import DatasetBuilder

_logger = logging.getLogger(__name__)

_CARDS = ("README.md", ".huggingface.yaml")
_SAVED, _SEVERAL = "state.json", "dataset_dict.json"
"""Files by which a directory of `save_to_disk` is known, of one split and of several."""
_NOT_OF_FORM = {"name", "version", "data_dir", "data_files", "description"}
"""Settings of a configuration that do not say how its files are read."""
_START = 1000
"""Bytes of a file in which its first bracket is looked for."""
_TEXTS = "es_cookbook_text"
"""Directory in the cache of `datasets`."""


@dataclasses.dataclass(frozen=True, slots=True)
class NamedSet:
    """A directory or a set of the Hub, as a user names it.

    Attributes:
        name: a directory's path, or a name on the Hub.
        revision: of a set of the Hub.
        configuration: "" if it is left out, and `split` as well.
        is_slice: only some rows are wanted.
    """

    name: str
    revision: str | None
    configuration: str
    split: str
    is_slice: bool

    @property
    def is_directory(self) -> bool:
        return Path(self.name).is_dir()


@dataclasses.dataclass(frozen=True, slots=True)
class HubFiles:
    """JSON files of a set of the Hub, which are read as they are: `datasets` would guess types.

    Attributes:
        splits: name -> paths in the repository.
    """

    name: str
    revision: str
    splits: Mapping[str, Sequence[str]]

    def paths(self, split: str, is_cached: bool = False) -> Iterator[Path]:
        """Of a split, in the Hub's cache; each is fetched when it is asked for, or is there."""
        from huggingface_hub import hf_hub_download

        guard()
        for path in self.splits[split]:
            yield Path(
                hf_hub_download(
                    self.name,
                    path,
                    repo_type="dataset",
                    revision=self.revision,
                    local_files_only=is_cached,
                )
            )


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedSet:
    """A set that is there.

    Attributes:
        reader: of its rows; the path of a saved directory.
        split: the one that is wanted.
        unavailable: why it is read from the cache, if it is.
    """

    reader: "DatasetBuilder | HubFiles | Path"
    split: str
    unavailable: HubError | None = None


def set_rows(source: NamedSet, option: str, split: str) -> Iterator[Row]:
    """Rows of a set.

    Args:
        source: the set.
        option: the user's name for it.
        split: where the source names none.

    Raises:
        DataError: As `opened_set`, or it cannot be read.
    """
    with reading(source.name, _unreadable_sets):
        opened = opened_set(source, option, split)
        if opened.unavailable is not None:
            told = option, source.name, opened.unavailable
            _logger.warning("%s: %s is read from the cache: %s", *told)
        where = f"{source.name} [{opened.split}]"
        if paths := _text_files(opened, source):
            for n, row in enumerate(chain.from_iterable(map(file_rows, paths)), 1):
                yield dataclasses.replace(row, where=f"{where}, row {n}")
        else:
            tables = _tables_of(opened, source)
            yield from of_tables(tables, where, are_texts=_is_csv(opened.reader))


def opened_set(source: NamedSet, option: str, split: str) -> OpenedSet:
    """Find a set, without reading it; arguments are those of `set_rows`.

    Raises:
        DataError: There is none, or no such configuration or split.
    """
    if source.is_directory and (saved := _saved(source, split)):
        return saved
    if not source.is_directory and (unavailable := _why_unavailable(source.name)):
        return _cached_set(source, option, split, unavailable)
    with reading(source.name, _unreadable_sets):
        return _built(source, split)


def _saved(source: NamedSet, split: str) -> OpenedSet | None:
    """A directory of `save_to_disk`; None if it is no such directory."""
    path = Path(source.name)
    if (path / _SEVERAL).is_file():
        splits = sorted(each.parent.name for each in path.glob(f"*/{_SAVED}"))
        named = dataclasses.replace(source, split=source.split or source.configuration)
        split = _split_of(named, split, splits)
        return OpenedSet(path / split, split)
    return OpenedSet(path, split) if (path / _SAVED).is_file() else None


def _saved_tables(path: Path) -> Tables:
    names = [each["filename"] for each in json.loads((path / _SAVED).read_bytes())["_data_files"]]
    for name in names:
        if name != Path(name).name or not name.endswith(".arrow"):
            raise DataError(
                f"{path / _SAVED} names the data file {shown(name)}; accepted: files beside it"
            )
        yield from tables_of(path / name)


def _built(source: NamedSet, split: str) -> OpenedSet:
    # Slow to import, and generated problems do not need it.
    import datasets

    guard()
    if source.is_directory:
        path, revision = str(Path(source.name).absolute()), None
        _check_cards(source.name, [Path(source.name, name) for name in _CARDS])
    else:
        path, revision = source.name, _checked_revision(source)
    try:
        builder = datasets.load_dataset_builder(
            path, source.configuration or None, revision=revision
        )
    except RuntimeError as error:
        if "scripts" not in str(error):
            raise
        raise DataError(
            f"{source.name}: is made by code of its own, which is not run; accepted are sets of "
            "data files"
        ) from error
    except ValueError:
        names = datasets.get_dataset_config_names(path, revision=revision)
        if source.configuration in names or (not source.configuration and len(names) == 1):
            raise
        raise _missing("configuration", source.configuration, names, source) from None
    splits = [str(each) for each in builder.info.splits or builder.config.data_files or ()]
    split = _split_of(source, split, splits)
    if revision is not None and (files := _hub_files(builder, source.name, revision, split)):
        _record(files, _record_of(source))
        return OpenedSet(files, split)
    return OpenedSet(builder, split)


def _hub_files(reader: "DatasetBuilder", name: str, revision: str, split: str) -> HubFiles | None:
    """The files of a set that needs no settings of `datasets`; None for others."""
    from datasets.packaged_modules.json.json import Json

    if not isinstance(reader, Json) or not _is_usual(reader):
        return None
    prefix, found = f"hf://datasets/{name}@{revision}/", cast(Any, reader.config.data_files)
    splits = {str(each): [str(path) for path in paths] for each, paths in found.items()}
    own = all(path.startswith(prefix) for paths in splits.values() for path in paths)
    splits = {each: [path[len(prefix) :] for path in paths] for each, paths in splits.items()}
    if not own or split not in splits:
        return None
    files = HubFiles(name, revision, splits)
    are_lines = all(path.endswith((".jsonl", ".jsonl.gz")) for path in splits[split])
    return files if are_lines or all(map(_is_of_rows, files.paths(split))) else None


def _record_of(source: NamedSet) -> Path:
    """Where it stands which files a set had when it was last opened."""
    from datasets import config

    name = f"{source.name.replace('/', '___')}:{source.configuration}.json"
    return Path(config.HF_DATASETS_CACHE, _TEXTS, "json", name)


def _record(files: HubFiles, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(dataclasses.asdict(files)), encoding="utf-8")
    beside.replace(path)


def _recorded(source: NamedSet) -> HubFiles:
    """The files of a set that was opened before.

    Raises:
        OSError, ValueError: It was not, or in another revision.
    """
    files = HubFiles(**json.loads(_record_of(source).read_bytes()))
    if source.revision not in (None, files.revision):
        raise ValueError(f"it has revision {files.revision}")
    return files


def _split_of(source: NamedSet, default: str, names: Sequence[str]) -> str:
    """The one that is wanted, which must be one of these."""
    wanted = source.split or default
    if wanted not in names:
        raise _missing("split", wanted, names, source)
    return wanted


def _missing(what: str, wanted: str, names: Sequence[str], source: NamedSet) -> DataError:
    said = f"has no {what} {wanted!r}, only" if wanted else f"has several {what}s, choose one of"
    return DataError(
        f"{source.name}: {said} {', '.join(names) or 'none'}; accepted is {source.name}:"
        "CONFIGURATION:SPLIT, of which either may be left out where it is clear"
    )


def _tables_of(opened: OpenedSet, source: NamedSet) -> Tables:
    reader, split = opened.reader, opened.split
    if isinstance(reader, Path):
        return _saved_tables(reader)
    assert not isinstance(reader, HubFiles)
    found: Any
    is_csv = opened.unavailable is None and _is_csv(reader)
    if is_csv:
        _declare_texts(reader, split)
    if opened.unavailable is None and (source.is_directory or source.is_slice):
        found = reader.as_streaming_dataset(split)
    else:
        reader.download_and_prepare(_text_cache(reader) if is_csv else None)
        found = reader.as_dataset(split)
    return found.with_format("arrow").iter(BATCH)


def _text_files(opened: OpenedSet, source: NamedSet) -> Iterable[Path]:
    """Files of CSV or JSON that need no settings of `datasets`, which would guess their types."""
    from datasets.packaged_modules.json.json import Json

    reader: Any = opened.reader
    if isinstance(reader, HubFiles):
        return reader.paths(opened.split, is_cached=opened.unavailable is not None)
    is_text = source.is_directory and (isinstance(reader, Json) or _is_csv(reader))
    if not is_text or not _is_usual(reader):
        return ()
    files: Any = reader.config.data_files
    paths = [Path(name) for name in files.get(opened.split, ())]
    return paths if all(map(_is_of_rows, paths)) else ()


def _is_usual(reader: "DatasetBuilder") -> bool:
    """Whether nothing is set of how its files are read."""
    usual: dict[str, object] = vars(type(reader.config)())
    given: dict[str, object] = vars(reader.config)
    return all(given[name] == usual[name] for name in usual.keys() - _NOT_OF_FORM)


def _is_of_rows(path: Path) -> bool:
    """Whether it has CSV or JSON lines, or is an array."""
    if path.suffix == ".json":
        with path.open("rb") as file:
            return file.read(_START).lstrip().startswith(b"[")
    return path.name.endswith((".jsonl", ".jsonl.gz", *CSV))


def _is_csv(reader: object) -> bool:
    from datasets.packaged_modules.csv.csv import Csv

    return isinstance(reader, Csv) or f"/{_TEXTS}/" in str(getattr(reader, "cache_dir", ""))


def _declare_texts(reader: "DatasetBuilder", split: str) -> None:
    """Have columns of CSV read as they are written; `datasets` would guess their types."""
    from datasets import Features, Value

    config, stream = cast(Any, reader.config), cast(Any, reader.as_streaming_dataset(split))
    first = next(iter(stream.with_format("arrow").iter(1)))
    texts = Features({name: Value("string") for name in first.column_names})
    config.features = reader.info.features = texts
    config.na_filter = False


def _text_cache(reader: "DatasetBuilder") -> str:
    """Where CSV as text is cached: others find what they expect in the place of `datasets`."""
    from datasets import config

    inside = Path(reader.cache_dir).relative_to(config.HF_DATASETS_CACHE)
    return str(Path(config.HF_DATASETS_CACHE, _TEXTS, inside))


def _unreadable_sets() -> tuple[type[Exception], ...]:
    from datasets.exceptions import DatasetsError

    return (*UNREADABLE, DatasetsError)


def _checked_revision(source: NamedSet) -> str:
    """A set's commit, the latest if none is asked for, whose cards are checked.

    Raises:
        DataError: As `_check_cards`.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    name = source.name
    revision = str(HfApi().dataset_info(name, revision=source.revision).sha)
    cards: list[Path] = []
    for card in _CARDS:
        try:
            found = hf_hub_download(name, card, repo_type="dataset", revision=revision)
            cards.append(Path(found))
        except LocalEntryNotFoundError:  # The Hub does not answer any more.
            raise
        except EntryNotFoundError:
            continue
    _check_cards(name, cards)
    return revision


def _check_cards(source: str, cards: Iterable[Path]) -> None:
    """Refuse configurations that name files outside of the set.

    `datasets` refuses others too, but asks other hosts and searches this machine's disks first.

    Raises:
        DataError: They name others.
    """
    import yaml

    for path in cards:
        if not path.is_file():
            continue
        try:
            for text in _files_named(_described(path)):
                if not _is_own(text, source):
                    raise DataError(
                        f"{source}: its {path.name} names the data file {shown(text)}; accepted: "
                        "paths in its own repository"
                    )
        except (yaml.YAMLError, RecursionError) as error:
            raise DataError(f"{source}: its {path.name} is no YAML: {first_line(error)}") from error


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


def _why_unavailable(source: str) -> HubError | None:
    """Why a set cannot be had from the Hub; None if it can."""
    try:
        check_repository("dataset", source)
    except HubError as error:
        return error
    return None


def _cached_set(source: NamedSet, option: str, split: str, unavailable: HubError) -> OpenedSet:
    """A set as it was when it was last loaded.

    Raises:
        DataError: It was never loaded here, or in several configurations, or the last time in
            another revision than the one that is wanted.
    """
    from datasets import config

    cache = config.HF_DATASETS_CACHE
    try:
        if _record_of(source).is_file():
            files = _recorded(source)
            return OpenedSet(files, _split_of(source, split, [*files.splits]), unavailable)
        try:
            cached = _cached(source, Path(cache, _TEXTS))
        except (OSError, ValueError):
            cached = _cached(source, Path(cache))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{option}: {source.name!r} is neither a data file nor a directory, it cannot be had "
            f"from the cache in {cache} ({first_line(error)}), and "
            f"{unavailable}; accepted: files whose names end in {', '.join(FILE_TYPES)}, a set "
            "that is in the cache, and with a network one on the Hub (HF_ENDPOINT for a mirror)"
        ) from error
    splits = [str(each) for each in cached.info.splits or ()]
    return OpenedSet(cached, _split_of(source, split, splits), unavailable)


def _cached(source: NamedSet, cache: Path) -> "DatasetBuilder":
    """A set in a cache of `datasets`.

    Raises:
        OSError, ValueError: It is not there, or in another revision.
    """
    from datasets.packaged_modules.cache.cache import Cache

    cached = Cache(
        cache_dir=str(cache),
        repo_id=source.name,
        dataset_name=source.name.rpartition("/")[2],
        config_name=source.configuration or None,
        version="auto",
        hash="auto",
    )
    if source.revision not in (None, cached.hash):
        raise ValueError(f"it has revision {cached.hash}")
    return cached

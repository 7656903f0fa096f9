"""Rows of data sets: directories of `datasets` or in the layout of the Hub, and sets of the Hub.

`datasets` finds the files of a configuration and split, by the set's card or its layout; their rows
are read like those of other files (`es_cookbook.rl.data.files`), so no type is guessed. A file of
the Hub is fetched into its cache when its rows are read. If the Hub does not answer, the files of
the last time are read from the cache. A card comes from a stranger: it may only name files of its
own set, and code in a set is never run.
"""

import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, cast

from es_cookbook.common.errors import DataError, HubError, first_line
from es_cookbook.plugins.hub.client import FIRST_SECONDS, asking
from es_cookbook.rl.data.files import FILE_TYPES, UNREADABLE, file_rows, reading
from es_cookbook.rl.data.rows import Row, shown
from es_cookbook.rl.data.sources import NamedSet

_logger = logging.getLogger(__name__)

_CARDS = ("README.md", ".huggingface.yaml")
_SAVED, _SEVERAL = "state.json", "dataset_dict.json"
"""Files that mark a directory of `save_to_disk`, with one split and with several."""
_NOT_OF_FORM = {"name", "version", "data_dir", "data_files", "description"}
"""Settings of a configuration that do not change how its files are read."""
_MOST_NODES = 100_000
"""Values in a card: YAML may refer to itself and double with each line."""


_Splits: TypeAlias = Mapping[str, Sequence[str]]
"""Split -> paths of its files, in the repository or on this machine."""


def open_set(source: NamedSet) -> Iterator[Row]:
    """Find a set, and return an iterator over its rows, which reads them.

    Raises:
        DataError: The set, configuration or split does not exist.
    """
    if source.is_directory:
        files = _saved(source) or _of_split(source, _resolved(source, None))
        return _rows(source, files)
    try:
        with asking(f"dataset {source.name}"):
            revision = _checked_revision(source)
    except HubError as error:
        is_cached = True
        revision, splits = _recorded(source, error)
        _logger.warning("%s: %s is read from the cache: %s", source.option, source.name, error)
    else:
        is_cached = False
        splits = _resolved(source, revision)
    paths = _of_split(source, splits)
    if not is_cached:
        _record(source, revision, splits)
    return _rows(source, _fetched(source, revision, paths, is_cached))


def _rows(source: NamedSet, paths: Iterable[str | Path]) -> Iterator[Row]:
    with reading(source.name, _unreadable_sets):
        number = 0
        for path in paths:
            for row in file_rows(Path(path)):
                number += 1
                where = f"{source.name} [{source.split}], row {number}"
                yield dataclasses.replace(row, where=where)


def _fetched(
    source: NamedSet, revision: str, paths: Sequence[str], is_cached: bool
) -> Iterator[str]:
    """Yield files in the Hub's cache; each is fetched when it is needed, unless it is there."""
    from huggingface_hub import hf_hub_download

    for path in paths:
        with asking(f"dataset {source.name}"):
            file = hf_hub_download(
                source.name,
                path,
                repo_type="dataset",
                revision=revision,
                local_files_only=is_cached,
            )
        yield file


def _saved(source: NamedSet) -> Sequence[Path]:
    """Return the files of a directory of `save_to_disk`; none for other directories."""
    path = Path(source.name)
    if (path / _SEVERAL).is_file():
        splits = [each.parent.name for each in sorted(path.glob(f"*/{_SAVED}"))]
        split = source.configuration or source.split
        if split not in splits:
            raise _missing("split", split, splits, source)
        path = path / split
    return sorted(path.glob("data-*.arrow")) if (path / _SAVED).is_file() else ()


def _resolved(source: NamedSet, revision: str | None) -> _Splits:
    """Find the files of a configuration, by the set's card or its layout."""
    import datasets  # Slow to import, and generated problems do not need it.

    path = source.name if revision else str(Path(source.name).absolute())
    with reading(source.name, _unreadable_sets):
        if revision is None:
            _check_cards(source.name, [Path(source.name, name) for name in _CARDS])
        try:
            builder: Any = datasets.load_dataset_builder(
                path, source.configuration or None, revision=revision
            )
        except ValueError:
            names = datasets.get_dataset_config_names(path, revision=revision)
            if source.configuration in names or (not source.configuration and len(names) == 1):
                raise
            raise _missing("configuration", source.configuration, names, source) from None
    settings, usual = vars(builder.config), vars(type(builder.config)())
    names = sorted(usual.keys() - _NOT_OF_FORM)
    unusual = [name for name in names if settings[name] != usual[name]]
    if unusual:
        raise DataError(
            f"{source.name}: its card sets {', '.join(unusual)}, with which its files cannot be "
            "read here; save its rows as JSON lines or Parquet"
        )
    prefix = f"hf://datasets/{source.name}@{revision}/"
    return {
        str(split): [str(file).removeprefix(prefix) for file in files]
        for split, files in (builder.config.data_files or {}).items()
    }


def _of_split(source: NamedSet, splits: _Splits) -> Sequence[str]:
    """Return the files of the wanted split.

    Raises:
        DataError: The split does not exist, or its files have an unsupported type.
    """
    if source.split not in splits:
        raise _missing("split", source.split, list(splits), source)
    files = splits[source.split]
    for file in files:
        if not file.endswith(FILE_TYPES) or "://" in file:
            raise DataError(
                f"{source.name}: has the data file {shown(file)}; accepted are files of the set "
                f"whose names end in {', '.join(FILE_TYPES)}"
            )
    return files


def _missing(what: str, wanted: str, names: Sequence[str], source: NamedSet) -> DataError:
    found = f"has no {what} {wanted!r}, only" if wanted else f"has several {what}s, choose one of"
    return DataError(
        f"{source.name}: {found} {', '.join(names) or 'none'}; accepted is {source.name}:"
        "CONFIGURATION:SPLIT, of which either may be left out where it is clear"
    )


def _unreadable_sets() -> tuple[type[Exception], ...]:
    from datasets.exceptions import DatasetsError

    return (*UNREADABLE, DatasetsError, RuntimeError)  # RuntimeError: a set that is a script.


def _record_of(source: NamedSet) -> Path:
    """Return the path of the file that lists a set's files when it was last opened."""
    from datasets import config

    name = f"{source.name.replace('/', '___')}:{source.configuration}.json"
    return Path(config.HF_DATASETS_CACHE, "es_cookbook", name)


def _record(source: NamedSet, revision: str, splits: _Splits) -> None:
    path = _record_of(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps([revision, splits]), encoding="utf-8")
    beside.replace(path)


def _recorded(source: NamedSet, unavailable: HubError) -> tuple[str, _Splits]:
    """Return the revision and files of a set that was opened before.

    Raises:
        DataError: It was never opened, or in another revision.
    """
    why = "it is not there"
    with contextlib.suppress(OSError, ValueError):
        revision, splits = json.loads(_record_of(source).read_bytes())
        if source.revision in (None, revision):
            return revision, splits
        why = f"it has revision {revision}"
    raise DataError(
        f"{source.option}: {source.name!r} is neither a data file nor a directory, it cannot be "
        f"read from the cache ({why}), and {unavailable}; accepted: files whose names end in "
        f"{', '.join(FILE_TYPES)}, a set that is in the cache, and with a network one on the Hub "
        "(HF_ENDPOINT for a mirror)"
    )


def _checked_revision(source: NamedSet) -> str:
    """Return the commit of a set, the latest by default; its cards are checked.

    Raises:
        DataError: As `_check_cards`.
    """
    from huggingface_hub import HfApi, hf_hub_download

    about = HfApi().dataset_info(source.name, revision=source.revision, timeout=FIRST_SECONDS)
    there = {file.rfilename for file in about.siblings or []}
    cards = [
        Path(hf_hub_download(source.name, card, repo_type="dataset", revision=about.sha))
        for card in _CARDS
        if card in there
    ]
    _check_cards(source.name, cards)
    return str(about.sha)


def _check_cards(source: str, cards: Iterable[Path]) -> None:
    """Refuse configurations that name files outside the set.

    `datasets` refuses them too, but only after asking other hosts and searching local disks.

    Raises:
        DataError: They name others.
    """
    import yaml

    for path in cards:
        if not path.is_file():
            continue
        try:
            nodes = list(islice(_nodes(_described(path), False), _MOST_NODES + 1))
            if len(nodes) > _MOST_NODES:
                raise ValueError(f"it holds more than {_MOST_NODES} values")
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise DataError(f"{source}: its {path.name}: {first_line(error)}") from error
        for name, is_file in nodes:
            if is_file and isinstance(name, str) and not _is_own(name):
                raise DataError(
                    f"{source}: its {path.name} names the data file {shown(name)}; accepted: "
                    "paths in its own repository"
                )


def _described(path: Path) -> object:
    import yaml
    from huggingface_hub import DatasetCard

    if path.suffix == ".md":
        return DatasetCard.load(path).data.to_dict()
    return yaml.safe_load(path.read_bytes())


def _nodes(value: object, is_file: bool) -> Iterator[tuple[object, bool]]:
    """Yield all values, and for each whether it is below `data_files` or `data_dir`."""
    yield value, is_file
    if isinstance(value, dict):
        for key, each in cast("dict[object, object]", value).items():
            yield from _nodes(each, is_file or key in ("data_files", "data_dir"))
    elif isinstance(value, list):
        for each in cast("list[object]", value):
            yield from _nodes(each, is_file)


def _is_own(text: str) -> bool:
    """Return whether a pattern of a set's files stays in its repository."""
    return not re.match(r"[/\\~]|\w+:", text) and "::" not in text and ".." not in text.split("/")

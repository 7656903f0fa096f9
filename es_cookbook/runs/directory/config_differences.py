"""Which fields differ between the Config that a run recorded and the one that it is given now."""

import json
from collections.abc import Collection
from typing import cast

from es_cookbook.common.configs import FORMAT, config_from_json, config_to_json, trust_of
from es_cookbook.common.errors import ConfigError

_MOST_CHARACTERS = 2**21
"""Of all paths together; a Config has some thousands."""


def differences(recorded: str, now: str, may_differ: Collection[str]) -> list[str]:
    """Every field that differs between two Configs as text, in words.

    Fields that the recorded one's classes have gained since have their defaults. `may_differ` are
    dotted paths that do not count, with everything under them. The recorded one may come from a
    stranger; `now` is of this process, and what it names is trusted.

    Raises:
        ValueError: The recorded text is not JSON.
    """
    old = flattened(json.loads(_with_new_fields(recorded, trust_of(now))))
    new = flattened(json.loads(now))
    found: list[str] = []
    explained = list(may_differ)
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) == new.get(path) and (path in old) == (path in new):
            continue
        parents = tuple(start + end for start in explained for end in ".[")
        if path in explained or "" in explained or path.startswith(parents):
            continue
        found.append(f"{path or 'Config'} was {_show(old, path)}, is {_show(new, path)}")
        explained.append(path)  # Another class at `engine` explains all of its fields.
    return found


def _with_new_fields(recorded: str, trust: Collection[str]) -> str:
    try:
        return config_to_json(config_from_json(recorded, trust))
    except ConfigError:
        return recorded


def flattened(value: object) -> dict[str, object]:
    """Every leaf of a JSON value by dotted path; a `$class` stands at its object's own path.

    The version of the format is left out.

    Raises:
        ValueError: The paths are longer, all together, than any config's.
    """
    flat: dict[str, object] = {}
    waiting, room = [("", value)], _MOST_CHARACTERS
    while waiting:
        path, found = waiting.pop()
        size = len(cast("list[object]", found)) if isinstance(found, dict | list) else 0
        if (room := room - size * (len(path) + 1)) < 0:  # Before the paths are made.
            raise ValueError("it has more fields, or longer names of fields, than a config")
        inner: list[tuple[str, object]] = []
        if isinstance(found, dict):
            for key, entry in cast("dict[str, object]", found).items():
                if key == FORMAT:
                    continue
                named = path if key.startswith("$") else f"{path}.{key}".removeprefix(".")
                inner.append((named, entry))
        elif isinstance(found, list):
            inner = [(f"{path}[{i}]", item) for i, item in enumerate(cast("list[object]", found))]
        if not inner:
            flat[path] = found
        waiting += reversed(inner)
    return flat


def _show(flat: dict[str, object], path: str) -> str:
    return json.dumps(flat[path]) if path in flat else "not there"

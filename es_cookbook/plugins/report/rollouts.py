"""Recorded rollouts as columns of numbers and tables of texts, small enough for a page.

A column compresses far better than the same numbers line by line. Each text is stored once; an
index of 0 means "the next new text", so a column of new texts is all zeros. If everything together
is too large for the page, the longest texts lose their middle, whose length is kept. No rollout is
dropped because of its texts.

    table = RolloutTable()
    table.add(0, rollout)             # a line of rollouts.jsonl, of run 0
    table.compressed(3_000_000)       # gzip, at most so many bytes
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

LONGEST = 20_000
"""Characters kept of a text; the files of a run have no longer ones."""
_MOST_CHARS = 40_000_000
"""Bounds the memory for all texts together; after these, little of a text is kept."""
_LITTLE = 200
_LEVEL = 6
_WHICH = ("generation", "problem", "genome", "attempt")
_ROLLOUT = ("run", *_WHICH, "reward", "tags", "lost", "turns")
_TURN = ("kind", "seen", "action", "stop", "turn_reward", "metrics")


class RolloutTable:
    """Collects lines of `rollouts.jsonl`; fields of unexpected types are left out."""

    def __init__(self) -> None:
        self._columns: dict[str, list[object]] = {name: [] for name in (*_ROLLOUT, *_TURN)}
        self._texts = {name: _Texts(_MOST_CHARS // 3) for name in ("seen", "action", "other")}
        self._parts: list[object] = []
        self._part_numbers: dict[str, int] = {}
        self._logs: dict[str, list[tuple[str, int]]] = {}

    def __len__(self) -> int:
        return len(self._columns["run"])

    def add(self, run: int, rollout: Mapping[str, object]) -> None:
        turns = [_dict(turn) for turn in _list(rollout.get("turns"))]
        lost = rollout.get("lost")
        self._add_row(
            run=run,
            **{name: _count(rollout.get(name)) for name in _WHICH},
            reward=_number(rollout.get("reward")),
            tags=self._part([_name(tag) for tag in _list(rollout.get("tags"))]),
            lost=self._texts["other"].number(lost) if isinstance(lost, str) else -1,
            turns=len(turns),
        )
        self._add_logs(f"rollout {len(self) - 1}", rollout.get("group_logs"))
        for turn in turns:
            self._add_turn(turn)

    def _add_turn(self, turn: Mapping[object, object]) -> None:
        kind = "prompt" if "prompt" in turn else "added"
        metrics = _dict(turn.get("metrics")).items()
        self._add_row(
            kind=int(kind == "added"),
            seen=self._texts["seen"].number(_str(turn.get(kind))),
            action=self._texts["action"].number(_str(turn.get("action"))),
            stop=self._part(_name(turn.get("stop_reason"))),
            turn_reward=_number(turn.get("reward")),
            metrics=self._part({_name(key): _number(value) for key, value in metrics}),
        )
        self._add_logs(f"turn {len(self._columns['kind']) - 1}", turn.get("logs"))

    def _add_row(self, **row: object) -> None:
        for name, value in row.items():
            self._columns[name].append(value)

    def _add_logs(self, of: str, logs: object) -> None:
        texts = self._texts["other"]
        found = [(_name(key), texts.number(_str(text))) for key, text in _dict(logs).items()]
        if found:
            self._logs[of] = found

    def _part(self, value: object) -> int:
        number = self._part_numbers.setdefault(repr(value), len(self._parts))
        if number == len(self._parts):
            self._parts.append(value)
        return number

    def compressed(self, most_bytes: int) -> tuple[bytes, int | None]:
        """Return everything as gzipped JSON of at most `most_bytes`, if the numbers fit.

        Returns:
            The data, and the number of characters to which texts were cut; None if none was.
        """
        columns = dict(self._columns)
        for name in ("seen", "action"):
            columns[name] = _back_references(cast("list[int]", columns[name]))
        head = {"columns": columns, "parts": self._parts, "logs": self._logs}
        longest = max(texts.longest for texts in self._texts.values())
        limit, data = LONGEST, self._packed(head, LONGEST)
        while len(data) > most_bytes and limit:
            limit = int(min(limit, longest) * min(0.75, most_bytes / len(data)))
            data = self._packed(head, limit)
        is_cut = limit < LONGEST or any(texts.is_cut for texts in self._texts.values())
        return data, limit if is_cut else None

    def _packed(self, head: Mapping[str, object], limit: int) -> bytes:
        texts = {name: table.plain(limit) for name, table in self._texts.items()}
        return compressed_json({**head, "texts": texts})


_Cut: TypeAlias = tuple[str, int, str]
"""The start of a text, the number of characters missing after it, and its end."""


class _Texts:
    """Texts in the order in which they came first, each once; long ones without their middle."""

    def __init__(self, most_chars: int) -> None:
        self._room = most_chars
        self._numbers: dict[_Cut, int] = {}

    def number(self, text: str) -> int:
        found = _cut((text, 0, ""), LONGEST if self._room > 0 else _LITTLE)
        if found not in self._numbers:
            self._room -= _length(found)
        return self._numbers.setdefault(found, len(self._numbers))

    @property
    def longest(self) -> int:
        """Characters of the longest."""
        return max(map(_length, self._numbers), default=0)

    @property
    def is_cut(self) -> bool:
        """Whether one of them is without its middle."""
        return any(missing for _, missing, _ in self._numbers)

    def plain(self, limit: int) -> list[object]:
        """Return each as text or, if it is cut, as [start, missing, end]."""
        cut = (_cut(text, limit) for text in self._numbers)
        return [list(each) if each[1] else each[0] for each in cut]


def _length(text: _Cut) -> int:
    return len(text[0]) + len(text[2])


def _cut(text: _Cut, limit: int) -> _Cut:
    """Cut a text to `limit` characters: two thirds from the start, the rest from the end."""
    start, missing, end = text
    if _length(text) <= limit:
        return text
    before = 2 * limit // 3
    last = end if missing else start
    return start[:before], missing + _length(text) - limit, last[len(last) - (limit - before) :]


def compressed_json(value: object) -> bytes:
    """Return gzipped JSON in UTF-8; unpaired surrogates are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode("utf-8", "backslashreplace"), _LEVEL, mtime=0)


def _back_references(numbers: Sequence[int]) -> list[object]:
    """Return 0 for each number that is the next new one, else the number plus 1."""
    found: list[object] = []
    new = 0
    for number in numbers:
        found.append(0 if number == new else number + 1)
        new += number == new
    return found


def _dict(value: object) -> dict[object, object]:
    return cast("dict[object, object]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _str(value: object) -> str:
    return value if isinstance(value, str) else ""


def _name(value: object) -> str:
    return _str(value)[:200]


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**31 else -1


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return int(value) if value == int(value) else float(f"{value:.6g}")

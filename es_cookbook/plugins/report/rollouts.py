"""The rollouts of runs as columns of numbers and tables of texts, small enough for a page.

A column compresses far better than the same numbers line by line. A text that occurs again is
stored once, and an index of 0 stands for "the next new text", so that a column of new texts is all
zeros. Texts have no end, and a page has: where everything together would be too large, the longest
texts lose their middle, which is counted. No rollout is left out because of its text.

    table = RolloutTable()
    table.add(0, rollout)             # lines of rollouts.jsonl, of run 0
    table.compressed(3_000_000)       # gzip, of at most so many bytes
"""

import dataclasses
import gzip
import json
from collections.abc import Mapping, Sequence
from typing import cast

LONGEST = 20_000
"""Characters of a text that are kept at most; a run's own files have no longer ones."""
_MOST_CHARS = 40_000_000
"""Of all texts together, so that memory and compression have an end."""
_LEVEL = 6
_WHICH = ("generation", "problem", "genome", "attempt")
_ROLLOUT = ("run", *_WHICH, "reward", "tags", "lost", "turns")
_TURN = ("kind", "seen", "action", "stop", "turn_reward", "metrics")


class RolloutTable:
    """Takes lines of `rollouts.jsonl`, which may hold anything: only what is in place counts."""

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
            {
                "run": run,
                **{name: _count(rollout.get(name)) for name in _WHICH},
                "reward": _number(rollout.get("reward")),
                "tags": self._part([_name(tag) for tag in _list(rollout.get("tags"))]),
                "lost": self._texts["other"].number(lost) if isinstance(lost, str) else -1,
                "turns": len(turns),
            }
        )
        self._add_logs(f"rollout {len(self) - 1}", rollout.get("group_logs"))
        for turn in turns:
            self._add_turn(turn)

    def _add_turn(self, turn: Mapping[object, object]) -> None:
        kind = "prompt" if "prompt" in turn else "added"
        metrics = _dict(turn.get("metrics")).items()
        self._add_row(
            {
                "kind": int(kind == "added"),
                "seen": self._texts["seen"].number(_str(turn.get(kind))),
                "action": self._texts["action"].number(_str(turn.get("action"))),
                "stop": self._part(_name(turn.get("stop_reason"))),
                "turn_reward": _number(turn.get("reward")),
                "metrics": self._part({_name(key): _number(value) for key, value in metrics}),
            }
        )
        self._add_logs(f"turn {len(self._columns['kind']) - 1}", turn.get("logs"))

    def _add_row(self, row: Mapping[str, object]) -> None:
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
        """Everything as gzipped JSON, larger than `most_bytes` only where numbers alone are.

        The longest texts are cut as far as that takes: returns to how many characters, too, or
        None if none was.
        """
        columns = dict(self._columns)
        for name in ("seen", "action"):
            columns[name] = _back_references(cast("list[int]", columns[name]))
        head = {"columns": columns, "parts": self._parts, "logs": self._logs}
        limit = min(texts.longest for texts in self._texts.values())
        data = self._packed(head, limit)
        while len(data) > most_bytes and limit:
            longest = max(texts.length for texts in self._texts.values())
            limit = int(min(limit, longest) * min(0.75, most_bytes / len(data)))
            data = self._packed(head, limit)
        is_cut = limit < LONGEST or any(texts.is_cut for texts in self._texts.values())
        return data, limit if is_cut else None

    def _packed(self, head: Mapping[str, object], limit: int) -> bytes:
        texts = {name: table.plain(limit) for name, table in self._texts.items()}
        return compressed_json({**head, "texts": texts})


class _Texts:
    """Texts in the order in which they came first, each once; long ones without their middle.

    `longest` is halved whenever all together are more than `most_chars`.
    """

    def __init__(self, most_chars: int) -> None:
        self.longest = LONGEST
        self._most_chars = most_chars
        self._num_chars = 0
        self._numbers: dict[_Text, int] = {}
        self._texts: list[_Text] = []

    def number(self, text: str) -> int:
        found = _Text(text).cut(self.longest)
        number = self._numbers.setdefault(found, len(self._texts))
        if number == len(self._texts):
            self._texts.append(found)
            self._num_chars += len(found)
            if self._num_chars > self._most_chars:
                self._halve()
        return number

    def _halve(self) -> None:
        self.longest //= 2
        self._texts = [text.cut(self.longest) for text in self._texts]
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._num_chars = sum(map(len, self._texts))

    @property
    def length(self) -> int:
        """Characters of the longest."""
        return max(map(len, self._texts), default=0)

    @property
    def is_cut(self) -> bool:
        """Whether one of them is without its middle."""
        return any(text.missing for text in self._texts)

    def plain(self, limit: int) -> list[object]:
        """Each as text or, where it is cut, as its start, how many are missing, and its end."""
        return [text.cut(limit).plain for text in self._texts]


@dataclasses.dataclass(frozen=True, slots=True)
class _Text:
    start: str
    missing: int = 0
    end: str = ""

    def __len__(self) -> int:
        return len(self.start) + len(self.end)

    def cut(self, limit: int) -> "_Text":
        """At most `limit` characters of it: two thirds from the start, since answers end it."""
        if len(self) <= limit:
            return self
        before = 2 * limit // 3
        last = self.end if self.missing else self.start
        return _Text(
            self.start[:before],
            self.missing + len(self) - limit,
            last[len(last) - (limit - before) :],
        )

    @property
    def plain(self) -> object:
        return [self.start, self.missing, self.end] if self.missing else self.start


def compressed_json(value: object) -> bytes:
    """JSON in UTF-8, gzipped; half of a surrogate pair, which UTF-8 has not, is an escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode("utf-8", "backslashreplace"), _LEVEL, mtime=0)


def _back_references(numbers: Sequence[int]) -> list[object]:
    """0 where a number is the next new one, else 1 more than it."""
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

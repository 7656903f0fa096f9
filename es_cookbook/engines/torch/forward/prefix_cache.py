"""Keys and values of answers given, from which an Env's next turn goes on.

The prompt of a rollout's second turn begins with its first turn's prompt and action. What the
model kept of those tokens is kept here when a request ends, by the genome and the tokens, and
copied back into the slot of a request of the same genome that begins with the same tokens; only the
rest is prefilled. A token's keys and values have the same bits however they were made (on the CPU,
in float32: see `attention`), so answers are the same with this cache and without it, whatever it
has let go of.

It holds a bounded number of bytes, and lets go first of what was not used for longest. Nothing
survives a change of the weights, genomes included.

Left out: sharing. Requests that begin alike keep a copy each, since the copies of one turn are
replaced by those of the next, and a copy is cheap beside the forward pass that it saves.
"""

import bisect
import threading
from collections.abc import Hashable, Mapping
from typing import TypeAlias

import torch

LayerStates: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys (kv heads, d, tokens) and values (kv heads, tokens, d) of one request in one layer."""
States: TypeAlias = Mapping[int, LayerStates]
"""Of every layer, by its index."""
_Key: TypeAlias = tuple[Hashable, tuple[int, ...]]


class PrefixCache:
    """What was kept of requests that ended. Thread-safe: all lanes share it.

    Args:
        max_bytes: of the keys and values that it holds.

    Attributes:
        version: of the weights; what was computed with others is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.version = 0
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._states: dict[_Key, States] = {}  # the one used last comes last
        # Sorted, so that what has the most tokens in common with a prompt is beside its place.
        self._tokens: dict[Hashable, list[tuple[int, ...]]] = {}

    def clear(self) -> None:
        """Let go of everything: the weights change."""
        with self._lock:
            self.version += 1
            self._bytes = 0
            self._states.clear()
            self._tokens.clear()

    def find(self, who: Hashable, prompt_T: tuple[int, ...]) -> tuple[int, States]:
        """Of how many first tokens of a prompt, all but its last at most, something is kept; what.

        It may be of more tokens than that.
        """
        with self._lock:
            kept = self._tokens.get(who, [])
            place = bisect.bisect_left(kept, prompt_T)
            beside = kept[max(0, place - 1) : place + 1]
            common = [_num_common(tokens, prompt_T) for tokens in beside]
            length = min(max(common, default=0), len(prompt_T) - 1)
            if length == 0:
                return 0, {}
            key = who, beside[common.index(max(common))]
            states = self._states[key] = self._states.pop(key)
            return length, states

    def put(self, who: Hashable, tokens_T: tuple[int, ...], states: States, version: int) -> None:
        """Keep what was computed, with the weights of a version, of these tokens of a request."""
        num_bytes = _num_bytes(states)
        with self._lock:
            if version != self.version or num_bytes > self._max_bytes:
                return
            kept = self._tokens.setdefault(who, [])
            place = bisect.bisect_left(kept, tokens_T)
            if place < len(kept) and kept[place][: len(tokens_T)] == tokens_T:
                return  # there is as much, or more
            kept.insert(place, tokens_T)
            self._states[who, tokens_T] = states
            self._bytes += num_bytes
            if place and tokens_T[: len(kept[place - 1])] == kept[place - 1]:
                self._drop((who, kept[place - 1]))  # the turn before
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._states)))

    def _drop(self, key: _Key) -> None:
        who, tokens_T = key
        self._bytes -= _num_bytes(self._states.pop(key))
        kept = self._tokens[who]
        del kept[bisect.bisect_left(kept, tokens_T)]
        if not kept:
            del self._tokens[who]


def _num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many tokens two sequences begin with alike."""
    least, most = 0, min(len(first), len(second))
    while least < most:  # comparing slices is faster than a loop over tokens
        middle = (least + most + 1) // 2
        if first[least:middle] == second[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _num_bytes(states: States) -> int:
    return sum(part.nbytes for pair in states.values() for part in pair)

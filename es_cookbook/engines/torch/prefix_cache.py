"""Allocates the blocks of the key-value cache, and shares common prefixes of prompts.

Common prefixes of one genome's requests are computed once. Every request's prompt is a path in a
tree per genome: a node is some tokens with which prompts continue, and the places of their keys and
values. A request takes the path that its prompt has in common with the tree, and blocks of its own
for the rest, which becomes a node itself; where it leaves a node in the middle, the node is split
in two. Nothing is copied: what a request reads lies in runs, those of the path and its own, and a
run may end or begin within a block. This covers few-shot examples, problems that begin alike,
attempts at one problem, and a rollout's next turn, which begins with its last one.

A node that several requests had in common, or that a next turn may begin with, stays after they
have ended, until the weights change or there is no room: the least recently used one is evicted
first. All others are freed with their request. A block is free once neither a request nor a node
has it, so requests continue even if nodes that they read leave the tree.

Other lanes share what a lane computes once it is done; until then they compute it themselves, so
that no lane waits for another. A token's keys and values have the same bits however they were made
(on the CPU: see `attention`), so answers do not depend on what is shared or was dropped.
"""

import dataclasses
import heapq
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence

from es_cookbook.engines.torch.attention import Run, TokenCache
from es_cookbook.engines.torch.kernels.attention import STEP
from es_cookbook.engines.torch.slots import Work


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
    """Tokens with which sequences continue.

    Attributes:
        target: target that they belong to.
        first: position of the first token; `runs` say where they lie.
        blocks: blocks in which they lie.
        parent: node before this one; None for the root, which has no tokens.
        owner: the lane that computes them, until they are there.
        children: children by first token and owner.
        stays: when no request reads it.
        gone: it has left the tree.
    """

    target: Hashable
    tokens_T: tuple[int, ...] = ()
    first: int = 0
    runs: tuple[Run, ...] = ()
    blocks: list[int] = dataclasses.field(default_factory=list)
    parent: "_Node | None" = None
    owner: object = None
    children: dict[tuple[int, object], "_Node"] = dataclasses.field(default_factory=dict)
    stays: bool = False
    gone: bool = False

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + len(self.tokens_T)

    @property
    def key(self) -> tuple[int, object]:
        """Its key among its parent's children."""
        return self.tokens_T[0], self.owner


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """A request's part of the cache.

    Attributes:
        first: number of its tokens that are known, or will be before the others are run.
        runs: runs in which it lies, with the tokens to be sampled.
        blocks: all blocks that it reads and writes.
        node: last node of its prompt; None if it shares nothing.
    """

    first: int
    runs: tuple[Run, ...]
    blocks: list[int]
    node: _Node | None


class PrefixCache:
    """Blocks of a cache, and the tokens kept in them. Thread-safe: all lanes share it.

    Args:
        max_idle: most blocks that no request reads; at 0 nothing is shared.

    Attributes:
        cache: the cache whose blocks these are.
        version: version of the weights; a request that came before it changed shares nothing.
    """

    def __init__(self, cache: TokenCache, max_idle: int) -> None:
        self.version = 0
        self.cache, self._max_idle = cache, max_idle
        self._lock = threading.Lock()
        self._free: list[int] = []  # the lowest first, so that neighbours are taken together
        self._num_taken = 0  # blocks of requests or of nodes
        self._num_read = 0  # those of requests
        self._readers, self._keepers = [0], [0]  # by block: how many requests, and nodes, have it
        self._roots: dict[Hashable, _Node] = {}
        self._stay: dict[_Node, None] = {}  # the one used last comes last, none before its children

    def clear(self, which: Callable[[Hashable], bool] = lambda _: True) -> None:
        """Drop all that is kept of some targets: their weights change."""
        with self._lock:
            self.version += 1
            for target in filter(which, list(self._roots)):
                self._remove(self._roots.pop(target))

    def take(self, work: Work, owner: object) -> Lease | None:
        """Take blocks for a request whose new tokens `owner` computes; None if there is no room."""
        tokens_T, end = work.sequence, work.num_prompt - 1  # the last one predicts the next token
        with self._lock:
            node: _Node | None = None
            path: list[_Node] = []
            if self._max_idle and work.version == self.version:
                target = work.request.target
                root = self._roots.setdefault(target, _Node(target))
                path = self._find(root, tokens_T, end, owner)
                node = path[-1] if path else root
            first = path[-1].end if path else 0
            runs = [run for each in path for run in each.runs]
            blocks = _blocks(_merged(runs), 0, first)
            self._read(blocks)  # before others are let go of
            own = self._allocate(-(-(work.length - first) // STEP))
            if own is None:
                self._release(blocks)
                return None
            new = _merged([(first + i * STEP, (b - i) * STEP - first) for i, b in enumerate(own)])
            if node is not None and first < end:
                node = self._add(node, tokens_T[first:end], new, owner)
            return Lease(first, _merged([*runs, *new]), blocks + own, node)

    def computed(self, leases: Iterable[Lease], owner: object) -> None:
        """Publish the prompts of these requests, now that they are computed."""
        with self._lock:
            for lease in leases:
                node, path = lease.node, list[_Node]()
                while node is not None and node.owner is owner and not node.gone:
                    path.append(node)
                    node = node.parent
                for node in reversed(path):
                    self._publish(node)

    def give_back(self, lease: Lease, keep: tuple[int, ...] = ()) -> None:
        """End a request; these first tokens of its sequence, all computed, are kept."""
        with self._lock:
            node = lease.node
            if keep and node is not None and not node.gone:
                root = self._roots[node.target]
                path = self._find(root, keep, len(keep), None)
                last = path[-1] if path else root
                if last.end < len(keep):
                    last = self._add(last, keep[last.end :], lease.runs, None)
                self._use(last)
            self._release(lease.blocks)
            while node is not None and node.parent is not None and not node.gone:
                if node.children or (node.stays and node.owner is None):
                    break  # those that were not computed go as well
                self._remove(node)
                node = node.parent
            while self._num_taken - self._num_read > self._max_idle and self._let_go():
                pass

    def _find(self, root: _Node, tokens_T: tuple[int, ...], end: int, owner: object) -> list[_Node]:
        """Return the path of nodes that a sequence's first tokens have in common with the tree."""
        path: list[_Node] = []
        at, node = 0, root
        while at < end:
            known = node.children.get((tokens_T[at], None))
            child = known or node.children.get((tokens_T[at], owner))
            if child is None:
                break
            common = num_common(child.tokens_T, tokens_T[at:end])
            whole = common == len(child.tokens_T)
            node = child if whole else self._split(child, common)
            path.append(node)
            at += common
            if not whole:
                break
        if path:
            self._use(path[-1])
        return path

    def _use(self, node: _Node | None) -> None:
        """Mark a node and all before it as just used: they stay."""
        while node is not None and node.parent is not None:
            node.stays = True
            self._stay.pop(node, None)
            self._stay[node] = None
            node = node.parent

    def _add(
        self, parent: _Node, tokens_T: tuple[int, ...], runs: Sequence[Run], owner: object
    ) -> _Node:
        """Add a node after `parent` of tokens that lie in these runs."""
        first, end = parent.end, parent.end + len(tokens_T)
        lies = _within(runs, first, end)
        blocks = _blocks(lies, first, end)
        node = _Node(parent.target, tokens_T, first, lies, blocks, parent, owner)
        parent.children[node.key] = node
        for block in node.blocks:
            self._keepers[block] += 1
        return node

    def _split(self, node: _Node, length: int) -> _Node:
        """Split off the first tokens of a node as a new node before it, which is returned."""
        parent, before = node.parent, node.blocks
        assert parent is not None
        middle = self._add(parent, node.tokens_T[:length], node.runs, node.owner)
        node.runs = _within(node.runs, middle.end, node.end)
        node.tokens_T, node.first, node.parent = node.tokens_T[length:], middle.end, middle
        node.blocks = _blocks(node.runs, node.first, node.end)
        middle.children[node.key] = node
        for block in node.blocks:
            self._keepers[block] += 1
        self._forget(before)
        return middle

    def _publish(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        if (node.tokens_T[0], None) in parent.children:
            self._remove(node)  # another lane was faster; its readers go on
            return
        del parent.children[node.key]
        node.owner = None
        parent.children[node.key] = node

    def _remove(self, node: _Node) -> None:
        """Remove a node and all after it from the tree."""
        nodes = [node]
        if node.parent is not None:
            del node.parent.children[node.key]
        while nodes:
            node = nodes.pop()
            node.gone = True
            self._stay.pop(node, None)
            self._forget(node.blocks)
            nodes += node.children.values()

    def _let_go(self) -> bool:
        """Evict a node with a block that no request reads, if there is one."""
        for node in self._stay:
            if not node.children and not all(self._readers[block] for block in node.blocks):
                self._remove(node)
                return True
        return False

    def _allocate(self, number: int) -> list[int] | None:
        """Take `number` free blocks, in order, for reading; None if there are fewer."""
        while self._num_taken + number >= self.cache.num_blocks:
            if not self._let_go():
                return None
        blocks: list[int] = []
        for _ in range(number):
            if self._free:
                blocks.append(heapq.heappop(self._free))
            else:
                blocks.append(len(self._readers))
                self._readers.append(0)
                self._keepers.append(0)
        self.cache.num_reached = len(self._readers)
        self._num_taken += number
        self._read(blocks)
        return blocks

    def _read(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._num_read += not self._readers[block]
            self._readers[block] += 1

    def _release(self, blocks: Iterable[int]) -> None:
        """Undo `_read`."""
        for block in blocks:
            self._readers[block] -= 1
            self._num_read -= not self._readers[block]
            self._free_if_unused(block)

    def _forget(self, blocks: Iterable[int]) -> None:
        """Release a node's blocks."""
        for block in blocks:
            self._keepers[block] -= 1
            self._free_if_unused(block)

    def _free_if_unused(self, block: int) -> None:
        if not self._readers[block] and not self._keepers[block]:
            self._num_taken -= 1
            heapq.heappush(self._free, block)


def _merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Merge each run with the one before if it continues it."""
    merged: list[Run] = []
    for run in runs:
        if not merged or merged[-1][1] != run[1]:
            merged.append(run)
    return tuple(merged)


def _within(runs: Sequence[Run], first: int, end: int) -> tuple[Run, ...]:
    """Return the runs of the positions from `first` to one before `end`."""
    return tuple((begin, shift) for begin, _, shift in _pieces(runs, first, end))


def _blocks(runs: Sequence[Run], first: int, end: int) -> list[int]:
    """Return the blocks in which these positions lie, each once for a run."""
    return [
        block
        for begin, until, shift in _pieces(runs, first, end)
        for block in range((begin + shift) // STEP, (until - 1 + shift) // STEP + 1)
    ]


def _pieces(runs: Sequence[Run], first: int, end: int) -> list[tuple[int, int, int]]:
    """Return bounds of each run's positions in `first` ... `end` - 1, and the run's shift."""
    if len(runs) == 1 and first < end:  # nearly always
        return [(first, end, runs[0][1])]
    begins = [begin for begin, _ in runs]
    bounds = zip(runs, [*begins[1:], end], strict=False)
    cut = [(max(begin, first), min(until, end), shift) for (begin, shift), until in bounds]
    return [piece for piece in cut if piece[0] < piece[1]]


def num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the length of the common prefix of two sequences."""
    least, most = 0, min(len(first), len(second))
    while least < most:  # comparing slices is faster than a loop over tokens
        middle = (least + most + 1) // 2
        if first[least:middle] == second[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least

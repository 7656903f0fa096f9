"""What a run trains on, as digests: enough to say which problems of an evaluation are not held out.

A problem has a digest of its own content and, where it is known, of its prompt
(`EnvGroupBuilder.digests`). Two problems that share one are the same problem, however they are
asked.
"""

import dataclasses
from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"es_cookbook digests of training problems 1\n"
_DIGEST = np.dtype("<u8")


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedOn:
    """Digests of all problems that a run may train on, sorted, each once."""

    digests: NDArray[np.uint64]

    @staticmethod
    def of(digests_P: Iterable[tuple[int, ...]]) -> "TrainedOn | None":
        """Of each problem's digests; None where there is no problem, or one has none."""
        found = array("Q")
        for digests in digests_P:
            if not digests:
                return None
            found.extend(digests)
        return TrainedOn(np.unique(np.array(found, np.uint64))) if found else None

    def and_of(self, other: "TrainedOn") -> "TrainedOn":
        """All that the one or the other has."""
        return TrainedOn(np.union1d(self.digests, other.digests))

    def overlap(self, digests_P: Iterable[tuple[int, ...]]) -> int | None:
        """How many of some problems are among them; None where one has no digests."""
        count = 0
        for digests in digests_P:
            if not digests:
                return None
            count += any(map(self._has, digests))
        return count

    def _has(self, digest: int) -> bool:
        place = int(np.searchsorted(self.digests, np.uint64(digest)))
        return place < len(self.digests) and int(self.digests[place]) == digest

    def encode(self) -> bytes:
        """A line that says what it is, then 8 bytes for each digest, little end first, sorted."""
        return _MAGIC + self.digests.astype(_DIGEST).tobytes()

    @staticmethod
    def decode(data: bytes) -> "TrainedOn | None":
        """What `encode` made; None of anything else."""
        found = data.removeprefix(_MAGIC)
        if len(found) == len(data) or len(found) % _DIGEST.itemsize:
            return None
        return TrainedOn(np.frombuffer(found, _DIGEST).astype(np.uint64))

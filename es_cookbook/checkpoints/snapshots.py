"""A snapshot: the centre of one generation as a safetensors file, to begin a replay from.

It holds the selected parameters in float32 and says of which generation they are and what their
fingerprint is. A replay from it does to the bits what the rest of one from the base would do, so
an engine that cannot read it begins at the base, with the same result.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import safetensors
import torch

from es_cookbook.checkpoints.tensors import weight_files
from es_cookbook.common.errors import ESCookbookError, HistoryError
from es_cookbook.common.files import ANY_SIZE, check_file
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.exact import MODULUS, fingerprint_span
from es_cookbook.evolution.genome import Step

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A centre on the disk.

    Attributes:
        generation: it is the centre after so many generations.
        fingerprint: of the centre, as the file says.
        tensors: name -> float32 tensor, read when it is asked for.
    """

    path: Path
    generation: int
    fingerprint: int
    tensors: Mapping[str, torch.Tensor]

    def holds_what_it_says(self) -> bool:
        """Whether the tensors have the fingerprint; reads all of them."""
        if any(tensor.dtype != torch.float32 for tensor in self.tensors.values()):
            return False

        def fingerprint_of(name: str) -> int:
            return fingerprint_span(name, self.tensors[name].view(-1), 0)

        with ThreadPoolExecutor(num_cores()) as pool:
            return sum(pool.map(fingerprint_of, self.tensors)) % MODULUS == self.fingerprint


def metadata(generation: int, fingerprint: int) -> dict[str, str]:
    """What a snapshot's header says of it."""
    return {"generation": str(generation), "fingerprint": f"{fingerprint:x}"}


def read_snapshot(path: Path) -> Snapshot:
    """Open a snapshot; its tensors are not read yet.

    Raises:
        HistoryError: It cannot be read, or is no snapshot.
    """
    try:
        check_file(path, ANY_SIZE, path.parent.parent)
        with safetensors.safe_open(path, framework="pt") as file:  # pyright: ignore[reportUnknownVariableType]
            said = cast("dict[str, str]", file.metadata() or {})
        return Snapshot(
            path, int(said["generation"]), int(said["fingerprint"], 16), weight_files([path])
        )
    except KeyError as error:
        raise HistoryError(f"{path} is no snapshot: it does not say its {error.args[0]}") from error
    except (OSError, ValueError, safetensors.SafetensorError, ESCookbookError) as error:
        raise HistoryError(f"{path} cannot be read as a snapshot: {error}") from error


def restore_centre(centre: Centre, steps: Sequence[Step], snapshot: Path | None) -> int:
    """Set a centre to the base moved by these steps. Returns its fingerprint.

    Args:
        centre: any centre of the base, wherever it is; of a part of the parameters, too.
        steps: all of them, from the base on.
        snapshot: of a centre on their way, to begin at; the base if None, or if it cannot be used.
    """
    if snapshot is None:
        return centre.restore(steps)
    try:
        found = read_snapshot(snapshot)
        if found.generation > len(steps):
            raise HistoryError(
                f"{snapshot} is of generation {found.generation}, beyond the {len(steps)} wanted"
            )
        held = {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}
        if held != dict(centre.shapes):
            raise HistoryError(f"{snapshot} holds other parameters than the search space")
    except HistoryError as error:
        _logger.warning("%s; the centre is restored from the base model instead", error)
        return centre.restore(steps)
    return centre.restore(steps[found.generation :], found.tensors)

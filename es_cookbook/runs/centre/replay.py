"""The centre of any generation, rebuilt from the base model and the history.

A replay goes tensor by tensor, not generation by generation: each parameter is read once, moved by
all steps while it is at hand, given away and forgotten. So memory holds a few parameters, one for
each thread, and the noise of a few terms, however large the model and long the run. A snapshot
spares the steps before it, and gives the same bits. One that cannot be trusted is left out with a
warning: its generation and, by the fingerprint, every bit of it have to be those of the history's
centre. One of another run, or of generations that were since run again another way, is not.

The run directory is only read, so the run may be going on.
"""

import dataclasses
import logging
import math
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import cast

import torch

from es_cookbook.checkpoints.identity import base_identity
from es_cookbook.checkpoints.models import (
    architecture_for,
    base_parameters,
    parameter_infos,
)
from es_cookbook.checkpoints.peft import read_adapter
from es_cookbook.checkpoints.snapshots import Snapshot, read_snapshot
from es_cookbook.common.configs import load_fields
from es_cookbook.common.errors import HistoryError
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.evolution.centre import merge_steps, moved
from es_cookbook.evolution.exact import MODULUS, fingerprint_span
from es_cookbook.evolution.genome import Step
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpace, SearchSpaceBuilder
from es_cookbook.runs.directory.directory import (
    CONFIG,
    HISTORY,
    SNAPSHOT_SUFFIX,
    SNAPSHOTS,
    check_is_run,
)
from es_cookbook.runs.directory.opening import refuse_lost_history
from es_cookbook.runs.history.format import Header
from es_cookbook.runs.history.store import (
    Prefix,
    check_fingerprint,
    check_same_base,
    read_prefix,
    readable_prefix,
)

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """A centre that can be rebuilt.

    Attributes:
        search_space: as the run's Config has it.
        config: all of that, as JSON values; other classes that it names are not imported.
        prefix: of the history, as far as the centre; without the records that are in the snapshot.
        model_name: where the base is.
        space: which of the model's parameters the centre has (an adapter's: its own).
        base: what the centre starts from, read when it is asked for.
        dtype: in which the engine held the base, and sampled.
        snapshot: of a centre on the way, if there is one.
    """

    search_space: SearchSpaceBuilder
    config: Mapping[str, object]
    history: Path
    prefix: Prefix
    model_name: str
    infos: Sequence[ParameterInfo]
    space: SearchSpace
    base: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    snapshot: Snapshot | None

    @property
    def generation(self) -> int:
        """The centre is that after so many generations; 0 is the base."""
        return self.prefix.generations

    @property
    def steps(self) -> list[Step]:
        """Of the generations that are not in the snapshot."""
        return [record.step for record in self.prefix.records]

    @property
    def fingerprint(self) -> int | None:
        """Recorded for the centre; None for the base."""
        if records := self.prefix.records:
            return records[-1].fingerprint
        return None if self.snapshot is None else self.snapshot.fingerprint

    def from_snapshot(self, snapshot: Path) -> "Replay":
        """The same from this snapshot of its centre, whose records are forgotten."""
        prefix = dataclasses.replace(self.prefix, records=())
        return dataclasses.replace(self, snapshot=read_snapshot(snapshot), prefix=prefix)

    def later(self, generation: int) -> "Replay":
        """The same for a later generation.

        Raises:
            HistoryError: The history is damaged, or does not go so far.
        """
        found = read_prefix(self.history, generation)
        records = (*self.prefix.records, *found.records[self.generation :])
        return dataclasses.replace(self, prefix=dataclasses.replace(found, records=records))

    def check_base(self) -> tuple[str, str]:
        """Compare the base with the one that the run began with; reads all of it.

        The fingerprint tells it apart where the centre is the model's own weights and has moved; an
        adapter's factors say nothing of the model beside them.

        Returns:
            Digests of its weights and its tokenizer.

        Raises:
            HistoryError: It is another; names what differs.
        """
        found = base_identity(self.model_name)
        if (then := self.prefix.header) is not None:
            check_same_base(self.history, then, Header(self.model_name, *found, then.dtype))
        return found

    def centre_tensors(self, num_threads: int | None = None) -> Generator[tuple[str, torch.Tensor]]:
        """Every parameter of the centre, float32, by name, each as soon as it is there.

        Take all of them: what comes after the last one is the comparison of fingerprints.

        Args:
            num_threads: parameters that are worked on at once; one a core if None.

        Raises:
            HistoryError: The fingerprint is not the recorded one.
        """
        done = 0 if self.snapshot is None else self.snapshot.generation
        taken = self.generation - len(self.prefix.records)
        steps = merge_steps(self.steps[done - taken :])
        start = None if self.snapshot is None else self.snapshot.tensors

        def rebuild(name: str) -> tuple[str, torch.Tensor, int]:
            begin = None if start is None else start[name]
            tensor = moved(name, self.base[name], self.space, steps, begin)
            return name, tensor, fingerprint_span(name, tensor.view(-1), 0)

        found = 0
        num_threads = num_threads or num_cores()
        shapes = self.space.shapes
        waiting = sorted(shapes, key=lambda name: math.prod(shapes[name]))  # the last goes first
        with ThreadPoolExecutor(num_threads) as pool:
            running: set[Future[tuple[str, torch.Tensor, int]]] = set()
            while waiting or running:
                # No more are begun than are worked on: what nobody has taken yet is in memory.
                while waiting and len(running) < num_threads:
                    running.add(pool.submit(rebuild, waiting.pop()))
                first = wait(running, return_when=FIRST_COMPLETED).done.pop()
                running.remove(first)
                name, tensor, part = first.result()
                del first
                found = (found + part) % MODULUS
                yield name, tensor
                del tensor
        if self.fingerprint is not None:
            check_fingerprint(self.generation, self.fingerprint, found, self.model_name)


def space_of(search_space: SearchSpaceBuilder, model_name: str) -> SearchSpace:
    """The space of a model; of its weights nothing is read.

    Raises:
        ConfigError: The space does not fit it.
        ModelError: The model cannot be read.
    """
    return search_space(parameter_infos(architecture_for(search_space, model_name)), read_adapter)


def open_replay(
    log_path: Path,
    generation: int | None = None,
    *,
    model_name: str | None = None,
    trust: Collection[str] = (),
) -> Replay:
    """Find out how the centre of a run's generation, the last recorded if None, is rebuilt.

    `model_name` is where the base model is now; where the run had it if None. `trust` are packages,
    beside es_cookbook, of which the run's Config may name classes and functions.

    Raises:
        RunDirectoryError: There is no run directory.
        HistoryError: The history is damaged, or has no such generation.
        ConfigError: The run's Config cannot be read any more.
        ModelError: The base model cannot be read.
    """
    recorded = check_is_run(log_path)
    refuse_lost_history(recorded, readable_prefix(log_path / HISTORY, 1))
    types = {"model_name": str, "search_space": SearchSpaceBuilder}
    fields, config = load_fields(log_path / CONFIG, types, trust)
    search_space = cast(SearchSpaceBuilder, fields["search_space"])
    if generation is not None and generation < 0:
        raise HistoryError(f"generation must be 0 or more, found {generation}")
    prefix = read_prefix(log_path / HISTORY, generation)
    header = prefix.header
    model_name = model_name or cast(str, fields["model_name"])
    architecture = architecture_for(search_space, model_name)
    infos = parameter_infos(architecture)
    space = search_space(infos, read_adapter)
    names = {info.name for info in infos if info.name in space.shapes}
    dtype = "auto" if header is None else header.dtype
    parameters, held = base_parameters(model_name, architecture, names, dtype)
    fingerprints = [record.fingerprint for record in prefix.records]
    return Replay(
        search_space=search_space,
        config=config,
        history=log_path / HISTORY,
        prefix=prefix,
        model_name=model_name,
        infos=infos,
        space=space,
        base=space.base(parameters),
        dtype=held,
        snapshot=latest_snapshot(log_path, fingerprints),
    )


def latest_snapshot(log_path: Path, fingerprints: Sequence[int]) -> Snapshot | None:
    """The last one that can be used, or None; one that cannot is named in a warning.

    Args:
        log_path: run directory.
        fingerprints: `[t]`, of the centre after t + 1 generations, as the history has them; later
            snapshots are not looked at.
    """
    for path in sorted((log_path / SNAPSHOTS).glob(f"*{SNAPSHOT_SUFFIX}"), reverse=True):
        number = path.name.removesuffix(SNAPSHOT_SUFFIX)
        if not number.isdecimal() or not 0 < int(number) <= len(fingerprints):
            continue
        try:
            snapshot = read_snapshot(path)
            if snapshot.generation != int(number):
                raise HistoryError(f"{path} says that it is of generation {snapshot.generation}")
            recorded = fingerprints[snapshot.generation - 1]
            if snapshot.fingerprint != recorded:
                raise HistoryError(
                    f"{path} has fingerprint {snapshot.fingerprint:016x} where the history has "
                    f"{recorded:016x}: it is another run's"
                )
            if not snapshot.holds_what_it_says():
                raise HistoryError(f"{path} is damaged: its weights have another fingerprint")
        except HistoryError as error:
            _logger.warning("%s; it is not used", error)
        else:
            return snapshot
    return None

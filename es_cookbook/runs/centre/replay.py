"""The centre of any generation, rebuilt from the base model and the history.

A replay goes tensor by tensor, not generation by generation: each parameter is read once, moved by
all steps, yielded and forgotten. So memory holds one parameter per thread and the noise of a few
terms, however large the model and long the run. A snapshot replaces the steps before it, and gives
the same bits. It is used only if its generation and its fingerprint, over every bit, are those of
the history; otherwise (a damaged one, or one of another run) it is left out with a warning.

The run directory is only read, so the run may be in progress.
"""

import dataclasses
import logging
import math
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import cast

import torch

from es_cookbook.checkpoints.models import (
    architecture_for,
    base_parameters,
    load_tokenizer,
    parameter_infos,
)
from es_cookbook.checkpoints.peft import read_adapter
from es_cookbook.checkpoints.tensors import Snapshot, read_snapshot
from es_cookbook.common.configs import load_fields
from es_cookbook.common.errors import HistoryError
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.evolution.centre import merge_steps, moved
from es_cookbook.evolution.exact import MODULUS, fingerprint_of
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
from es_cookbook.runs.history.store import (
    Prefix,
    check_fingerprint,
    check_same_base,
    first_generations,
    header_of,
)

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """A centre that can be rebuilt.

    Attributes:
        search_space: search space of the run's Config.
        config: the whole Config as JSON values; other classes that it names are not imported.
        prefix: prefix of the history, up to the centre.
        model_name: name of the base.
        space: the parameters of the centre.
        base: their values in the base, read when needed.
        dtype: dtype of the base in the engine, which sampled in it.
        snapshot: snapshot of an earlier centre, if there is one.
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
        """Number of generations before this centre; 0 for the base."""
        return self.prefix.generations

    @property
    def steps(self) -> list[Step]:
        """Steps of all generations up to this centre."""
        return [record.step for record in self.prefix.records]

    @property
    def fingerprint(self) -> int | None:
        """Recorded fingerprint of the centre; None for the base."""
        records = self.prefix.records
        return records[-1].fingerprint if records else None

    def check_base(self) -> tuple[str, str]:
        """Compare the base with the one that the run began with; reads all of it.

        The fingerprint covers the centre alone, which may be an adapter.

        Returns:
            Digests of its weights and its tokenizer.

        Raises:
            HistoryError: It is another; names what differs.
        """
        then = self.prefix.header
        now = header_of(self.model_name, then.dtype if then else "", self.search_space.starts)
        if then is not None:
            check_same_base(self.history, then, now)
        return now.weights, now.tokenizer

    def centre_tensors(self, num_threads: int | None = None) -> Generator[tuple[str, torch.Tensor]]:
        """Yield every parameter of the centre, float32, with its name.

        Take all of them: after the last one the fingerprints are compared.

        Args:
            num_threads: parameters that are rebuilt at once; one per core if None.

        Raises:
            HistoryError: The fingerprint is not the recorded one.
        """
        done = 0 if self.snapshot is None else self.snapshot.generation
        steps = merge_steps(self.steps[done:])
        start = None if self.snapshot is None else self.snapshot.tensors

        def rebuild(name: str) -> tuple[str, torch.Tensor, int]:
            begin = None if start is None else start[name]
            tensor = moved(name, self.base[name], self.space, steps, begin)
            return name, tensor, fingerprint_of(name, tensor)

        found = 0
        num_threads = num_threads or num_cores()
        shapes = self.space.shapes
        waiting = sorted(shapes, key=lambda name: math.prod(shapes[name]))  # the last goes first
        with ThreadPoolExecutor(num_threads) as pool:
            running: set[Future[tuple[str, torch.Tensor, int]]] = set()
            while waiting or running:
                # No more are begun than there are threads: results that wait are in memory.
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
    """Return the search space of a model, without reading its weights.

    Raises:
        ConfigError: The space does not fit it.
        ModelError: The model cannot be read.
    """
    infos = parameter_infos(architecture_for(search_space, model_name))
    return _tokenized(search_space, model_name)(infos, read_adapter)


def _tokenized(search_space: SearchSpaceBuilder, model_name: str) -> SearchSpaceBuilder:
    def tokenize(text: str) -> list[int]:
        return load_tokenizer(model_name).encode(text, add_special_tokens=False)

    return search_space.tokenized(tokenize)


def open_replay(
    log_path: Path,
    generation: int | None = None,
    *,
    model_name: str | None = None,
    trust: Collection[str] = (),
) -> Replay:
    """Prepare to rebuild the centre after `generation` generations, all of them if None.

    `model_name` is the present place of the base model; that of the run if None. `trust` are
    further packages whose classes and functions the run's Config may name.

    Raises:
        RunDirectoryError: There is no run directory.
        HistoryError: The history is damaged, or has no such generation.
        ConfigError: The run's Config cannot be read any more.
        ModelError: The base model cannot be read.
    """
    recorded = check_is_run(log_path)
    refuse_lost_history(recorded)
    types = {"model_name": str, "search_space": SearchSpaceBuilder}
    fields, config = load_fields(log_path / CONFIG, types, trust)
    search_space = cast(SearchSpaceBuilder, fields["search_space"])
    prefix = first_generations(recorded.history, log_path / HISTORY, generation)
    header = prefix.header
    model_name = model_name or cast(str, fields["model_name"])
    architecture = architecture_for(search_space, model_name)
    infos = parameter_infos(architecture)
    space = _tokenized(search_space, model_name)(infos, read_adapter)
    names = {info.name for info in infos if info.name in space.reads}
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
    """Return the latest usable snapshot, or None; log a warning for each that is not usable.

    Args:
        log_path: run directory.
        fingerprints: `[t]`, recorded for the centre after t + 1 generations.
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

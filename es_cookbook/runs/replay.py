"""The centre of any generation, rebuilt from the base model and the history.

A replay goes tensor by tensor, not generation by generation: each parameter is read once, moved by
all steps while it is at hand, given away and forgotten. So memory holds a few parameters, one for
each thread, and the noise of a few terms, however large the model and long the run. A snapshot
spares the steps before it, and gives the same bits.

The run directory is only read, so the run may be going on.
"""

import dataclasses
import math
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import cast

import torch

from es_cookbook.checkpoints.identity import base_identity
from es_cookbook.checkpoints.models import (
    BaseParameters,
    architecture_for,
    parameter_infos,
)
from es_cookbook.checkpoints.peft import read_adapter
from es_cookbook.checkpoints.quantised import quantised_parameters
from es_cookbook.checkpoints.snapshots import Snapshot, read_snapshot
from es_cookbook.common.configs import load_fields
from es_cookbook.common.cores import num_cores
from es_cookbook.common.errors import HistoryError
from es_cookbook.evolution.centre import merge_steps, moved
from es_cookbook.evolution.exact import MODULUS, fingerprint_span
from es_cookbook.evolution.genome import Step
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpace, SearchSpaceBuilder
from es_cookbook.runs.directory import CONFIG, HISTORY, check_is_run
from es_cookbook.runs.history.format import Header
from es_cookbook.runs.history.store import (
    Place,
    check_fingerprint,
    check_same_base,
    read_prefix,
)
from es_cookbook.runs.opening import refuse_lost_history
from es_cookbook.runs.snapshots import latest_snapshot


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """A centre that can be rebuilt.

    Attributes:
        search_space: as the run's Config has it.
        config: all of that, as JSON values; other classes that it names are not imported.
        header: what the run began with; None where the history is too old to say.
        model_name: where the base is.
        space: which of the model's parameters the centre has (an adapter's: its own).
        base: what the centre starts from, read when it is asked for.
        dtype: in which the engine held the base, and sampled.
        generation: the centre is wanted after so many; 0 is the base.
        taken: so many of them are in the snapshot, and their steps are left out.
        steps: of the others.
        fingerprint: recorded for that centre; None for the base.
        snapshot: of a centre on the way, if there is one.
        end: where these generations end in the history.
    """

    search_space: SearchSpaceBuilder
    config: Mapping[str, object]
    history: Path
    header: Header | None
    model_name: str
    infos: Sequence[ParameterInfo]
    space: SearchSpace
    base: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    generation: int
    steps: Sequence[Step]
    fingerprint: int | None
    snapshot: Snapshot | None
    end: Place
    taken: int = 0

    def from_snapshot(self, snapshot: Path) -> "Replay":
        """The same from this snapshot of its centre, whose steps are forgotten."""
        return dataclasses.replace(
            self, snapshot=read_snapshot(snapshot), taken=self.generation, steps=()
        )

    def later(self, generation: int) -> "Replay":
        """The same for a later generation; of the history only what is new is read.

        Raises:
            HistoryError: The history is damaged, or does not go so far.
        """
        new = read_prefix(self.history, generation, self.end)
        return dataclasses.replace(
            self,
            generation=generation,
            steps=[*self.steps, *(record.step for record in new.records)],
            fingerprint=new.records[-1].fingerprint if new.records else self.fingerprint,
            end=new.end,
        )

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
        if self.header is not None:
            now = Header(self.model_name, *found, self.header.dtype)
            check_same_base(self.history, self.header, now)
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
        steps = merge_steps(self.steps[done - self.taken :])
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
    check_is_run(log_path)
    refuse_lost_history(log_path)
    types = {"model_name": str, "search_space": SearchSpaceBuilder}
    fields, config = load_fields(log_path / CONFIG, types, trust)
    search_space = cast(SearchSpaceBuilder, fields["search_space"])
    if generation is not None and generation < 0:
        raise HistoryError(f"generation must be 0 or more, found {generation}")
    prefix = read_prefix(log_path / HISTORY, generation)
    header, records = prefix.header, prefix.records
    model_name = model_name or cast(str, fields["model_name"])
    moves_quantised = search_space.moves_quantised
    architecture = architecture_for(search_space, model_name)
    infos = parameter_infos(architecture)
    space = search_space(infos, read_adapter)
    names = {info.name for info in infos if info.name in space.shapes and not moves_quantised}
    dtype = header.dtype if header is not None and header.dtype else _dtype_of(config)
    parameters = BaseParameters(model_name, architecture, names, dtype)
    return Replay(
        search_space=search_space,
        config=config,
        history=log_path / HISTORY,
        header=header,
        model_name=model_name,
        infos=infos,
        space=space,
        base=space.base(quantised_parameters(model_name) if moves_quantised else parameters),
        dtype=parameters.dtype,
        generation=len(records),
        steps=[record.step for record in records],
        fingerprint=records[-1].fingerprint if records else None,
        snapshot=latest_snapshot(log_path, [record.fingerprint for record in records], header),
        end=prefix.end,
    )


def _dtype_of(config: Mapping[str, object]) -> str:
    """The dtype in which the run's engine held the base, where the history does not say it.

    A pool's engines are inside it.
    """
    part = config.get("engine")
    while isinstance(part, dict):
        engine = cast("dict[str, object]", part)
        if isinstance(dtype := engine.get("dtype"), str):
            return dtype
        part = engine.get("engine")
    return "auto"

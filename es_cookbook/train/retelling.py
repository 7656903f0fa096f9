"""Optimizer, dataset and engine are brought to where a history ends, and checked to be there.

An optimizer is told every generation again, so no state of any optimizer is ever written. What it
was told (fitness, and scores where it needs them) is in the records, what it asks follows from that
and the run seed, and the steps that it makes must be the recorded ones. An engine takes the steps,
from a snapshot where there is one, and must have the recorded fingerprint.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from es_cookbook.common.errors import HistoryError
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.optimizers.base import Optimizer
from es_cookbook.rl.types import RLDataset
from es_cookbook.runs.history.format import Header, Record
from es_cookbook.runs.history.store import check_fingerprint


def retell(optimizer: Optimizer, records: Sequence[Record], given: int, advice: str) -> None:
    """Tell a new optimizer what it was told in these generations, and check that it does the same.

    The first `given` of them another run made: 0 but in a fork. `advice` ends the error's sentence.

    Raises:
        HistoryError: It gives another step than the recorded one, or needs scores that are not
            recorded.
    """
    if given:
        optimizer.begin_after([record.step for record in records[:given]])
    for record in records[given:]:
        genomes_G = optimizer.ask(record.generation)
        scores_P_G = None if record.scores_P_G is None else np.array(record.scores_P_G)
        if optimizer.records_scores and scores_P_G is None:
            raise HistoryError(
                f"generation {record.generation}: the optimizer goes by rewards problem by "
                f"problem, and the history does not have them{advice}"
            )
        fitness_G = np.array(record.fitness_G)
        step = optimizer.tell(record.generation, genomes_G, scores_P_G, fitness_G)
        if step != record.step:
            raise HistoryError(
                f"generation {record.generation}: the recorded fitness does not give the recorded "
                f"step any more{advice}"
            )


def retell_dataset(
    dataset: RLDataset, records: Sequence[Record], given: int, told: int = 0
) -> None:
    """Tell a dataset what these generations brought; the first `given` were another run's.

    It has been told the first `told` already.

    Raises:
        DataError: They were of other problems than the dataset has.
    """
    for record in records[told:]:
        if record.results_P:
            dataset.tell(record.generation, record.results_P, record.generation < given)


async def restore(
    engine: Engine, history: Path, header: Header | None, records: Sequence[Record], model_name: str
) -> None:
    """Bring an engine's centre to where it was after these generations, and check that it is.

    Snapshots are looked for beside the history. Without records the centre is the base.

    Raises:
        HistoryError: The centre has another fingerprint than the recorded one.
    """
    from es_cookbook.runs.snapshots import latest_snapshot  # torch, which a Config does without

    fingerprints = [record.fingerprint for record in records]
    snapshot = await asyncio.to_thread(latest_snapshot, history.parent, fingerprints, header)
    found = await engine.restore([record.step for record in records], snapshot and snapshot.path)
    if records:
        check_fingerprint(len(records), fingerprints[-1], found, model_name)

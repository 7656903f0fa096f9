"""The files of a run are read once, however many look at what they say."""

from collections import Counter
from pathlib import Path

import pytest

from es_cookbook.common import files
from es_cookbook.runs.config import recorded_config
from es_cookbook.runs.program import train
from es_cookbook.runs.recorded import open_run
from tests.tiny_run import tiny


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file of the run was opened for reading, by its name."""
    counts = Counter[str]()
    opened_descriptor = files.opened_descriptor

    def counted(path: Path, flags: int, within: Path | None) -> int:
        counts[path.name] += path.parent == tmp_path
        return opened_descriptor(path, flags, within)

    monkeypatch.setattr(files, "opened_descriptor", counted)
    return counts


async def test_a_run_that_goes_on_reads_its_config_and_its_history_once(
    tmp_path: Path, reads: Counter[str]
) -> None:
    await train(tiny(tmp_path, num_generations=2))
    reads.clear()
    await train(tiny(tmp_path, num_generations=3))
    assert (reads["config.json"], reads["history.jsonl"]) == (1, 1)
    reads.clear()
    await train(tiny(tmp_path, num_generations=3))
    assert (reads["config.json"], reads["history.jsonl"]) == (1, 1), "it is complete"
    reads.clear()
    assert recorded_config(tmp_path, ["tests"]).num_generations == 3
    assert (reads["config.json"], reads["history.jsonl"]) == (1, 0)
    reads.clear()
    assert len(open_run(tmp_path, trust=["tests"]).records) == 3
    assert (reads["config.json"], reads["history.jsonl"]) == (1, 1)

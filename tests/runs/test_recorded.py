"""Whatever a run ever consisted of comes back from seeds, and what does not fit is refused."""

import dataclasses
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transformers import Qwen2ForCausalLM

from es_cookbook.common.errors import ConfigError, HistoryError, RunDirectoryError
from es_cookbook.plugins.genetic.optimizer import Genetic
from es_cookbook.rl.surrogate import Surrogate
from es_cookbook.rl.types import Observation, SamplingParams
from es_cookbook.runs.history.format import Fork
from es_cookbook.runs.program import train
from es_cookbook.runs.recorded import RebuiltRun, open_run, rebuild
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.tiny_run import TinyConfig, tiny, untimed, write_tiny_model


@pytest.fixture(scope="module")
async def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of six generations, and its model beside it."""
    path = tmp_path_factory.mktemp("rebuilt")
    await train(
        TinyConfig(
            model_name=str(write_tiny_model(path / "model")),
            log_path=str(path / "run"),
            trackers=JsonlTrackerBuilder(rollouts_per_generation=8),
            num_generations=6,
            eval_every=3,
            eval_temperature=2.0,
            snapshot_every=2,
        )
    )
    return path / "run"


@pytest.fixture(scope="module")
async def rebuilt(log_path: Path) -> AsyncIterator[RebuiltRun]:
    made = await rebuild(open_run(log_path, trust=["tests"]))
    yield made
    await made.close()


async def test_the_base_is_the_centre_of_generation_0(rebuilt: RebuiltRun) -> None:
    hot = SamplingParams(max_tokens=20, temperature=2.0)
    observation = Observation((5, 6))
    answers = {}
    for generation in (0, 6):
        await rebuilt.go_to(generation)
        for who in ("centre", "base", 0) if generation == 0 else ("centre", "base"):
            answers[generation, who] = await rebuilt.answer(who, observation, hot, seed=1)
    assert answers[0, "centre"] == answers[0, "base"] == answers[6, "base"]
    assert answers[6, "centre"] != answers[0, "centre"] != answers[0, 0]


async def test_the_answers_that_genomes_scored_come_back(tmp_path: Path) -> None:
    scored = {"surrogate": Surrogate(attempts=2), "sampling": SamplingParams(max_tokens=4)}
    await train(tiny(tmp_path, num_generations=1, **scored))
    rebuilt = await rebuild(open_run(tmp_path, trust=["tests"]))
    for row in untimed(tmp_path / "rollouts.jsonl"):
        played = await rebuilt.play("centre", "train", row["problem"], {})
        answer = played.rollout.transitions[0].action.text  # pyright: ignore
        assert answer == row["turns"][0]["action"] or row["attempt"]
    await rebuilt.close()


async def test_held_out_problems_are_played_alike(log_path: Path, rebuilt: RebuiltRun) -> None:
    await rebuilt.go_to(6)
    rewards = [(await rebuilt.play("centre", "test", p, {})).reward for p in range(4)]
    assert untimed(log_path / "metrics.jsonl")[-1]["test/reward/mean"] == sum(rewards) / 4


async def test_an_elite_is_among_the_best_genomes(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "model"))
    genetic = Genetic(population_size=4, sigma=0.1)
    await train(tiny(tmp_path / "run", model_name=model, optimizer=genetic))
    run = open_run(tmp_path / "run", trust=["tests"])
    for record in run.records[2:]:
        genomes_G = run.genomes(record.generation)
        assert set(run.best(record.generation, 4)) == {*genomes_G}


async def test_nothing_is_written(log_path: Path, rebuilt: RebuiltRun) -> None:
    def state() -> dict[str, tuple[int, bytes]]:
        files = (path for path in log_path.rglob("*") if path.is_file())
        return {str(f): (f.stat().st_mtime_ns, f.read_bytes()) for f in files}

    before = state()
    other = await rebuild(open_run(log_path, trust=["tests"]))
    await other.go_to(4)
    await other.play(3, "test", 0, {})
    await other.close()
    assert state() == before


async def test_what_is_not_there_is_said_with_what_is(rebuilt: RebuiltRun, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="nowhere is not a run directory"):
        open_run(tmp_path / "nowhere", trust=["tests"])
    for generation in (-1, 7):
        with pytest.raises(ConfigError) as caught:
            await rebuilt.go_to(generation)
        assert str(caught.value) == (
            f"there is no generation {generation}: the run has recorded 6 of 6, so 0 (the base) to "
            "6 are there"
        )
    await rebuilt.go_to(6)
    with pytest.raises(ConfigError, match="generation 6 has no genomes: it is the end of the run"):
        await rebuilt.play(0, "test", 0, {})
    await rebuilt.go_to(5)
    with pytest.raises(ConfigError, match="there is no genome 4: generation 5 has 4, 0 to 3"):
        await rebuilt.play(4, "test", 0, {})
    with pytest.raises(ConfigError, match="no held-out problem 4: the run has 4, 0 to 3"):
        await rebuilt.play(0, "test", 4, {})
    with pytest.raises(ConfigError, match="problem 2: the batch of generation 5 has 2, 0 to 1"):
        await rebuilt.play(0, "train", 2, {})


async def test_another_base_is_refused(log_path: Path, tmp_path: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(log_path.parent / "model")
    model.model.embed_tokens.weight.data[3, 5] += 1e-3  # What no genome perturbs.
    shutil.copytree(log_path.parent / "model", tmp_path / "other")
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(HistoryError, match=f"model_name={tmp_path / 'other'}: its weights was"):
        await rebuild(open_run(log_path, str(tmp_path / "other"), trust=["tests"]))


async def test_a_fork_has_the_genomes_of_its_own_generations(log_path: Path) -> None:
    run = open_run(log_path, trust=["tests"])
    genomes_G = run.genomes(5)
    fork = open_run(log_path, trust=["tests"])
    assert fork.header is not None
    fork.header = dataclasses.replace(fork.header, fork=Fork("runs/parent", 3))
    assert fork.genomes(5) == genomes_G
    with pytest.raises(ConfigError, match="generation 2 was not this run's but that of log_path=r"):
        fork.genomes(2)

"""Whatever a run ever consisted of comes back from seeds, and what does not fit is refused."""

import dataclasses
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import chz
import pytest
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

from es_cookbook.common.errors import ConfigError, HistoryError, RunDirectoryError
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import (
    Datasets,
    GroupReward,
    LostRollout,
    Observation,
    Policy,
    RLDatasetBuilder,
    SamplingParams,
    Trajectory,
)
from es_cookbook.runs.history.format import Fork
from es_cookbook.runs.program import train
from es_cookbook.runs.recorded import RebuiltRun, open_run, rebuild
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.fakes import SmallDataset, SmallDatasetBuilder
from tests.tiny_run import TinyConfig, tiny, write_tiny_model

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


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
            snapshot_every=2,
        )
    )
    return path / "run"


@pytest.fixture(scope="module")
async def rebuilt(log_path: Path) -> AsyncIterator[RebuiltRun]:
    made = await rebuild(open_run(log_path, trust=["tests"]))
    yield made
    await made.close()


async def test_every_rollout_of_the_run_comes_back(log_path: Path, rebuilt: RebuiltRun) -> None:
    rows = [json.loads(line) for line in (log_path / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 6 * 8
    for row in reversed(rows):  # Backwards, so that every generation is gone back to.
        if rebuilt.generation != row["generation"]:
            await rebuilt.go_to(row["generation"])
        played = await rebuilt.play(row["genome"], "train", row["problem"], {})
        assert isinstance(played.rollout, Trajectory)
        texts = [turn.action.text for turn in played.rollout.transitions]
        assert texts == [turn["action"] for turn in row["turns"]]
        assert played.reward == row["reward"]
    assert len({row["turns"][0]["action"] for row in rows}) > 10, "there was something to mistake"


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


async def test_sampling_can_differ_from_the_runs(rebuilt: RebuiltRun) -> None:
    await rebuilt.go_to(2)

    async def text(overrides: dict[str, object], seed: int | None = None) -> str:
        played = await rebuilt.play(1, "train", 0, overrides, seed)
        assert isinstance(played.rollout, Trajectory)
        return played.rollout.transitions[0].action.text

    assert await text({}) == await text({}) != await text({}, seed=7) == await text({}, seed=7)
    assert len(await text({"max_tokens": 2})) == 2
    assert await text({"temperature": 0.0}) == await text({"temperature": 0.0}, seed=7)


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
    with pytest.raises(RunDirectoryError, match=r"nowhere holds no config\.json, so it is not a"):
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


async def test_without_a_header_the_fingerprint_tells_another_base(
    log_path: Path, tmp_path: Path
) -> None:
    model = Qwen2ForCausalLM.from_pretrained(log_path.parent / "model")
    model.model.layers[0].mlp.up_proj.weight.data[3, 5] += 1e-3
    shutil.copytree(log_path.parent / "model", tmp_path / "other")
    model.save_pretrained(tmp_path / "other")
    run = open_run(log_path, str(tmp_path / "other"), trust=["tests"])
    run.header = None
    other = await rebuild(run)
    recorded = run.records[0].fingerprint
    with pytest.raises(HistoryError, match=f"had fingerprint {recorded:016x}, but the history"):
        await other.go_to(0)
    await other.close()


def test_genomes_come_back_where_the_base_has_moved(log_path: Path, tmp_path: Path) -> None:
    shutil.copytree(log_path.parent / "model", tmp_path / "moved")
    shutil.copytree(log_path, tmp_path / "run")
    config = tmp_path / "run/config.json"
    config.write_text(config.read_text().replace(str(log_path.parent / "model"), "nowhere"))
    moved = open_run(tmp_path / "run", str(tmp_path / "moved"), trust=["tests"])
    assert moved.genomes(3) == open_run(log_path, trust=["tests"]).genomes(3)


async def test_a_fork_has_the_genomes_of_its_own_generations(log_path: Path) -> None:
    run = open_run(log_path, trust=["tests"])
    genomes_G = run.genomes(5)
    fork = open_run(log_path, trust=["tests"])
    assert fork.header is not None
    fork.header = dataclasses.replace(fork.header, fork=Fork("runs/parent", 3))
    assert fork.genomes(5) == genomes_G
    with pytest.raises(ConfigError, match="generation 2 was not this run's but that of log_path=r"):
        fork.genomes(2)


async def test_a_damaged_history_is_refused_and_a_torn_line_left_out(
    log_path: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "history.jsonl"):
        (tmp_path / name).write_bytes((log_path / name).read_bytes())
    history = tmp_path / "history.jsonl"
    whole = history.read_bytes()
    history.write_bytes(whole + whole[:40])
    assert len(open_run(tmp_path, trust=["tests"]).records) == 6
    history.write_bytes(whole[:-90])
    run = open_run(tmp_path, trust=["tests"])
    assert len(run.records) == 5, "the last one is being written"
    history.write_bytes(whole)
    run.refresh()
    assert len(run.records) == 6
    half = len(whole) // 2
    history.write_bytes(whole[:half] + b"?" + whole[half + 1 :])
    with pytest.raises(HistoryError, match="line"):
        open_run(tmp_path, trust=["tests"])


class Tournament(ProblemGroupBuilder):
    """Compares genomes; one of its problems cannot be attempted at all."""

    async def make_envs(self, num_envs: int) -> object:
        if self.name == "test 51":
            raise OSError("the judge is ill")
        return await super().make_envs(num_envs)

    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward]:
        assert len(trajectories) > 1
        return [GroupReward(float(i)) for i, _ in enumerate(trajectories)]


@chz.chz
class TournamentBuilder(RLDatasetBuilder):
    async def __call__(self, tokenizer: PreTrainedTokenizerBase) -> Datasets:
        held_out = (await SmallDatasetBuilder()(tokenizer)).test_P
        assert all(isinstance(builder, ProblemGroupBuilder) for builder in held_out)
        return Datasets(SmallDataset(), [Tournament(b.make_env, b.name) for b in held_out])


async def test_rewards_that_compare_are_left_out_and_lost_rollouts_say_why(tmp_path: Path) -> None:
    await train(
        tiny(
            tmp_path / "run",
            model_name=str(write_tiny_model(tmp_path / "model")),
            num_generations=2,
        )
    )
    recorded = open_run(tmp_path / "run", trust=["tests"])
    recorded.config = chz.replace(recorded.config, dataset=TournamentBuilder())
    rebuilt = await rebuild(recorded)
    await rebuilt.go_to(1)
    played = await rebuilt.play(0, "test", 0, {})
    assert played.without_group_reward and played.problem == "test 50"
    assert 0 <= played.reward <= 1, "the Env's own"
    lost = (await rebuilt.play(0, "test", 1, {})).rollout
    assert isinstance(lost, LostRollout) and lost.reason == "OSError: the judge is ill"
    assert not (await rebuilt.play(0, "train", 0, {})).without_group_reward
    await rebuilt.close()

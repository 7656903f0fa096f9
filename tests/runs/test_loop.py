"""The loop records what it did, measures what it promises, and goes on exactly where it stopped."""

import dataclasses
import functools
import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chz
import pytest

from es_cookbook import ES, Config, FullRank, SamplingParams
from es_cookbook.common.configs import load_config
from es_cookbook.common.errors import ConfigError, HistoryError, ModelError, RunDirectoryError
from es_cookbook.engines.base import SampleRequest
from es_cookbook.evolution.genome import Step
from es_cookbook.evolution.schedules import Constant, Linear, Schedule
from es_cookbook.plugins.branches import fork
from es_cookbook.plugins.genetic.optimizer import Genetic
from es_cookbook.plugins.objectives.length import LengthPenalty
from es_cookbook.plugins.regularisers.kl import KLToBase
from es_cookbook.plugins.regularisers.preference import PreferencePairs
from es_cookbook.rl.objectives import MaxOfK
from es_cookbook.rl.surrogate import BestAnswers, Surrogate
from es_cookbook.rl.types import Action
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder, Trackers
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics
from tests.fakes import FakeEngine, FakeEngineBuilder
from tests.programs import Programs
from tests.tiny_run import BASE, TinyConfig, assert_same_run, contents, tiny, untimed

ROOT = Path(__file__).parents[2]


async def test_steps_from_rewards_use_no_log_probability_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So kernels that differ between a sampler and a trainer cannot bias a step."""

    async def sample(self: FakeEngine, request: SampleRequest) -> Action:
        action = await plain(self, request)
        return dataclasses.replace(action, logprobs_T=(math.nan,) * len(action.tokens_T))

    plain = FakeEngine.sample
    await train(tiny(tmp_path / "right"))
    monkeypatch.setattr(FakeEngine, "sample", sample)
    monkeypatch.delattr(FakeEngine, "logprobs")
    await train(tiny(tmp_path / "wrong"))
    right, wrong = ((tmp_path / name / "history.jsonl").read_bytes() for name in ("right", "wrong"))
    assert right == wrong


async def test_a_run_records_every_generation_and_measures_what_it_promises(tmp_path: Path) -> None:
    await train(tiny(tmp_path))
    records = list(read_history(tmp_path / "history.jsonl"))
    assert [record.generation for record in records] == list(range(12))
    assert all(len(record.fitness_G) == 4 for record in records)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    parts = ("ask", "tell", "load", "sample", "score", "apply", "total", "unix")
    assert set(rows[1]) == {
        *("progress/generation", "progress/rollouts", "progress/tokens", "reward/mean"),
        *("reward/max_genome", "reward/min_genome", "reward/std_genomes", "env/all/correct"),
        *("env/all/format", "env/even/correct", "env/even/format", "genomes/tied_fraction"),
        *("genomes/reliability", "optimizer/sigma", "optimizer/learning_rate"),
        *("step/rms_over_sigma", "centre/drift_rms", "rollouts/failed", "rollouts/truncated"),
        *("rollouts/mean_tokens", "rollouts/p95_tokens", "engines/restarted"),
        *(f"time/{part}" for part in parts),
        *("throughput/answers_per_second", "throughput/tokens_per_second"),
    }
    measured = [row["progress/generation"] for row in rows if "test/env/all/correct" in row]
    assert measured == [0, 5, 10, 12], "before the first, every five, after the last"
    assert [row["progress/rollouts"] for row in rows] == [*range(8, 97, 8), 96]
    assert rows[11]["centre/drift_rms"] == pytest.approx(
        sum(term.coefficient**2 for record in records for term in record.step.terms) ** 0.5
    )
    row = rows[3]
    assert row["time/ask"] > 0 and row["time/tell"] > 0
    spent = sum(row[f"time/{part}"] for part in parts[:4]) + row["time/apply"]
    assert 0 < row["time/score"] < row["time/sample"] < spent <= row["time/total"]
    assert len(untimed(tmp_path / "rollouts.jsonl")) == 12 * 4


@chz.chz
class StoppingBuilder(TrackerBuilder):
    """Builds the JSONL tracker; it fails in one generation, before or after writing."""

    generation: int = chz.field(doc="when")
    when: str = chz.field(doc="before or after")

    def __call__(self, run: RunInfo) -> Tracker:
        return Stopping(self, JsonlTrackerBuilder()(run))


class Stopping(Trackers):
    def __init__(self, builder: StoppingBuilder, tracker: Tracker) -> None:
        super().__init__([tracker])
        self.builder = builder

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        stops = generation == self.builder.generation
        if stops and self.builder.when == "before":
            raise InterruptedError
        super().log(generation, metrics)
        if stops:
            raise InterruptedError


async def assert_goes_on_exactly(
    tmp_path: Path, generation: int = 5, when: str = "after", **settings: Any
) -> Path:
    """A run that is stopped ends as an unbroken one, of which the directory is returned."""
    await train(tiny(tmp_path / "unbroken", **settings))
    stopping = StoppingBuilder(generation=generation, when=when)
    with pytest.raises(InterruptedError):
        await train(tiny(tmp_path / "broken", **settings, trackers=stopping))
    await train(tiny(tmp_path / "broken", **settings))
    assert_same_run(tmp_path / "broken", tmp_path / "unbroken")
    return tmp_path / "unbroken"


@pytest.mark.parametrize(("generation", "when"), [(0, "before"), (5, "after"), (12, "before")])
async def test_a_run_that_was_stopped_ends_as_an_unbroken_one(
    tmp_path: Path, generation: int, when: str
) -> None:
    await assert_goes_on_exactly(tmp_path, generation, when)


def regularised(path: Path, **fields: Any) -> dict[str, Any]:
    """Settings of a run with everything that judges genomes; its pairs are in `path`."""
    pairs = path / "pairs.jsonl"
    rows = [{"prompt": "a", "chosen": letter, "rejected": "z"} for letter in "bcdef"]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    weights = {"kl_weight": 0.3, "preference_weight": 0.7} | fields
    kl_weight, preference_weight = weights.pop("kl_weight"), weights.pop("preference_weight")
    return {
        "kl": KLToBase(weight=kl_weight, problems_per_generation=1, max_tokens=4),
        "preference": PreferencePairs(
            weight=preference_weight, source=str(pairs), problems_per_generation=2
        ),
        **weights,
    }


async def test_a_run_with_every_objective_goes_on_exactly_and_says_what_it_measured(
    tmp_path: Path,
) -> None:
    settings = regularised(
        tmp_path,
        objective=LengthPenalty(inner=MaxOfK(k=2)),
        attempts=3,
        eval_attempts=4,
        eval_temperature=0.5,
    )
    unbroken = await assert_goes_on_exactly(tmp_path, **settings)
    first, *_, last = read_metrics(unbroken / "metrics.jsonl")
    measured = {"objective/mean", "objective/std_genomes", "env/kl/kl", "env/preference/margin"}
    assert measured | {"env/preference/preferred", "reward/mean"} <= set(first)
    assert {"test/pass@1", "test/pass@2", "test/pass@4"} <= set(first) & set(last)
    assert first["progress/rollouts"] == 4 * 3 * (2 + 1 + 2)
    again = load_config(unbroken / "config.json", Config, ["tests"])
    assert again == tiny(unbroken, **settings)


async def test_a_run_that_is_complete_stays_as_it_is_to_the_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await train(tiny(tmp_path, num_generations=2))
    before = contents(tmp_path)
    engines = len(FakeEngineBuilder.made)
    elsewhere = FakeEngineBuilder(capacity=1)
    again = tiny(tmp_path, num_generations=2, engine=elsewhere)
    await train(again)
    assert contents(tmp_path) == before
    assert len(FakeEngineBuilder.made) == engines
    assert capsys.readouterr().out == (
        f"{tmp_path} is already complete, with 2 generations; for more: python -m es_cookbook "
        f"resume log_path={tmp_path} trust=tests num_generations=...\n"
    )


class OtherModel(FakeEngine):
    async def restore(self, steps: Any, snapshot: Path | None = None) -> int:
        return await super().restore(steps, snapshot) + 1


async def test_another_model_is_noticed_by_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await train(tiny(tmp_path, num_generations=3))
    fingerprint = list(read_history(tmp_path / "history.jsonl"))[-1].fingerprint
    monkeypatch.setattr("tests.fakes.FakeEngine", OtherModel)
    with pytest.raises(HistoryError) as caught:
        await train(tiny(tmp_path, num_generations=4))
    assert f"{fingerprint:016x}, but the history gives {fingerprint + 1:016x}" in str(caught.value)


async def test_another_optimizer_of_the_same_config_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await train(tiny(tmp_path, num_generations=3))
    tell = "es_cookbook.evolution.optimizers.es.ESOptimizer.tell"
    monkeypatch.setattr(tell, lambda *_: Step())
    with pytest.raises(HistoryError, match="generation 0: the recorded fitness does not give"):
        await train(tiny(tmp_path, num_generations=4))


@chz.chz
class BrokenEngineBuilder(FakeEngineBuilder):
    async def __call__(self, **_: Any) -> FakeEngine:
        raise ModelError("model_name none has no weights")


async def test_a_mistake_leaves_what_is_recorded_alone(tmp_path: Path) -> None:
    await train(tiny(tmp_path, num_generations=2))
    files = contents(tmp_path)
    with pytest.raises(ModelError):
        await train(
            tiny(tmp_path, engine=BrokenEngineBuilder(), behavior_if_log_dir_exists="delete")
        )
    with pytest.raises(RunDirectoryError, match=r"already holds a run.*resume or delete"):
        await train(tiny(tmp_path, behavior_if_log_dir_exists="raise"))
    with pytest.raises(RunDirectoryError, match="seed was 0, is 1"):
        await train(tiny(tmp_path, num_generations=2, seed=1))
    assert contents(tmp_path) == files


KILLS = """
import dataclasses, json, pathlib, sys
from benchmarks.kills import campaign
print(json.dumps(dataclasses.asdict(campaign(pathlib.Path(sys.argv[1]), 5))))
"""


@pytest.mark.slow
def test_killed_over_and_over_a_real_run_loses_nothing_and_ends_as_an_unbroken_one(
    tmp_path: Path, programs: Programs
) -> None:
    """Five kills, in a process of its own; `python -m benchmarks.kills` has many more."""
    (tmp_path / "kills.py").write_text(KILLS)
    done = programs.run(tmp_path / "kills.py", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == sum(found["moments"].values()) == 5 and found["runs"] >= 1
    assert found["moments"].keys() - {"while starting"}, "some came within a generation"
    assert (found["lost"], found["differing_bits"], found["differing_lines"]) == (0, 0, 0)


# What a resumed run may change, and what it may not.


async def test_a_run_goes_on_elsewhere_longer_on_another_engine_and_under_another_model_name(
    tmp_path: Path,
) -> None:
    await train(tiny(tmp_path / "unbroken", num_generations=7))
    await train(tiny(tmp_path / "begun", num_generations=4))
    (tmp_path / "begun").rename(tmp_path / "moved")
    shutil.copytree(BASE, tmp_path / "model")
    again = tiny(
        tmp_path / "moved",
        num_generations=7,
        model_name=str(tmp_path / "model"),
        engine=FakeEngineBuilder(capacity=2),
    )
    await train(again)
    assert_same_run(tmp_path / "moved", tmp_path / "unbroken")
    kept = load_config(tmp_path / "moved" / "config.json", TinyConfig, ["tests"])
    assert kept == tiny(tmp_path / "begun", num_generations=7), "but for its length as it began"


async def test_genomes_that_will_outgrow_the_engine_are_refused_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fakes.FakeEngine", functools.partial(FakeEngine, max_terms=4))
    said = (
        r"up to 5 terms \(optimizer.max_terms\), and the engine has room for 4: set its terms_per"
    )
    with pytest.raises(ConfigError, match=said):
        await train(tiny(tmp_path, optimizer=Genetic(max_terms=5)))
    assert not (tmp_path / "history.jsonl").exists()
    await train(tiny(tmp_path, num_generations=1, optimizer=Genetic(max_terms=4)))


async def test_another_base_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(BASE, model)
    fields: dict[str, Any] = {"model_name": str(model)}
    await train(tiny(tmp_path / "run", num_generations=2, **fields))
    before = contents(tmp_path / "run")
    resumed = tiny(tmp_path / "run", num_generations=3, **fields)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(HistoryError, match=rf"began with model_name={model} .*: its tokenizer was"):
        await train(resumed)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1] + b"\x01")
    with pytest.raises(HistoryError, match=r"its weights was .*, its tokenizer was .*; give what"):
        await train(resumed)
    assert contents(tmp_path / "run") == before


async def test_what_makes_another_run_of_it_is_refused_and_the_rest_listed(tmp_path: Path) -> None:
    await train(tiny(tmp_path, num_generations=3))
    with pytest.raises(RunDirectoryError) as caught:
        await train(tiny(tmp_path, search_space=FullRank()))
    sentence = str(caught.value)
    assert "search_space was" in sentence
    assert (
        "what may differ on resuming: log_path, behavior_if_log_dir_exists, trackers, "
        "model_name, engine, num_generations, snapshot_every" in sentence
    )
    assert f"python -m es_cookbook fork log_path={tmp_path} output=... FIELD=..." in sentence
    with pytest.raises(RunDirectoryError, match=r"must be at least 3, .*, found 2; .*rewind"):
        await train(tiny(tmp_path, num_generations=2))


@pytest.mark.parametrize("schedule", [Linear(), Constant()])
async def test_a_longer_run_goes_on_unless_its_schedule_would_have_moved_otherwise(
    tmp_path: Path, schedule: Schedule
) -> None:
    optimizer = ES(
        population_size=4, sigma=0.1, learning_rate=0.05, learning_rate_schedule=schedule
    )
    log_path = tmp_path / "run"
    await train(tiny(log_path, num_generations=3, optimizer=optimizer))
    before = contents(log_path)
    longer = tiny(log_path, num_generations=6, optimizer=optimizer)
    if isinstance(schedule, Constant):
        await train(longer)
        assert len(list(read_history(log_path / "history.jsonl"))) == 6
        return
    with pytest.raises(RunDirectoryError) as caught:
        await train(longer)
    said, command = str(caught.value).split(": python -m es_cookbook ")
    assert "was 3, is 6, and learning_rate_schedule=Linear depends on it" in said
    assert contents(log_path) == before
    # What it advises is what goes on.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["es-cookbook", *command.split()[1:]])
        fork.cli()
    forked = load_config(tmp_path / "run-longer/config.json", TinyConfig, ["tests"])
    await train(chz.replace(forked, behavior_if_log_dir_exists="resume"))
    assert len(list(read_history(tmp_path / "run-longer/history.jsonl"))) == 6


@chz.chz
class _Cool(Surrogate):
    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        return chz.replace(sampling, temperature=0.5)


@pytest.mark.parametrize("kind", [Surrogate, BestAnswers, _Cool])
async def test_with_a_surrogate_the_centre_answers_and_every_genome_scores_what_it_said(
    tmp_path: Path, kind: type[Surrogate]
) -> None:
    FakeEngineBuilder.made.clear()
    unbroken = await assert_goes_on_exactly(tmp_path, surrogate=kind(attempts=6))
    assert {who for who, _ in FakeEngineBuilder.made[0].requests} == {"centre"}
    rows = read_metrics(unbroken / "metrics.jsonl")
    assert [row["progress/rollouts"] for row in rows] == [*range(12, 145, 12), 144]
    logged = untimed(unbroken / "rollouts.jsonl")
    assert len(logged) == 12 * 2 * 2 and {row["genome"] for row in logged} == {0}
    measured = {"objective/mean", "time/answer"}
    assert measured <= rows[0].keys() and "reward/max_genome" not in rows[0]
    assert 0 <= rows[0]["env/all/correct"] <= 1
    assert all(row["objective/std_genomes"] > 0 for row in rows[:-1])

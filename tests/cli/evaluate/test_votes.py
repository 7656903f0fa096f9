"""Genomes that vote: who they are, what they say, and what cannot be counted."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.common.options import built
from es_cookbook.recipes.countdown.train_cli import CLIConfig
from es_cookbook.rl.types import ANSWER, Trajectory
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import run
from es_cookbook.runs.recorded import open_run, rebuild
from tests.said import typed
from tests.tiny_run import tiny, write_tiny_model

OPTIONS = {
    "optimizer.population_size": "8",
    "optimizer.sigma": "0.03",
    "dataset.num_train": "200",
    "dataset.num_test": "12",
    "num_generations": "2",
    "eval_every": "0",
    "trackers": "JsonlTrackerBuilder",
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("votes")
    run(built(CLIConfig, {**OPTIONS, "log_path": str(path / "run")}))
    model = str(write_tiny_model(path / "model"))
    run(tiny(path / "unread", num_generations=2, model_name=model))
    return path


@pytest.fixture(autouse=True)
def inside(here: Path) -> Iterator[None]:
    with contextlib.chdir(here):
        yield


def measured(*options: str) -> dict[str, Any]:
    Path("found.json").unlink(missing_ok=True)
    done = typed("evaluate", "run", "output=found.json", *options)
    assert done.returncode == 0, done.stderr
    return {**json.loads(Path("found.json").read_text()), "said": done.stdout}


@pytest.mark.slow
async def test_the_best_genomes_of_a_generation_answer_and_the_most_votes_count() -> None:
    found = measured("voters=3", "generation=1", "against=@1")
    fitness_G = list(read_history(Path("run/history.jsonl")))[1].fitness_G
    best = sorted(range(8), key=lambda g: -fitness_G[g])[:3]
    rebuilt = await rebuild(open_run(Path("run")))
    try:
        await rebuilt.go_to(1)
        for number, problem in enumerate(found["problems"][:6]):
            said: list[tuple[str | None, float]] = []
            for genome in best:
                played = await rebuilt.play(genome, "test", number, {})
                assert isinstance(played.rollout, Trajectory)
                (turn,) = played.rollout.transitions
                said.append((turn.logs.get(ANSWER), turn.metrics["correct"]))
            assert problem["metrics"]["correct"] == [correct for _, correct in said]
            votes = Counter(answer for answer, _ in said if answer is not None)
            most = max(votes.values(), default=0)
            worth = [correct for answer, correct in said if votes[answer] == most and most]
            vote = sum(worth) / len(worth) if worth else 0.0
            assert problem["metrics"]["vote"] == [vote] * 3
    finally:
        await rebuilt.close()
    vote, (of_votes,) = (
        found["estimates"]["all"]["vote"]["value"],
        [each for each in found["comparisons"] if each["metric"] == "vote"],
    )
    assert of_votes["first"] == pytest.approx(vote)
    assert found["estimates"]["all"]["maj@3"]["value"] == pytest.approx(vote)
    assert "run, the best 3 genomes of generation 1" in found["said"]
    assert "12 held-out problems, 36 rollouts: one attempt of each genome" in found["said"]
    assert found["against"]["generation"] == 1


def test_without_a_generation_the_last_one_votes_and_one_model_has_maj_at_k() -> None:
    assert measured("voters=2")["generation"] == 1
    found = measured("attempts=4", "temperature=1")
    estimates = found["estimates"]["all"]
    assert estimates.keys() >= {"pass@4", "maj@4", "correct"} and "vote" not in estimates


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("run", "voters=9"), "generation 1 has 8 genomes with fitness, and 9 are asked for"),
        (("run", "voters=2", "attempts=2"), "voters answer once each: leave attempts=2 out"),
        (
            ("model_name=x", "recipe=countdown", "voters=2"),
            "voters are genomes of a run: give log_path=RUN",
        ),
        (
            ("unread", "voters=2", "trust=tests"),
            "votes need answers that can be compared, and the Envs of these problems report none",
        ),
    ],
)
def test_what_cannot_vote_is_refused_in_a_sentence(options: tuple[str, ...], sentence: str) -> None:
    done = typed("evaluate", *options)
    assert done.returncode != 0 and sentence in done.stderr

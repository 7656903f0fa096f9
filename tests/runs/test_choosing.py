"""Sizes that are chosen: a run that fits into its time, with room for its answers."""

from pathlib import Path

import anyio
import chz
import pytest

from es_cookbook import ES, Config, SamplingParams, Task
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.registry import part
from es_cookbook.population.centre_answers import Answer, AnswerSample, Pace
from es_cookbook.rl.objectives import SURROGATE_NAMES
from es_cookbook.rl.rewards.matching import Exact
from es_cookbook.runs import choosing
from es_cookbook.runs.config import SIZES
from es_cookbook.runs.directory.directory import Recorded
from es_cookbook.runs.history.store import HistoryStore
from es_cookbook.runs.program import train
from tests.runs.records import HEADER, make_record
from tests.tiny_run import tiny

PACE = Pace(prompt=0.0005, sampled=0.002)


def config(size: tuple[str, ...] = SIZES, **fields: object) -> Config:
    task = Task(source="rows.jsonl", prompt="{question}", reward=Exact())
    made = Config(model_name="model", dataset=task, log_path="run", optimizer=ES(), size=size)
    return chz.replace(made, **fields)


def answer(
    num_tokens: int = 20, ending: str = "stop", text: str = "It is 12.", **more: object
) -> Answer:
    fields: dict[str, object] = {"reward": 0.5, "gold": "12", "gold_tokens": 2, **more}
    return Answer(text, 60, num_tokens, ending, **fields)  # pyright: ignore[reportArgumentType]


def sample(*answers: Answer, pace: Pace = PACE) -> AnswerSample:
    answers = answers or (answer(),) * 16
    return AnswerSample(answers, pace, len(answers))


@pytest.mark.parametrize("seconds", [300.0, 3600.0, 36_000.0])
@pytest.mark.parametrize("slower", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("surrogate", [None, *SURROGATE_NAMES])
def test_a_run_takes_about_the_time_that_it_has(
    surrogate: str | None, slower: float, seconds: float
) -> None:
    pace = Pace(PACE.prompt * slower, PACE.sampled * slower)
    given = config(surrogate=surrogate and part("surrogates", surrogate).load()())
    found = choosing.sized(given, sample(pace=pace), (5000, 200), seconds)
    run = choosing.with_options(given, {**found.chosen, "size": ()})
    # By hand: 60 tokens of prompt and 20 of answer each, and the evaluations that the run makes.
    # A genome's answers take 1.15 times as long as the centre's.
    rollout = genome = 1.15 * (60 * pace.prompt + 20 * pace.sampled)
    if run.surrogate is not None:
        read = {"centre": 16 * 20, "best": 20, "gold": 2}[str(surrogate)]
        by_centre = run.surrogate.attempts / run.optimizer.population_size * rollout
        genome = 1.15 * (60 + 2 * read) * pace.prompt + by_centre
    num_test = getattr(run.dataset, "num_test", None) or 200
    evaluations = sum(map(run.evaluates, range(run.num_generations + 1)))
    generations = genome * run.num_generations * choosing.rollouts_of(run)
    by_hand = generations + rollout * evaluations * num_test
    assert found.seconds == pytest.approx(by_hand, rel=0.12)
    if run.num_generations > 6:  # The smallest run may take longer than there is time.
        assert 0.6 * seconds < by_hand < 1.1 * seconds
        assert genome * choosing.rollouts_of(run) < seconds / 5
    else:
        assert surrogate is not None and seconds == 300.0
    assert surrogate is None or "optimizer.population_size" not in found.chosen


@pytest.mark.parametrize("path", SIZES)
def test_only_free_options_that_the_config_has_are_chosen(path: str) -> None:
    free = tuple(each for each in SIZES if each != path)
    assert set(choosing.sized(config(free), sample(), (5000, 200), 600.0).chosen) <= set(free)
    assert choosing.has(config(), path) and not choosing.has(config(), f"{path}.none")


@pytest.mark.parametrize("seconds", [600.0, -600.0])
def test_the_smallest_run_is_chosen_if_nothing_fits(seconds: float) -> None:
    found = choosing.sized(config(), sample(pace=Pace(0.1, 1.0)), (100, 200), seconds)
    assert found.seconds > 600
    assert found.chosen["num_generations"] == 6
    assert found.chosen["optimizer.population_size"] == 16
    few = choosing.sized(config(), sample(), (3, 0), 36_000.0).chosen
    assert few["dataset.problems_per_generation"] == 3, "no more than there are"


def test_answers_have_room_for_those_of_the_centre_and_for_the_gold_answers() -> None:
    def room(*answers: Answer) -> object:
        return choosing.sized(config(), sample(*answers), (100, 0), 600.0).chosen.get(
            "sampling.max_tokens"
        )

    assert room(*[answer(20)] * 16) == 40  # 1.5 · 20 + 8, rounded up to a multiple of 8
    assert room(*[answer(4, gold_tokens=60)] * 16) == 104
    # Base models: no answer ends. Two and a half gold answers are room enough.
    assert room(*[answer(256, "length", gold_tokens=10)] * 16) == 40
    # Nothing is known of answers that the clock cut, or without gold answers.
    assert room(*[answer(20, "clock")] * 16) is None
    assert room(*[answer(250)] * 16) is None
    assert room(*[answer(256, "length", gold=None, gold_tokens=0)] * 16) is None


def test_answers_that_go_on_after_their_line_end_with_it() -> None:
    given = config(sampling=SamplingParams(stop=None))
    on = answer(256, "length", text=" 12\nQ: 3 + 4\nA: 7\nQ: 5", gold="12")
    assert choosing.goes_on([on] * 9 + [answer()] * 7)
    assert not choosing.goes_on([on] * 7 + [answer()] * 9)
    assert not choosing.goes_on([answer(256, "length", text=on.text, gold="1\n2")] * 16)
    found = choosing.sized(given, sample(*[on] * 16), (100, 0), 600.0)
    assert found.chosen["sampling.stop"] == ("\n",)
    # 3 of 22 characters are in the line: 1 + 256 · 3/22 tokens.
    assert found.length == pytest.approx(1 + 256 * 3 / len(on.text), abs=1)
    # An end that was given is left alone.
    other = config(sampling=SamplingParams(stop=("###",)))
    assert "sampling.stop" not in choosing.sized(other, sample(*[on] * 16), (100, 0), 600.0).chosen


def test_the_choice_can_be_pasted_into_a_shell() -> None:
    sizes = choosing.Sizes({"dataset.tags": ("a b",), "num_generations": 12}, 300.0, 20.4)
    said = choosing.told(choosing.with_options(config(), {"num_generations": 12}), sizes)
    assert said.startswith("12 generations of 30 genomes x ")
    assert "of about 20 tokens (at most 256) take about 5.0 min here, for minutes=10: " in said
    assert said.endswith("""'dataset.tags=["a b"]' num_generations=12""")


def test_a_recorded_run_keeps_its_sizes(tmp_path: Path) -> None:
    chosen = {"num_generations": 7, "optimizer.population_size": 4, "dataset.num_test": None}
    given = config(tuple(chosen), log_path=str(tmp_path), minutes=5.0)
    run = choosing.with_options(given, {**chosen, "size": (), "minutes": 10.0})
    assert choosing.as_recorded(given, Recorded(tmp_path)) == given
    (tmp_path / "config.json").write_text(config_to_json(run))
    assert choosing.as_recorded(given, Recorded(tmp_path)) == given, "no generation is recorded yet"
    history = HistoryStore(tmp_path / "history.jsonl", HEADER)
    history.append(make_record(0))
    history.close()
    assert choosing.as_recorded(given, Recorded(tmp_path)) == run


def test_sizes_and_minutes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="size=seed: accepted are "):
        config(("seed",))
    with pytest.raises(ConfigError, match="minutes must be above 0"):
        config(minutes=0.0)
    with pytest.raises(ConfigError, match="minutes has no effect"):
        anyio.run(train, tiny(tmp_path, minutes=5.0))

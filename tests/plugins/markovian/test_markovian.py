"""The recipe markovian: its Env on a real engine, its data, its command line, and runs."""

import math
import random
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path

import pytest

from es_cookbook import (
    EnvGroupBuilder,
    LowRank,
    Observation,
    PopulationSampler,
    SamplingParams,
    TorchEngineBuilder,
)
from es_cookbook.__main__ import main as es_cookbook
from es_cookbook.common.errors import DataError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.engines.base import Engine, LogprobsRequest, Target
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.plugins.markovian.dataset import MarkovianDatasetBuilder
from es_cookbook.plugins.markovian.env import MarkovianEnv, MarkovianProblem
from es_cookbook.plugins.markovian.problems import Problem, Sum, generate_sums
from es_cookbook.plugins.markovian.train_cli import CLIConfig
from es_cookbook.rl.messages.encoder import as_text
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Action, Trajectory, TrajectoryGroup, Transition
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.recipe_problems import short_run, write_rows
from tools.bundled import markovian as warm_start
from tools.small_model import build_tokenizer

TOKENIZER = build_tokenizer(warm_start.CHARACTERS)
SHORT = (
    *("trackers=JsonlTrackerBuilder", "num_generations=2", "eval_every=0"),
    *("dataset.problems_per_generation=2", "dataset.num_train=8", "dataset.num_test=4"),
)


def problem(
    answer: str = "19", markovian: bool = True, question: str = "3+5+9+2"
) -> MarkovianProblem:
    builder = MarkovianDatasetBuilder(markovian=markovian)
    return builder.builder("it", Problem(question, answer), TOKENIZER)


def text_of(tokens_T: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(tokens_T)))


def genomes(count: int, sigma: float = 0.3) -> list[Genome]:
    return [Genome((Term(derive_seed(0, "test", g), sigma),)) for g in range(count)]


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[Engine]:
    built = await TorchEngineBuilder(device="cpu", num_lanes=1)(
        model_name=CLIConfig().model_name, search_space=LowRank()
    )
    yield built
    await built.close()


class Given(MarkovianEnv):
    """Thinks what it is given."""

    thought = ""

    async def act(self, observation: Observation) -> Action:
        return Action((), self.thought, "stop")


async def graded(
    engine: Engine, of: MarkovianProblem, thought: str, population: list[Genome] | None = None
) -> list[Transition]:
    """What the centre, or each genome, earns with this thought; without the base's part."""

    def make_env() -> Given:
        env = Given(of.tokenized)
        env.thought = thought
        return env

    given = ProblemGroupBuilder(make_env, "given")
    groups = await rollouts(engine, given, population)
    found: list[Transition] = []
    for (trajectory,) in groups.trajectories_G_K:
        assert isinstance(trajectory, Trajectory), trajectory.traceback
        found.append(trajectory.transitions[0])
    return found


async def rollouts(
    engine: Engine, of: EnvGroupBuilder, population: list[Genome] | None = None
) -> TrajectoryGroup:
    sampling = SamplingParams(max_tokens=12)
    sampler = PopulationSampler(engine, sampling=sampling, max_failed_fraction=0.0)
    if population is None:
        return (await sampler.rollout_centre([of], sampling))[0]
    return (await sampler.rollout(0, [of], population))[0]


async def mean_logprob(engine: Engine, target: Target, read: str, gold: str) -> float:
    """From the engine itself, of texts written out."""
    request = LogprobsRequest(target, as_text(TOKENIZER, read), as_text(TOKENIZER, gold))
    logprobs_T = await engine.logprobs(request)
    return math.fsum(logprobs_T) / len(logprobs_T)


# --- reading and the reward ----------------------------------------------------------------------


def test_the_reader_sees_the_thought_and_not_the_question_unless_it_is_to() -> None:
    def read(markovian: bool, question: str) -> str:
        asked = problem("1", markovian, question).tokenized
        return text_of(asked.read_T("=8,17,19", 100))

    assert read(True, "3+5+9+2") == read(True, "1+1") == "?:=8,17,19>"
    assert read(False, "3+5+9+2") == "3+5+9+2:=8,17,19>"
    # A question that holds the redaction mark, or a brace, is no template.
    assert read(True, "?+1") == "?:=8,17,19>"
    assert read(False, "?+1") == "?+1:=8,17,19>"


def test_a_thought_that_does_not_fit_loses_its_end_and_never_the_mark() -> None:
    asked = problem().tokenized  # Four tokens of the context are kept for an answer.
    assert text_of(asked.read_T("=8,17,19", 10)) == "?:=8,>"
    assert text_of(asked.read_T("1" * 100_000, 10)) == "?:111>"
    assert text_of(asked.read_T("=8", 0)) == "?:>"


def test_names_of_special_tokens_in_a_thought_are_text() -> None:
    assert TOKENIZER.eos_token_id in TOKENIZER.encode("1<eos>2")
    assert TOKENIZER.eos_token_id not in as_text(TOKENIZER, "1<eos>2")


@pytest.mark.parametrize(
    ("thought", "leaks"),
    [("=8,17,19", 1), ("", 0), ("19", 1), ("190,119", 0), ("?:3+5+9+2>", 0), ("<eos>19<eos>", 1)],
)
async def test_the_reward_is_how_likely_the_answer_is_behind_the_thought(
    engine: Engine, thought: str, leaks: float
) -> None:
    (step,) = await graded(engine, problem(), thought)
    read = f"?:{thought}>"
    assert step.reward == pytest.approx(await mean_logprob(engine, "centre", read, "19"), abs=1e-5)
    assert step.metrics["logprob"] == step.reward
    assert step.metrics["leaks"] == leaks
    assert step.reading is not None and len(step.reading.continuation_T) == 2
    assert math.fsum(step.reading.logprobs_T) / 2 == pytest.approx(step.reward)


async def test_a_genome_scores_its_own_thought(engine: Engine) -> None:
    population = genomes(3)
    steps = await graded(engine, problem(), "=8,17,19", population)
    rewards_G = [step.reward for step in steps]
    assert len(set(rewards_G)) == 3, "one thought, and three readers"
    async with engine.lend() as host:
        await host.load(population)
        expected_G = [
            await mean_logprob(engine, g, "?:=8,17,19>", "19") for g in range(len(population))
        ]
    base = await mean_logprob(engine, "base", "?:=8,17,19>", "19")
    assert rewards_G == pytest.approx(expected_G, abs=1e-5)
    assert all(abs(reward - base) > 1e-3 for reward in rewards_G)


async def test_the_group_reward_subtracts_the_log_probability_of_the_base(engine: Engine) -> None:
    group = await rollouts(engine, problem(), genomes(2))
    assert group.group_rewards_G_K is not None
    thought_T = (await rollouts(engine, problem())).trajectories_G_K[0][0]
    assert isinstance(thought_T, Trajectory)  # The centre is the base.
    own = thought_T.transitions[0]
    base = await mean_logprob(engine, "base", f"?:{own.action.text}>", "19")
    for (given,) in group.group_rewards_G_K:
        assert given.reward == pytest.approx(-base, abs=1e-5)
        assert given.metrics["base_logprob"] == pytest.approx(base, abs=1e-5)
    alone = await rollouts(engine, problem())
    assert alone.rewards_G_K[0][0] == pytest.approx(0.0, abs=1e-6), "the centre is the base"


async def test_the_measured_answer_is_sampled_after_the_thought(engine: Engine) -> None:
    (right,) = await graded(engine, problem("19"), "=8,17,19")
    (wrong,) = await graded(engine, problem("19"), "=8,17,26")
    assert (right.metrics["correct"], right.logs["answer"]) == (1, "19")
    assert (wrong.metrics["correct"], wrong.logs["answer"]) == (0, "26")


# --- data ----------------------------------------------------------------------------------------


def test_sums_are_worked_out_as_arithmetic_has_it() -> None:
    rng = random.Random(0)
    for total in islice(generate_sums(0, "train", num_terms=6, num_digits=2, operations="+-*"), 60):
        assert total.totals[-1] == eval(total.question), "of digits and signs alone"
        assert total.problem.answer == total.thought.split(",")[-1]
        shuffled = list(zip(total.signs, total.terms, strict=True))
        rng.shuffle(shuffled)
        signs, terms = zip(*shuffled, strict=True)
        assert Sum(terms, signs).fold == "train", "in any order"


async def test_an_answer_needs_tokens_and_room_where_it_is_read(tmp_path: Path) -> None:
    def rows(answer: str) -> MarkovianDatasetBuilder:
        source = write_rows(tmp_path / "rows.jsonl", [{"question": "1", "answer": answer}])
        return MarkovianDatasetBuilder(source=source, num_test=0, problems_per_generation=1)

    built = await rows("2" * 50)(TOKENIZER)
    with pytest.raises(DataError, match="leaves no room"):
        await built.train.validate(50)
    await built.train.validate(64)
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: .* makes no tokens of 'é'"):
        await rows("é")(TOKENIZER)


# --- runs ----------------------------------------------------------------------------------------


def test_the_reward_is_the_difference_to_the_base(tmp_path: Path) -> None:
    first, second, last = short_run("markovian", tmp_path / "run", "eval_every=0")
    assert first["test/reward/mean"] == pytest.approx(0.0, abs=1e-6), "the centre is the base"
    for row in (first, second):
        expected = row["env/all/logprob"] - row["env/all/base_logprob"]
        assert row["reward/mean"] == pytest.approx(expected)
    assert last["test/reward/mean"] != 0.0
    assert first["test/env/all/base_logprob"] == last["test/env/all/base_logprob"], "frozen"


def test_a_policy_gradient_reads_with_the_model_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("attempts=8", "learning_rate=0.003", f"log_path={tmp_path / 'run'}", *SHORT)
    program = ["es-cookbook", "policy_gradient", "recipe=markovian", *options]
    monkeypatch.setattr("sys.argv", program)
    es_cookbook()
    assert capsys.readouterr().out.startswith("test/env/all/correct ")
    first, _, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert first["test/reward/mean"] == pytest.approx(0.0, abs=1e-6)
    assert last["test/env/all/base_logprob"] == first["test/env/all/base_logprob"], "frozen"
    assert last["test/reward/mean"] != 0.0, "it reads with other weights than the base"

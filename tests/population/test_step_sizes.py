"""σ and α that a run finds: by what the centre's answers lose, and where nothing can be found."""

import dataclasses
import math
import re
from pathlib import Path

import chz
import numpy as np
import pytest

from es_cookbook import ES, Observation, PopulationSampler, SamplingParams, open_run
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import as_program
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.optimizers.adam import Adam
from es_cookbook.evolution.schedules import Cosine, Table
from es_cookbook.population import centre_answers, step_sizes
from es_cookbook.population.step_sizes import LOSS, FoundSigma, options_of
from es_cookbook.rl.types import Action
from es_cookbook.runs.config import closing
from es_cookbook.runs.evolution_run import tried_sigmas
from es_cookbook.runs.history.store import read_header
from es_cookbook.runs.program import run as run_config
from es_cookbook.runs.tracking.jsonl import read_metrics
from es_cookbook.runs.tracking.reading import read_run
from tests.fakes import FakeEngine, problem
from tests.runs.test_optimizers_in_runs import ITSELF, SmallConfig, parsed
from tests.said import typed
from tests.tiny_run import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def config(model: Path, log_path: Path, *options: str) -> SmallConfig:
    return parsed(ITSELF, model, log_path, *options)


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that found its numbers; tests only read it."""
    path = tmp_path_factory.mktemp("recorded") / "run"
    run_config(config(model, path, "num_generations=2"))
    return path


async def test_the_centres_answers_lose_what_is_meant(model: Path, tmp_path: Path) -> None:
    run = config(model, tmp_path / "run", "sampling.max_tokens=8")
    found = await tried_sigmas(run)
    assert all((loss < LOSS) == (sigma <= found.sigma) for sigma, loss in found.losses.items())
    # The same by the engine alone.
    engine = await run.engine(model_name=str(model), search_space=run.search_space)
    async with closing(engine):
        datasets = await run.dataset(engine.tokenizer)
        genomes_G = [
            Genome((Term(derive_seed(run.seed, "sigma", i), sign * found.sigma),))
            for i in range(2)
            for sign in (1, -1)
        ]
        await engine.load(genomes_G)
        losses: list[float] = []
        for builder in datasets.train.get_batch(0):
            env = (await builder.make_envs(1)).envs[0]
            prompt_T = (await env.initial_observation()).tokens_T
            observation = Observation(prompt_T)
            action = await engine.sample(
                SampleRequest("centre", observation, SamplingParams(max_tokens=8))
            )
            scored = [
                math.fsum(await engine.logprobs(LogprobsRequest(who, prompt_T, action.tokens_T)))
                for who in ("centre", 0, 1, 2, 3)
            ]
            losses += [scored[0] - each for each in scored[1:]]
    assert np.mean(losses) == pytest.approx(LOSS, rel=0.3)


def test_what_was_found_is_in_the_header_and_is_what_the_run_has(recorded: Path) -> None:
    header = read_header(recorded / "history.jsonl")
    assert header is not None and header.found.keys() == {"sigma", "learning_rate"}
    sigma, rate = header.found["sigma"], header.found["learning_rate"]
    assert rate == sigma, "of four genomes in two generations: α/√4 is half a σ, the most"
    rows = read_metrics(recorded / "metrics.jsonl")
    assert [row["optimizer/sigma"] for row in rows[:2]] == [sigma, sigma]
    assert rows[0]["optimizer/learning_rate"] == rate / rows[0]["fitness/rms"]  # Of fitness=raw.
    assert read_run(recorded).config["optimizer.sigma"] == sigma
    genome = open_run(recorded, trust=["tests"]).genome(1, 0)
    assert abs(genome.terms[0].coefficient) == sigma


def test_a_fork_keeps_what_was_found_but_for_the_rate_of_another_population(
    recorded: Path, tmp_path: Path
) -> None:
    def forks(output: str, *options: str) -> str:
        at = (f"log_path={recorded}", "generation=1", f"output={tmp_path / output}")
        return typed("fork", "trust=tests", *at, *options).stderr

    assert forks("longer", "num_generations=3") == ""
    done = typed("resume", f"log_path={tmp_path / 'longer'}", "trust=tests")
    assert done.returncode == 0, done.stderr
    ours, theirs = (read_header(path / "history.jsonl") for path in (tmp_path / "longer", recorded))
    assert ours is not None and theirs is not None and ours.found == theirs.found
    sigma = theirs.found["sigma"]
    for output, option, expected in (
        (
            "wide",
            "population_size=16",
            {"sigma": sigma, "learning_rate": float(f"{2 * sigma:.1e}")},
        ),
        ("near", "sigma=0.001", {"learning_rate": 0.001}),
        ("given", "learning_rate=0.5", {"sigma": sigma}),
    ):
        assert forks(output, f"optimizer.{option}") == ""
        header = read_header(tmp_path / output / "history.jsonl")
        assert header is not None and header.found == pytest.approx(expected)
    sentence = "optimizer.learning_rate=auto is found before the first generation of a run"
    options = ("optimizer=adam", "optimizer.sigma=0.1", "optimizer.learning_rate=auto")
    assert sentence in forks("other", *options)
    assert not (tmp_path / "other").exists()


def test_a_fork_that_chooses_its_sizes_finds_what_belongs_to_them(
    recorded: Path, tmp_path: Path
) -> None:
    at = (f"log_path={recorded}", "generation=0", f"output={tmp_path / 'sized'}", "trust=tests")
    assert typed("fork", *at, "size=optimizer.population_size", "num_generations=1").stderr == ""
    done = typed("resume", f"log_path={tmp_path / 'sized'}", "trust=tests")
    assert done.returncode == 0, done.stderr
    header = read_header(tmp_path / "sized/history.jsonl")
    own = open_run(tmp_path / "sized", trust=["tests"]).config.optimizer
    assert header is not None and own.population_size >= 16
    assert header.found == pytest.approx(options_of(own, header.found["sigma"], 1))
    assert header.found["learning_rate"] / header.found["sigma"] > 1, "of four genomes it is 1"


CONSTANT = ES(sigma=0.004, learning_rate="auto", population_size=32)
LARGE = chz.replace(CONSTANT, population_size=512)
ALTERNATING = Table(generations=tuple(range(100)), factors=(1.0, 0.5) * 50)


@pytest.mark.parametrize(
    ("builder", "num_generations", "drift"),
    [
        (CONSTANT, 100, 1.5),
        (chz.replace(CONSTANT, population_size=8), 25, 1.5),
        (chz.replace(CONSTANT, learning_rate_schedule=Cosine()), 100, 1.5),
        (chz.replace(CONSTANT, learning_rate_schedule=ALTERNATING), 100, 1.5),
        (chz.replace(CONSTANT, warmup_generations=40), 80, 1.5),
        (LARGE, 4, 1.0),  # four steps of half a σ, the most
        (chz.replace(LARGE, learning_rate_schedule=ALTERNATING), 4, 0.79),  # ½ √(2 + 2/4)
        (chz.replace(LARGE, learning_rate_schedule=Table(factors=(3.0,))), 4, 1.0),
    ],
)
def test_the_noise_of_all_steps_adds_up_to_what_is_promised(
    builder: ES, num_generations: int, drift: float
) -> None:
    """α/√N · √Σf², of steps of at most half a σ."""
    rate = options_of(builder, 0.004, num_generations)["learning_rate"]
    factors_T = [builder.rate_factor(t, num_generations) for t in range(num_generations)]
    step = rate / math.sqrt(builder.population_size)
    assert step * max(factors_T) <= 0.5 * 0.004 * 1.05
    assert step * math.hypot(*factors_T) == pytest.approx(drift * 0.004, rel=0.05)


def test_found_rates_have_two_digits_and_are_lengths_where_steps_are() -> None:
    assert options_of(CONSTANT, 0.004, 100) == {"learning_rate": 0.0034}
    assert options_of(ES(learning_rate=0.02, population_size=16), 0.01, 9) == {"sigma": 0.01}
    adam = Adam(sigma=0.01, learning_rate="auto", population_size=16)
    assert options_of(adam, 0.01, 9) == {"learning_rate": 0.005}, "half a σ a generation"
    nothing = chz.replace(CONSTANT, learning_rate_schedule=Table(factors=(0.0,)))
    assert options_of(nothing, 0.004, 9) == {"learning_rate": 0.011}, "half a σ · √32"


class SlowEngine(FakeEngine):
    """Takes so many seconds a token, by its own clock; answers lose (sigma / `one`)² nats.

    Or another power of it.
    """

    def __init__(self, seconds: float, one: float, text: str = "1234", power: float = 2.0) -> None:
        super().__init__(answer=lambda who, request: text)
        self.seconds, self.one, self.now, self.num_said = seconds, one, 0.0, len(text)
        self.power = power

    def perf_counter(self) -> float:
        return self.now

    async def sample(self, request: SampleRequest) -> Action:
        self.now += self.seconds * (len(request.observation.tokens_T) + self.num_said)
        return await super().sample(request)

    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        self.now += self.seconds * (len(request.prompt_T) + len(request.continuation_T))
        who = self.who(request.target)
        sigma = abs(who.terms[0].coefficient) if isinstance(who, Genome) and who.terms else 0.0
        num_tokens = len(request.continuation_T)
        return [-((sigma / self.one) ** self.power) / num_tokens] * num_tokens


async def found_slowly(
    engine: SlowEngine, monkeypatch: pytest.MonkeyPatch, num_problems: int = 4
) -> FoundSigma:
    """Of four answers; each takes 6 tokens to read, and 40 seconds are there for all."""
    for module in (step_sizes, centre_answers):
        monkeypatch.setattr(module, "time", engine)
    sampler = PopulationSampler(engine, sampling=SamplingParams(max_tokens=100))
    problems_P = [problem(number, "train") for number in range(num_problems)]
    with as_program():
        return await step_sizes.find_sigma(sampler, problems_P)


async def test_a_search_with_time_reads_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await found_slowly(SlowEngine(seconds=1e-6, one=0.02), monkeypatch)
    tried = [2.0**-8, 0.02]
    assert list(found.losses) == pytest.approx(tried)
    assert list(found.losses.values()) == pytest.approx([(each / 0.02) ** 2 for each in tried])
    assert (found.sigma, found.shortened) == (0.02, "")
    assert "sigma=0.02 is where they lose 1; " in found.table()


async def test_a_search_stops_at_the_largest_sigma_of_the_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for soft prompts, whose loss stays low where the noise has replaced them."""
    engine = SlowEngine(seconds=1e-6, one=0.5)
    engine.space = dataclasses.replace(engine.space, largest_sigma=0.0362)
    found = await found_slowly(engine, monkeypatch)
    assert list(found.losses) == [2.0**-8, 0.0362]
    assert (
        found.sigma == 0.036 and "sigma=0.036 is the largest of this search space" in found.table()
    )


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (math.inf, "no sigma from 0.0039 to 2.6e\\+02 cost .* 1 nats; they cost 0 to 0;"),
        (1e-12, "no sigma from 6e-08 to 0.0039 cost .* 1 nats; they cost 1e\\+03 to 1e\\+03;"),
    ],
)
async def test_where_no_sigma_of_a_wide_range_changes_answers_so_much_it_is_said(
    one: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=said):
        await found_slowly(SlowEngine(seconds=1e-6, one=one), monkeypatch)


@pytest.mark.parametrize(
    ("seconds", "said", "read"),
    [
        (0.01, 4, ""),
        (0.2, 4, "4 answers, 4 tokens of about 4 in each"),
        (0.014, 80, "4 answers, 32 tokens of about 80 in each"),
        (0.07, 80, "1 answer, 32 tokens of about 80 in each"),
        (0.7, 4, "1 answer, 4 tokens of about 4 in each"),
    ],
)
async def test_a_search_keeps_to_its_time(
    seconds: float, said: int, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A σ under way when time is up is finished."""
    engine = SlowEngine(seconds, 0.02, "1" * said)
    found = await found_slowly(engine, monkeypatch)
    assert re.sub(".*read ", "", found.shortened) == read
    num_answers, num_tokens = map(int, re.findall(r"\d+", read)[:2] or (4, said))
    one_sigma = seconds * num_answers * (3 if read else 5) * (2 + num_tokens)
    assert engine.now <= 40 + 1.1 * one_sigma
    assert 0.5 < found.sigma / 0.02 < 2


@pytest.mark.parametrize(
    ("power", "sigma", "tried"),
    [
        (1.0, 0.018, [0.00390625, 0.00883883, 0.0132957, 0.0163069]),
        (3.0, 0.02, [0.00390625, 0.0452548, 0.02]),
        (4.0, 0.02, [0.00390625, 0.0625, 0.02]),
        (6.0, 0.011, [0.00390625, 0.0625, 0.0113137]),
        (8.0, 0.011, [0.00390625, 0.0625, 0.0111142]),
        (12.0, 0.011, [0.00390625, 0.0625, 0.0111142]),
    ],
)
async def test_a_search_with_little_time_goes_by_losses_on_both_sides(
    power: float, sigma: float, tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other laws than the square too, as far as there is time."""
    engine = SlowEngine(seconds=0.045, one=0.02, power=power)
    found = await found_slowly(engine, monkeypatch)
    assert list(found.losses) == pytest.approx(tried, rel=1e-3)
    assert found.sigma == sigma

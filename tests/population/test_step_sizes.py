"""σ and α that a run finds: by what the centre's answers lose, and where nothing can be found."""

import math
from pathlib import Path

import chz
import numpy as np
import pytest

from es_cookbook import train
from es_cookbook.common.schedules import Cosine
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import as_program
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.optimizers.adam import Adam
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.population import centre_answers, step_sizes
from es_cookbook.population.config import closing
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.population.step_sizes import LOSS, FoundSigma, learning_rate, options_of
from es_cookbook.rl.types import Action, Observation, SamplingParams
from es_cookbook.runs.history.store import read_header
from es_cookbook.runs.reading import read_run
from es_cookbook.runs.tracking.jsonl import read_metrics
from es_cookbook.train.setup import tried_sigmas
from tests.fakes import FakeEngine, problem
from tests.said import refused, typed
from tests.tiny_run import write_tiny_model
from tests.train.test_optimizers_in_runs import ITSELF, SmallConfig, parsed

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def config(model: Path, log_path: Path, *options: str) -> SmallConfig:
    return parsed(ITSELF, model, log_path, *options)


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that found its numbers; tests only read it."""
    path = tmp_path_factory.mktemp("recorded") / "run"
    train.run(config(model, path, "num_generations=2"))
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
    assert rate == learning_rate(sigma, population_size=4, factors_T=[1.0] * 2)
    rows = read_metrics(recorded / "metrics.jsonl")
    assert [row["optimizer/sigma"] for row in rows[:2]] == [sigma, sigma]
    assert rows[0]["optimizer/learning_rate"] == rate
    assert 0 < rows[0]["time/find_sigma"] < rows[0]["time/total"]
    assert rows[0]["time/total"] > rows[0]["time/find_sigma"] + rows[0]["time/sample"]
    assert "time/find_sigma" not in rows[1]
    assert read_run(recorded).config["optimizer.sigma"] == sigma
    genome = train.open_run(recorded, trust=["tests"]).genome(1, 0)
    assert abs(genome.terms[0].coefficient) == sigma


def test_a_fork_keeps_what_was_found(recorded: Path, tmp_path: Path) -> None:
    def forks(output: str, *options: str) -> str:
        at = (f"log_path={recorded}", "generation=1", f"output={tmp_path / output}")
        return typed("fork", "trust=tests", *at, *options).stderr

    assert forks("longer", "num_generations=3") == ""
    done = typed("resume", f"log_path={tmp_path / 'longer'}", "trust=tests")
    assert done.returncode == 0, done.stderr
    ours, theirs = (read_header(path / "history.jsonl") for path in (tmp_path / "longer", recorded))
    assert ours is not None and theirs is not None and ours.found == theirs.found
    sentence = "optimizer.learning_rate=auto is found before the first generation of a run"
    options = ("optimizer=adam", "optimizer.sigma=0.1", "optimizer.learning_rate=auto")
    assert sentence in forks("other", *options)
    assert not (tmp_path / "other").exists()


def test_alpha_follows_from_sigma_genomes_and_generations() -> None:
    assert learning_rate(0.004, 32, [1.0] * 100) == 0.0034  # 0.004 · √32 · 1.5 / √100
    assert learning_rate(0.004, 32, [1.0] * 4) == 0.011  # 0.004 · √32 · 0.5
    assert learning_rate(0.004, 32, [1.0, 0.5] * 50) == 0.0043  # 0.004 · √32 · 1.5 / √(1.25 · 50)
    assert learning_rate(0.004, 32, [2.0, 0.0]) == 0.0057  # no step is longer than 0.5 · σ
    assert options_of(ES(sigma="auto", population_size=16), 0.01, 9) == {"sigma": 0.01}
    slow = ES(learning_rate="auto", population_size=16, warmup_generations=4)
    factors_T = 0.25, 0.5, 0.75, *[1.0] * 6
    assert options_of(slow, 0.01, 9) == {"learning_rate": learning_rate(0.01, 16, factors_T)}
    cosine = chz.replace(slow, warmup_generations=0, learning_rate_schedule=Cosine())
    assert options_of(cosine, 0.004, 200)["learning_rate"] > 1.6 * 0.004 * 4 * 1.5 / math.sqrt(200)
    adam = Adam(sigma=0.01, learning_rate="auto", population_size=16)
    assert options_of(adam, 0.01, 9) == {"learning_rate": 0.02 / 4}


def test_the_table_says_where_no_reward_tells_genomes_apart() -> None:
    losses = {0.01: 1.2, 0.0025: 0.01}
    table = FoundSigma(0.008, losses, np.array([[1.0, 1.0, 0.0]]), 1.5).table()
    assert table.splitlines() == [
        "  sigma     nats that the centre's answers lose",
        "  0.0025    0.010",
        "  0.01      1.200",
        "sigma=0.008 is where they lose 1; reward of the centre 1, of 2 genomes 0 to 1, on 1 "
        "problem; 1.5 s",
    ]
    same = FoundSigma(0.008, losses, np.zeros((3, 5)), 1.5).table().splitlines()
    assert same[-1] == (
        "every reward was 0: answers change at this sigma, and no reward says which are better"
    )


async def test_a_search_without_time_tries_one_sigma_and_says_what_it_left_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config(model, tmp_path / "run", "sampling.max_tokens=8")
    found = await tried_sigmas(run)
    monkeypatch.setattr(step_sizes, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(step_sizes, "MOST_SECONDS", 0.0)
    with as_program():
        quick = await tried_sigmas(run)
    assert 0.5 < quick.sigma / found.sigma < 2
    assert len(quick.losses) == 1 < len(found.losses)
    assert quick.rewards_P_G.shape[1] == 1 and found.rewards_P_G.shape[1] == 8
    assert "for lack of time 2 genomes read" not in found.table()
    last = quick.table().splitlines()[-1]
    assert last.startswith("for lack of time 2 genomes read 1 answer, ")
    assert last.endswith(" in each; sigma is a guess, since no loss was near 1")
    said = [line for line in capsys.readouterr().err.splitlines() if "sigma" in line]
    assert "looking for sigma: the centre answers" in said[0]
    assert "about 3 sigmas are tried, about " in said[1] and last.split("; ")[0] in said[1]
    tried = [float(line.split()[1]) for line in said[2:]]
    assert tried == pytest.approx(list(quick.losses), rel=0.1)


def four(*_: object) -> str:
    return "1234"


class SlowEngine(FakeEngine):
    """Takes so many seconds a token, by its own clock; answers lose (sigma / `one`)² nats."""

    def __init__(self, seconds: float, one: float) -> None:
        super().__init__(answer=four)
        self.seconds, self.one, self.now = seconds, one, 0.0

    def perf_counter(self) -> float:
        return self.now

    async def sample(self, request: SampleRequest) -> Action:
        self.now += self.seconds * (len(request.observation.tokens_T) + 4)
        return await super().sample(request)

    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        self.now += self.seconds * (len(request.prompt_T) + len(request.continuation_T))
        who = self.who(request.target)
        sigma = abs(who.terms[0].coefficient) if isinstance(who, Genome) and who.terms else 0.0
        num_tokens = len(request.continuation_T)
        return [-((sigma / self.one) ** 2) / num_tokens] * num_tokens


async def found_slowly(engine: SlowEngine, monkeypatch: pytest.MonkeyPatch) -> FoundSigma:
    """Of four answers; each takes 7 tokens to read, and 30 seconds are there for all."""
    for module in (step_sizes, centre_answers):
        monkeypatch.setattr(module, "time", engine)
    sampler = PopulationSampler(engine, sampling=SamplingParams(max_tokens=40))
    return await step_sizes.find_sigma(sampler, [problem(number, "train") for number in range(4)])


async def test_a_search_with_little_time_goes_by_the_power_law(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SlowEngine(seconds=0.1, one=0.02)
    found = await found_slowly(engine, monkeypatch)
    assert found.sigma == 0.02 and len(found.losses) == 2
    assert found.shortened.endswith("2 genomes read 4 answers, 4 tokens of about 4 in each")


@pytest.mark.parametrize("one", [math.inf, 1e-4, 0.02])
async def test_a_search_ends_with_the_sigma_under_way_when_time_is_up(
    one: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SlowEngine(seconds=0.5, one=one)
    found = await found_slowly(engine, monkeypatch)
    assert len(found.losses) == 1
    assert engine.now <= 30 + 3 * 3.5, "three readers of one answer"
    assert "2 genomes read 1 answer, " in found.shortened
    assert found.shortened.endswith("no loss was near 1") == (one != 0.02)
    assert found.sigma == {math.inf: 0.062, 1e-4: 0.00024, 0.02: 0.02}[one]


def test_the_table_without_rewards() -> None:
    found = FoundSigma(0.008, {0.01: 1.2}, np.zeros((0, 0)), 1.5, "for lack of time less")
    assert found.table().splitlines()[2:] == [
        "sigma=0.008 is where they lose 1; 1.5 s",
        "for lack of time less",
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["optimizer=cma", "optimizer.sigma=auto"], "optimizer.sigma=auto: it must be float"),
        (["optimizer=genetic", "optimizer.sigma=auto"], "optimizer.sigma=auto: it must be float"),
        (["optimizer=qes", "optimizer.sigma=auto"], "optimizer.sigma=auto: it must be float"),
        (["optimizer.sigma=some"], "optimizer.sigma=some: it must be float | 'auto'"),
        (
            ["optimizer=clip_up", "optimizer.learning_rate=auto"],
            "learning_rate cannot be auto for ClipUp (it finds sigma): give it a number",
        ),
    ],
)
def test_optimizers_that_cannot_find_their_numbers_say_so(
    options: list[str], sentence: str
) -> None:
    assert sentence in refused("countdown", *options)

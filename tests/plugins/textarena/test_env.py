"""Games of the real textarena as problems: how they are asked, played, ended and refused."""

import random
import string
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import pytest

from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.plugins.textarena.env import TextArenaDatasetBuilder, legal_moves
from es_cookbook.recipes.countdown.train_cli import CLIConfig, main
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Action, Observation, Policy, SamplingParams, Trajectory
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.fakes import FakePolicy
from tools.small_model import build_tokenizer

pytest.importorskip("textarena", reason="textarena is not installed")

TOKENIZER = build_tokenizer(string.ascii_letters + string.digits + string.punctuation + "ĠĊ")
HANOI = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]


class Player(FakePolicy):
    """Answers what a function says to what it is shown; the base model is another."""

    def __init__(self, answer: Callable[[str], str], base: "Player | None" = None) -> None:
        self.answer = answer
        self.shown: list[str] = []
        self._base = base

    async def sample(
        self,
        observation: Observation,
        params: SamplingParams | None = None,
        seed: int | None = None,
    ) -> Action:
        await anyio.sleep(0)
        self.shown.append(TOKENIZER.decode(observation.tokens_T))
        return Action((5,), self.answer(self.shown[-1]), "stop")

    @property
    def base(self) -> Policy:
        assert self._base is not None
        return self._base


def one_after_the_other(moves: Sequence[str]) -> Callable[[str], str]:
    rest = iter(moves)
    return lambda _: next(rest)


def first_listed(shown: str) -> str:
    return legal_moves(shown)[0]


async def problems(**fields: object) -> list[ProblemGroupBuilder]:
    built = await TextArenaDatasetBuilder(**fields)(TOKENIZER)
    await built.train.validate(4096)
    return [problem for problem in built.test_P if isinstance(problem, ProblemGroupBuilder)]


async def played(problem: ProblemGroupBuilder, player: Player) -> Trajectory:
    (env,) = (await problem.make_envs(1)).envs
    return await run_rollout(env, player)


def metrics_of(trajectory: Trajectory) -> dict[str, float]:
    return dict(trajectory.transitions[-1].metrics)


async def test_a_game_that_is_solved_earns_its_reward() -> None:
    (problem,) = await problems(game="TowerOfHanoi-v0", num_test=1)
    moves = [f"<think>Why not [A B] or [{move}]?</think>[{move}]" for move in HANOI]
    player = Player(one_after_the_other(moves))
    solved = await played(problem, player)
    assert solved.reward == 1
    assert metrics_of(solved) == {"correct": 1, "invalid": 0, "unfinished": 0, "turns": 7}
    assert "A: [3, 2, 1]" in player.shown[0] and "[A C]" in player.shown[0]
    assert "C: [1]" in player.shown[1], "each turn shows what came of the last"


async def test_invalid_moves_end_a_game_and_so_does_the_limit_of_turns() -> None:
    (problem,) = await problems(game="TowerOfHanoi-v0", num_test=1)
    invalid = await played(problem, Player(lambda _: "no"))
    assert metrics_of(invalid) == {"correct": 0, "invalid": 1, "unfinished": 0, "turns": 2}
    assert "Invalid Move" in invalid.transitions[-1].logs["result"]
    (short,) = await problems(game="TowerOfHanoi-v0", num_test=1, max_turns=3)
    unfinished = await played(short, Player(one_after_the_other(HANOI)))
    assert unfinished.reward == 0
    assert metrics_of(unfinished) == {"correct": 0, "invalid": 0, "unfinished": 1, "turns": 3}


async def test_two_players_take_turns_at_being_the_policy() -> None:
    games = await problems(game="TicTacToe-v0", num_test=6)
    assert [game.tags for game in games] == [("player_0",), ("player_1",)] * 3
    results = [await played(game, Player(first_listed)) for game in games]
    assert {result.reward for result in results} <= {-1.0, 0.0, 1.0}
    assert all(metrics_of(each)["correct"] == (each.reward == 1) for each in results)
    again = [await played(game, Player(first_listed)) for game in games]
    assert results == again, "the random player has the same luck"


async def test_the_base_model_can_be_the_opponent() -> None:
    games = await problems(game="ConnectFour-v0", num_test=2, opponent="base")
    for game in games:
        base = Player(lambda _: "[col 0]")
        won = await played(game, Player(lambda _: "[col 3]", base))
        assert metrics_of(won)["correct"] == (game.tags == ("player_0",)), "who begins is first"
        assert "Connect Four" in base.shown[0]


async def test_games_at_the_same_time_do_not_disturb_each_other() -> None:
    """Textarena draws from Python's global generator."""
    games = await problems(game="KuhnPoker-v0", num_test=8)
    alone = [await played(game, Player(first_listed)) for game in games]
    together: dict[int, Trajectory] = {}

    async def play(i: int) -> None:
        together[i] = await played(games[i], Player(first_listed))

    random.seed(5)
    expected = random.Random(5).random()
    async with anyio.create_task_group() as playing:
        for i in range(len(games)):
            playing.start_soon(play, i)
    assert [together[i] for i in range(len(games))] == alone
    assert random.random() == expected, "and leave everybody else's draws alone"
    assert len({each.transitions[0].observation for each in alone}) > 2


@pytest.mark.parametrize(
    ("game", "sentence"),
    [
        ("TowerOfHanio-v0", r"no game 'TowerOfHanio-v0'; did you mean 'TowerOfHanoi-v0'\?"),
        ("Wordle-v0", "Wordle-v0 fetches word lists, so it is not played here"),
        ("SpellingBee-v0", "SpellingBee-v0 fetches word lists"),
        ("TwentyQuestions-v0", "TwentyQuestions-v0 asks models behind an API"),
        ("ThreePlayerTicTacToe-v0", "ThreePlayerTicTacToe-v0 does not begin with 1 player or 2"),
        ("UsedCar-v0-balanced", "does not begin with 1 player or 2: ImportError"),
        ("GermanWhist-v0", "GermanWhist-v0 does not list legal moves"),
        ("ConnectFour-v0", "ConnectFour-v0 does not list legal moves.*dataset.opponent=base"),
    ],
)
def test_games_that_cannot_be_played_are_refused_by_name(game: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        TextArenaDatasetBuilder(game=game).check()
    assert "textarena.envs.Wordle.env" not in sys.modules, "importing it would fetch them"


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    built = await TextArenaDatasetBuilder(game="TowerOfHanoi-v0")(TOKENIZER)
    with pytest.raises(DataError, match=r"TowerOfHanoi-v0 with seed .* leaves no room"):
        await built.train.validate(100)


def test_a_run_over_a_game(tmp_path: Path) -> None:
    options = [
        "dataset=es_cookbook.plugins.textarena.env:TextArenaDatasetBuilder",
        *("dataset.game=TicTacToe-v0", "dataset.num_test=2", "dataset.problems_per_generation=2"),
        *("optimizer.population_size=4", "num_generations=1", "sampling.max_tokens=2"),
        *(f"log_path={tmp_path}/run", "trackers=JsonlTrackerBuilder"),
    ]
    seen: list[CLIConfig] = []
    run_cli(seen.append, CLIConfig, options)
    assert config_from_json(config_to_json(seen[0]), ["textarena"]) == seen[0]
    run_cli(main, CLIConfig, options)
    (first, *_) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {"env/all/invalid", "env/player_0/correct", "test/env/player_1/turns"} <= first.keys()

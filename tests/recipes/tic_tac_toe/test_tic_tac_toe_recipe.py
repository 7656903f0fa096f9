"""The recipe tic_tac_toe: games as group rewards, games against fixed opponents, runs."""

import functools
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from es_cookbook import Observation, SamplingParams
from es_cookbook.common.errors import DataError
from es_cookbook.plugins.branches import rewind
from es_cookbook.recipes.tic_tac_toe.dataset import OpeningGroup, TicTacToeDatasetBuilder, shown
from es_cookbook.recipes.tic_tac_toe.game import best_moves, legal_moves, question
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Action, Datasets, LostRollout, Trajectory
from tests.fakes import FakePolicy
from tests.recipe_problems import short_run
from tools.bundled import tic_tac_toe as warm_start
from tools.bundled.tic_tac_toe import careful_move, careless_move
from tools.small_model import build_tokenizer

TOKENIZER = build_tokenizer(warm_start.CHARACTERS)
PROMPTS = functools.partial(shown, TOKENIZER, "compact")
OPENING = "....OXX.O"


class Player(FakePolicy):
    """Knows the position from the prompt, and a way to answer it."""

    def __init__(self, way: str) -> None:
        self.way = way

    async def sample(
        self,
        observation: Observation,
        params: SamplingParams | None = None,
        seed: int | None = None,
    ) -> Action:
        shown = TOKENIZER.decode(observation.tokens_T)
        free = [cell for cell in range(1, 10) if shown[cell - 1] == str(cell)]
        x, o = ("#", "@") if len(free) % 2 else ("@", "#")
        position = "".join({x: "X", o: "O"}.get(sign, ".") for sign in shown[:9])
        assert question(position, "compact") == shown
        move = {
            "careful": careful_move,
            "careless": careless_move,
            "perfect": lambda position: best_moves(position)[0],
            "taken": lambda position: ({*range(1, 10)} - {*legal_moves(position)}).pop(),
        }[self.way](position)
        return Action((move,), str(move), "stop")


async def build(**fields: object) -> tuple[ProblemDataset[OpeningGroup], list[Any]]:
    """Training openings, and held-out games, each as if it had come by a pickle."""
    built: Datasets = await TicTacToeDatasetBuilder(**fields)(TOKENIZER)
    assert isinstance(built.train, ProblemDataset)
    await built.train.validate(512)
    return built.train, [pickle.loads(pickle.dumps(game)).make_env() for game in built.test_P]


async def test_a_tokenizer_that_cannot_tell_openings_apart_is_refused() -> None:
    with pytest.raises(DataError, match=r"makes the same tokens of several openings; .*words"):
        await TicTacToeDatasetBuilder()(build_tokenizer("123456789="))
    built = await TicTacToeDatasetBuilder()(TOKENIZER)
    with pytest.raises(DataError, match="leaves no room in the engine's context"):
        await built.train.validate(5)


async def group_of(*ways: str, draw: float = 0.5) -> list[dict[str, float]]:
    """Rewards and metrics of players of these ways; "lost" is one whose rollout was."""
    group = OpeningGroup(OPENING, PROMPTS, draw)
    policies = [Player("careful" if way == "lost" else way) for way in ways]
    envs = (await group.make_envs(len(ways))).envs
    trajectories: list[Trajectory | LostRollout] = [
        LostRollout("it raised", "") if way == "lost" else await run_rollout(env, policy)
        for way, env, policy in zip(ways, envs, policies, strict=True)
    ]
    found = await group.compute_group_rewards(trajectories, policies)
    return [{"reward": each.reward, **each.metrics} for each in found]


async def test_results_of_games_are_the_rewards() -> None:
    careful, perfect, taken = await group_of("careful", "perfect", "taken")
    assert taken == {**{"reward": 0, "wins": 0, "draws": 0, "losses": 1}, "illegal": 1}
    assert careful["reward"] == pytest.approx(1 - perfect["reward"] + 0.5)
    assert careful["wins"] >= 0.5 and careful["illegal"] == 0
    one, other = await group_of("careful", "careful")
    assert one == other
    assert (one["reward"], one["draws"]) == (0.5, 1)
    assert (await group_of("careful", "careful", draw=0.25))[0]["reward"] == 0.25


async def test_a_lost_rollout_plays_nobody() -> None:
    whole = await group_of("careful", "careless")
    assert await group_of("careful", "lost", "careless") == [whole[0], {"reward": 0.0}, whole[1]]
    assert await group_of("lost", "lost") == [{"reward": 0.0}] * 2
    assert (await group_of("careful"))[0]["reward"] == 0.0, "alone"


@pytest.mark.parametrize(("way", "earned"), [("perfect", {0.5, 1.0}), ("taken", {0.0})])
@pytest.mark.parametrize("opponent", ["random", "perfect"])
async def test_games_against_fixed_opponents(way: str, earned: set[float], opponent: str) -> None:
    (_, games), (_, again) = [await build(random_games=2, perfect_games=1) for _ in range(2)]
    for pair in zip(games, again, strict=True):
        if pair[0].opponent != opponent:
            continue
        rollouts = [await run_rollout(env, Player(way)) for env in pair]
        assert rollouts[0] == rollouts[1], "the same opponent's moves"
        metrics = rollouts[0].transitions[-1].metrics
        assert metrics["illegal"] == (way == "taken")
        assert rollouts[0].reward in earned
        assert metrics[f"loses_to_{opponent}"] == (rollouts[0].reward == 0)
        assert metrics[f"draws_with_{opponent}"] == (rollouts[0].reward == 0.5)
        assert metrics[f"wins_against_{opponent}"] == (rollouts[0].reward == 1)


FEW_GAMES = "dataset.random_games=1", "dataset.perfect_games=1"


def test_a_run_that_goes_on_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    options = FEW_GAMES
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    rows = short_run("tic_tac_toe", whole, *options)
    shutil.copytree(whole, parted)
    rewind.main(rewind.Rewind(log_path=str(parted), generation=1))
    resume = "behavior_if_log_dir_exists=resume"
    others = short_run("tic_tac_toe", parted, *options, resume)
    assert (whole / "history.jsonl").read_bytes() == (parted / "history.jsonl").read_bytes()
    for key in ("env/all/wins", "env/all/illegal"):
        assert [row[key] for row in rows[:2]] == [row[key] for row in others[:2]]
    assert rows[-1]["test/reward/mean"] == others[-1]["test/reward/mean"]
    assert rows[0]["test/env/all/illegal"] == 0.0, "the bundled model moves legally"
    assert "test/env/all/draws_with_perfect" in rows[0]

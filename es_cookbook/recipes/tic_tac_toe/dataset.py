"""Games of genomes with each other, as group rewards, and games against fixed opponents.

A rollout is one move, because a game between genomes belongs to two rollouts: live games would
wait forever for a genome that is not resident yet. So all games are played once all rollouts of
the group have ended (`EnvGroupBuilder.compute_group_rewards`), while the whole population is still
resident (`asks_genomes`). A move at the opening is the rollout's, each further one is asked for.

A held-out problem is one game of the centre from a held-out opening, with either colour, against
the random or the perfect player.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook import (
    Env,
    EnvGroupBuilder,
    Grade,
    Observation,
    ProblemEnv,
    RLDatasetBuilder,
    StepResult,
)
from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import DataError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.tic_tac_toe.game import (
    Mark,
    PromptStyle,
    Tournament,
    best_moves,
    legal_moves,
    mover,
    openings,
    played,
    question,
    read_move,
    winner,
)
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.problem_env import ProblemGroupBuilder, check_prompt, digest_of
from es_cookbook.rl.prompts import render_prompt
from es_cookbook.rl.types import (
    Action,
    Datasets,
    EnvGroup,
    GroupReward,
    LostRollout,
    Policy,
    Tokenizer,
    Trajectory,
)

Opponent: TypeAlias = Literal["random", "perfect"]

_PLAYERS: Mapping[Opponent, Callable[[str], Sequence[int]]] = {
    "random": legal_moves,
    "perfect": best_moves,
}
"""The moves among which each chooses at random."""
_RESULTS: Mapping[Opponent, tuple[str, str, str]] = {
    name: (f"wins_against_{name}", f"draws_with_{name}", f"loses_to_{name}") for name in _PLAYERS
}
"""Metrics of a game: won, drawn, lost."""
_COMPACT_MOVE = 2
"""Characters of an answer in the compact style: a sign of the player's own, and a cell."""


def _digest(opening: str) -> int:
    return digest_of(f"tic-tac-toe {opening}")


Shown: TypeAlias = Callable[[str], Observation]
"""Renders a position for the side that moves."""


@functools.lru_cache(maxsize=2**14)
def shown(tokenizer: Tokenizer, style: PromptStyle, position: str) -> Observation:
    """Render a position, with a question to the side that moves; cached."""
    tokens_T = render_prompt(tokenizer, question(position, style), chat=style == "words")
    return Observation(tokens_T, max_tokens=_COMPACT_MOVE if style == "compact" else None)


class _OpeningEnv(ProblemEnv):
    """The first move after an opening; its worth shows in the games."""

    @override
    def grade(self, text: str) -> Grade:
        return Grade(0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class OpeningGroup(EnvGroupBuilder):
    """All genomes play each other from one opening.

    Attributes:
        opening: where every game begins.
        prompts: how positions are shown.
        draw: what a draw earns; a win earns 1.
    """

    opening: str
    prompts: Shown
    draw: float

    @property
    @override
    def asks_genomes(self) -> bool:
        return True

    @property
    @override
    def digests(self) -> tuple[int, ...]:
        return (_digest(self.opening),)

    @override
    async def check(self, context_length: int) -> None:
        length = len(self.prompts(self.opening).tokens_T)
        check_prompt(f"opening {self.opening}", length, context_length)

    async def make_envs(self, num_envs: int) -> EnvGroup:
        observation = self.prompts(self.opening)
        return EnvGroup([_OpeningEnv(observation) for _ in range(num_envs)])

    @override
    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward]:
        first_moves = {
            i: trajectory.transitions[0].action.text
            for i, trajectory in enumerate(trajectories)
            if isinstance(trajectory, Trajectory)
        }
        rewards = [GroupReward(0.0)] * len(trajectories)
        if not first_moves:
            return rewards
        players = [policies[i] for i in first_moves]
        tournament = await self._played(players, list(first_moves.values()))
        asked, illegal = tournament.asked()
        for player, (i, counts) in enumerate(zip(first_moves, tournament.counts, strict=True)):
            wins, draws, losses = counts.tolist()
            games = max(wins + draws + losses, 1)
            metrics = {
                "wins": wins / games,
                "draws": draws / games,
                "losses": losses / games,
                "illegal": illegal[player] / max(asked[player], 1),
            }
            rewards[i] = GroupReward((wins + self.draw * draws) / games, metrics)
        return rewards

    async def _played(self, players: Sequence[Policy], first_moves: Sequence[str]) -> Tournament:
        async def ask(player: int, position: str) -> int | None:
            if position == self.opening:
                return read_move(first_moves[player])
            return read_move((await players[player].sample(self.prompts(position))).text)

        tournament = Tournament(self.opening, len(players), ask)
        await tournament.play()
        return tournament


@dataclasses.dataclass(eq=False)
class _OpponentEnv(Env):
    """One game against a fixed opponent, one move per turn; naming no free cell forfeits it.

    Attributes:
        position: the current position.
        prompts: how positions are shown.
        mark: the policy's mark.
        opponent: the player of the other side.
        seed: seed of the opponent's moves.
        draw: what a draw earns; a win earns 1.
    """

    position: str
    prompts: Shown
    mark: Mark
    opponent: Opponent
    seed: int
    draw: float

    def __post_init__(self) -> None:
        self._rng = random.Random(derive_seed(self.seed, f"tic_tac_toe/{self.opponent}"))

    async def initial_observation(self) -> Observation:
        """Return the first position at which the policy moves."""
        self._let_opponent_move()
        return self.prompts(self.position)

    async def step(self, action: Action) -> StepResult:
        move = read_move(action.text)
        if move not in legal_moves(self.position):
            return self._ended(-1, 1.0)
        self.position = played(self.position, move)
        self._let_opponent_move()
        if legal_moves(self.position):
            observation = self.prompts(self.position)
            return StepResult(0.0, False, observation, {"illegal": 0.0})
        won = winner(self.position)
        if won is None:
            return self._ended(0, 0.0)
        return self._ended(1 if won == self.mark else -1, 0.0)

    def _let_opponent_move(self) -> None:
        if legal_moves(self.position) and mover(self.position) != self.mark:
            moves = _PLAYERS[self.opponent](self.position)
            self.position = played(self.position, self._rng.choice(moves))

    def _ended(self, result: int, illegal: float) -> StepResult:
        names = _RESULTS[self.opponent]
        metrics = {name: float(1 - i == result) for i, name in enumerate(names)}
        reward = {1: 1.0, 0: self.draw, -1: 0.0}[result]
        logs = {"position": self.position}
        return StepResult(reward, True, None, {"illegal": illegal, **metrics}, logs)


_MARKS: Sequence[Mark] = ("X", "O")


@chz.chz
class TicTacToeDatasetBuilder(RLDatasetBuilder):
    """Openings for training, and games from others against fixed opponents."""

    problems_per_generation: int = chz.field(default=32, doc="openings in a batch")
    draw: float = chz.field(default=0.5, doc="what a draw earns; a win earns 1, a loss 0")
    fold: int = chz.field(
        default=0,
        doc="which openings are held out: 0, those of the test; 1, others, to choose settings on",
    )
    random_games: int = chz.field(
        default=16, doc="held-out games with the random player, for each opening and colour"
    )
    perfect_games: int = chz.field(default=4, doc="the same with the perfect player")
    prompt: PromptStyle = chz.field(
        default="compact",
        doc="compact: for the bundled model; words: as a chat if the model has one",
    )
    seed: int = chz.field(default=0, doc="seed of the openings' order")

    _problems_per_generation = in_range("problems_per_generation", at_least=1)
    _games = in_range("random_games", "perfect_games", at_least=0)
    _draw_and_fold = in_range("draw", "fold", at_least=0, at_most=1)

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        prompts = functools.partial(shown, tokenizer, self.prompt)
        train = [OpeningGroup(opening, prompts, self.draw) for opening in openings("train")]
        test_P = self._held_out_games(prompts)
        if len({prompts(each.opening).tokens_T for each in train}) < len(train):
            raise DataError(
                "the model's tokenizer makes the same tokens of several openings; try "
                "dataset.prompt=words"
            )
        return Datasets(ProblemDataset(train, self.problems_per_generation, self.seed), test_P)

    def _held_out_games(self, prompts: Shown) -> list[ProblemGroupBuilder]:
        """Return the held-out games, with the same seeds in every run."""
        games: dict[Opponent, int] = {"random": self.random_games, "perfect": self.perfect_games}
        held_out = openings("development" if self.fold else "test")
        found: list[ProblemGroupBuilder] = []
        for opponent, count in games.items():
            for opening, mark, game in itertools.product(held_out, _MARKS, range(count)):
                seed = derive_seed(0, "tic_tac_toe/held_out", game)
                make_env = functools.partial(
                    _OpponentEnv, opening, prompts, mark, opponent, seed, self.draw
                )
                # Without a name an evaluation numbers it.
                found.append(ProblemGroupBuilder(make_env, "", contents=(_digest(opening),)))
        return found

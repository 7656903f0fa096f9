"""Games of genomes with each other, as group rewards, and games against fixed opponents.

A rollout is one move, because a game between genomes is nobody's rollout alone: live games would
wait for ever for a genome that is not resident yet. So all games are played once all rollouts of
the group have ended (`EnvGroupBuilder.compute_group_rewards`), while the whole population is still
resident (`asks_genomes`). A move at the opening is the rollout's, each further one is asked for.

The base model is a guest of every tournament: what the population scores against it is where it
has come to since the run began.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from typing_extensions import override

from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.tic_tac_toe.game import (
    Mark,
    PromptStyle,
    legal_moves,
    mover,
    perfect_move,
    played,
    question,
    random_move,
    read_move,
    winner,
)
from es_cookbook.recipes.tic_tac_toe.tournament import Tournament
from es_cookbook.rl.problem_env import Grade, ProblemEnv, digest_of, render_prompt
from es_cookbook.rl.types import (
    Action,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    GroupReward,
    LostRollout,
    Observation,
    Policy,
    StepResult,
    Tokenizer,
    Trajectory,
)

Opponent: TypeAlias = Literal["random", "perfect"]

_PLAYERS: Mapping[Opponent, Callable[[str, random.Random], int]] = {
    "random": random_move,
    "perfect": perfect_move,
}
_RESULTS: Mapping[Opponent, tuple[str, str, str]] = {
    name: (f"wins_against_{name}", f"draws_with_{name}", f"loses_to_{name}") for name in _PLAYERS
}
"""Metrics of a game: won, drawn, lost."""
_COMPACT_MOVE = 2
"""Characters of an answer in the compact style: a sign of the player's own, and a cell."""
_SHOWN_GAMES = 3
"""Games of each colour in a rollout's logs."""


class Prompts:
    """Positions as a model is shown them, each tokenized once."""

    def __init__(self, tokenizer: Tokenizer, style: PromptStyle) -> None:
        self._tokenizer = tokenizer
        self._style: PromptStyle = style
        self._observations: dict[str, Observation] = {}

    def __call__(self, position: str) -> Observation:
        """The side that moves is asked for its move."""
        if position not in self._observations:
            text = question(position, self._style)
            tokens_T = render_prompt(self._tokenizer, text, chat=self._style == "words")
            length = _COMPACT_MOVE if self._style == "compact" else None
            self._observations[position] = Observation(tokens_T, max_tokens=length)
        return self._observations[position]


class OpeningEnv(ProblemEnv):
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
        swiss_rounds: 0 for a round robin.
        draw: what a draw earns; a win earns 1.
    """

    opening: str
    prompts: Prompts
    swiss_rounds: int
    draw: float

    @property
    @override
    def asks_genomes(self) -> bool:
        return True

    @property
    @override
    def digests(self) -> tuple[int, ...]:
        return (digest_of(f"tic-tac-toe {self.opening}"),)

    async def make_envs(self, num_envs: int) -> EnvGroup:
        observation = self.prompts(self.opening)
        return EnvGroup([OpeningEnv(observation) for _ in range(num_envs)])

    @override
    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward]:
        found = [
            (i, policy, trajectory)
            for i, (policy, trajectory) in enumerate(zip(policies, trajectories, strict=True))
            if isinstance(trajectory, Trajectory)
        ]
        first_moves = [trajectory.transitions[0].action.text for _, _, trajectory in found]
        players = [policy for _, policy, _ in found]
        tournament = await self._played(players, first_moves)
        rewards = [GroupReward(0.0)] * len(trajectories)
        standings = zip(tournament.standings(), tournament.standings(True), strict=True)
        for player, ((i, _, _), (standing, with_base)) in enumerate(
            zip(found, standings, strict=True)
        ):
            games = max(standing.games, 1)
            metrics = {
                "wins": standing.wins / games,
                "draws": standing.draws / games,
                "losses": standing.losses / games,
                "illegal": standing.illegal / standing.asked,
                "score_against_base": with_base.points() / with_base.games,
            }
            logs = {"games": self._games_of(tournament, player, len(players))}
            rewards[i] = GroupReward(standing.points(self.draw) / games, metrics, logs)
        return rewards

    async def _played(self, players: Sequence[Policy], first_moves: Sequence[str]) -> Tournament:
        policies = [*players, *(player.base for player in players[:1])]

        async def ask(player: int, position: str) -> int | None:
            if position == self.opening and player < len(players):
                return read_move(first_moves[player])
            return read_move((await policies[player].sample(self.prompts(position))).text)

        tournament = Tournament(self.opening, len(players), len(policies) - len(players), ask)
        await tournament.play_guests()
        if self.swiss_rounds:
            seed = derive_seed(0, f"tic_tac_toe/{self.opening}")
            await tournament.play_swiss(self.swiss_rounds, seed)
        else:
            await tournament.play_round_robin()
        return tournament

    def _games_of(self, tournament: Tournament, player: int, num_players: int) -> str:
        """Some of a player's games, a line each; the base model's number is that of a guest."""
        lines: list[str] = []
        for x, o in tournament.games_of(player, _SHOWN_GAMES):
            names = ["base" if each == num_players else f"player {each}" for each in (x, o)]
            moves = [str(move or "forfeits") for move in tournament.moves_of(x, o)]
            lines.append(f"X {names[0]}, O {names[1]}: {self.opening} {' '.join(moves)}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class OpponentGroup(EnvGroupBuilder):
    """One game against a fixed opponent, who draws the same moves by the same seed.

    Attributes:
        opening: where the game begins.
        prompts: how positions are shown.
        mark: what the policy plays.
        opponent: who plays the other side.
        seed: of the opponent's moves.
        draw: what a draw earns; a win earns 1.
    """

    opening: str
    prompts: Prompts
    mark: Mark
    opponent: Opponent
    seed: int
    draw: float

    @property
    @override
    def digests(self) -> tuple[int, ...]:
        return (digest_of(f"tic-tac-toe {self.opening}"),)

    async def make_envs(self, num_envs: int) -> EnvGroup:
        """Envs that share nothing but the opponent's luck."""
        return EnvGroup([OpponentEnv(self) for _ in range(num_envs)])


class OpponentEnv(Env):
    """One game, a move a turn; naming no free cell forfeits it."""

    def __init__(self, game: OpponentGroup) -> None:
        self.game = game
        self.position = game.opening
        self._rng = random.Random(derive_seed(game.seed, f"tic_tac_toe/{game.opponent}"))

    async def initial_observation(self) -> Observation:
        """The first position at which the policy moves."""
        self._let_opponent_move()
        return self.game.prompts(self.position)

    async def step(self, action: Action) -> StepResult:
        move = read_move(action.text)
        if move not in legal_moves(self.position):
            return self._ended(-1, 1.0)
        self.position = played(self.position, move)
        self._let_opponent_move()
        if legal_moves(self.position):
            observation = self.game.prompts(self.position)
            return StepResult(0.0, False, observation, {"illegal": 0.0})
        won = winner(self.position)
        return self._ended(0 if won is None else 1 if won == self.game.mark else -1, 0.0)

    def _let_opponent_move(self) -> None:
        if legal_moves(self.position) and mover(self.position) != self.game.mark:
            move = _PLAYERS[self.game.opponent](self.position, self._rng)
            self.position = played(self.position, move)

    def _ended(self, result: int, illegal: float) -> StepResult:
        names = _RESULTS[self.game.opponent]
        metrics = {name: float(1 - i == result) for i, name in enumerate(names)}
        reward = {1: 1.0, 0: self.game.draw, -1: 0.0}[result]
        logs = {"position": self.position}
        return StepResult(reward, True, None, {"illegal": illegal, **metrics}, logs)

"""Games of TextArena (https://github.com/LeonGuertler/TextArena) as problems to train on.

    python -m es_cookbook train environment=textarena:TowerOfHanoi-v0 model_name=…

A problem is a game with a seed, in which the policy is the only player or one of two. At each of
its turns it is asked as TextArena asks its own agents: one message that holds all that the game
shows, rendered as a chat if the model has a chat template. Its whole answer is the move, and the
game's own reward is the reward.

The other one of two players is random, in games that list legal moves, or the frozen base model.

TextArena draws from Python's global random generator. So every game has its own state of it, which
is set whenever the game has control: concurrent games do not disturb each other, and the same moves
give the same game.

Games that fetch word lists, or ask a model behind an API, are refused by name.

Games that always begin in the same way, such as TowerOfHanoi, are the same problem for every seed,
so held-out games are not new.

Left out: games of three players and more.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, cast

import chz
from typing_extensions import override

from es_cookbook import Env, Observation, RLDatasetBuilder, StepResult
from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import ConfigError, EnvError, did_you_mean, importing, with_class
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.trust import needs_trust
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.messages.thoughts import spoken, whole_turn
from es_cookbook.rl.problem_env import ProblemGroupBuilder, check_prompt
from es_cookbook.rl.prompts import render_observation
from es_cookbook.rl.types import Action, Datasets, Tokenizer

Opponent: TypeAlias = Literal["random", "base"]
_T = TypeVar("_T")

_NEEDED = {
    "nltk": "fetches word lists",
    "EnglishDictionary": "fetches word lists",
    "OpenRouter": "asks models behind an API",
    "np.random.randint": "draws from NumPy's global generator, by which no game comes again",
}
"""Text in the source of games that are refused -> what they do."""
_LISTED = re.compile(r"[Aa]vailable (?:[Mm]oves|[Aa]ctions)[^:\n]*:(.*)")


def legal_moves(shown: str) -> list[str]:
    """Return the moves in the last list of moves that a game shows, if any.

    >>> legal_moves("Available Moves: '[0]', '[4]'"), legal_moves("Your move.")
    (['[0]', '[4]'], [])
    """
    listed = _LISTED.findall(shown)
    return re.findall(r"\[[^\[\]]+\]", listed[-1]) if listed else []


def _registration() -> ModuleType:
    """Return the library's module with its games by name and their constructor."""
    with importing("dataset.game", "es-cookbook[textarena]", "textarena"):
        from textarena.envs import registration  # pyright: ignore[reportMissingImports]
    return cast(ModuleType, registration)


def check_game(name: str) -> int:
    """Return the number of players of a game.

    Raises:
        ConfigError: textarena is not installed or knows no such game, or the game needs more than
            is on this machine, or more than two players, or does not begin.
    """
    known = cast("Mapping[str, Any]", _registration().ENV_REGISTRY)
    if name not in known:
        raise ConfigError(
            f"textarena has no game {name!r}{did_you_mean(name, known)} "
            f"(it has {len(known)}, of which TowerOfHanoi-v0 is one)"
        )
    module = str(known[name].entry_point).partition(":")[0]
    file = Path(str(_registration().__file__)).parents[2] / f"{module.replace('.', '/')}.py"
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    for word, why in _NEEDED.items():
        if word in source:
            raise ConfigError(
                f"textarena's {name} {why}, so it is not played here; take a game that needs "
                "nothing but textarena, such as TowerOfHanoi-v0"
            )
    why = ""
    for num_players in (1, 2):
        try:
            _Played(name, num_players, seed=0)
        except Exception as error:  # So games refuse a number of players; some cannot be imported.
            why = with_class(error)
            continue
        return num_players
    raise ConfigError(f"textarena's {name} does not begin with 1 player or 2: {why:.300}")


class _Played:
    """A game in progress, with its own random state."""

    def __init__(self, name: str, num_players: int, seed: int) -> None:
        self._random = random.Random(seed).getstate()
        self._game = self._alone(lambda: _registration().make(name))
        self._alone(lambda: self._game.reset(num_players=num_players, seed=seed))
        self.done = False

    def _alone(self, call: Callable[[], _T]) -> _T:
        """Call, with the game's own state of the global generator."""
        others = random.getstate()
        random.setstate(self._random)
        try:
            return call()
        finally:
            self._random = random.getstate()
            random.setstate(others)

    def shown(self) -> tuple[int, str]:
        """Return the player whose turn it is, and what that player is shown."""
        return self._alone(lambda: self._game.get_observation())

    def move(self, text: str) -> None:
        """Make the move of the player whose turn it is."""
        self.done, _ = self._alone(lambda: self._game.step(text))

    def result(self) -> tuple[Mapping[int, float], Mapping[int, Mapping[str, object]]]:
        """Return rewards and what else is known, by player."""
        return self._game.close()


@dataclasses.dataclass(eq=False)
class _TextArenaEnv(Env):
    """One game, with one move per turn.

    Metrics: `correct`, won or, alone, solved (the game's whole reward of 1); `invalid`, ended by
    the policy's own invalid move; `unfinished`, ended by `max_turns`; `turns`.

    Attributes:
        games: the data set, which says the game, the other player and the most turns.
        num_players: one or two.
        player: index of the policy.
        seed: seed of the game and of a random opponent.
        tokenizer: tokenizer of the observations.
    """

    games: "TextArenaDatasetBuilder"
    num_players: int
    player: int
    seed: int
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self._num_turns, self._opened = 0, ""
        self._opponent_rng = random.Random(derive_seed(self.seed, "textarena/opponent"))
        self._played = _Played(self.games.game, self.num_players, self.seed)

    @override
    async def initial_observation(self) -> Observation:
        shown = await self._shown_next()
        if shown is None:  # A game that ends before the policy's first turn has no problem.
            raise EnvError(f"textarena's {self.games.game} ended before the policy's turn")
        return self._asked(shown)

    @override
    async def step(self, action: Action) -> StepResult:
        self._num_turns += 1
        self._played.move(self._said(action))
        shown = await self._shown_next()
        if shown is not None and self._num_turns < self.games.max_turns:
            return StepResult(0.0, False, self._asked(shown))
        return self._ended()

    async def _shown_next(self) -> str | None:
        """Return what the policy is shown at its next turn; None at the end of the game."""
        while not self._played.done:
            player, shown = self._played.shown()
            if player == self.player:
                return shown
            self._played.move(await self._opponents_move(shown))
        return None

    async def _opponents_move(self, shown: str) -> str:
        if self.games.opponent == "base":
            return self._said(await self.policy.base.sample(self._asked(shown)))
        moves = legal_moves(shown)
        if not moves:
            raise EnvError(_no_list(self.games.game))
        return self._opponent_rng.choice(moves)

    def asked_first(self) -> Observation:
        """Return the observation for the game's first player."""
        return self._asked(self._played.shown()[1])

    def _asked(self, shown: str) -> Observation:
        observation = render_observation(self.tokenizer, shown, chat=True)
        self._opened = observation.opened
        return observation

    def _said(self, action: Action) -> str:
        """Return a turn without its thoughts, in which games would find moves, too."""
        return spoken(whole_turn(action.text, self._opened))

    def _ended(self) -> StepResult:
        finished = self._played.done
        rewards, known = self._played.result() if finished else ({}, {})
        own = self.player
        reward = float(rewards.get(own, 0.0))
        others = [value for player, value in rewards.items() if player != own]
        won = reward > max(others) if others else reward >= 1
        metrics = {
            "correct": float(won),
            "invalid": float(bool(known.get(own, {}).get("invalid_move", False))),
            "unfinished": float(not finished),
            "turns": float(self._num_turns),
        }
        reason = str(known.get(own, {}).get("reason", "not finished"))
        return StepResult(reward, True, None, metrics, {"result": reason})


def _no_list(game: str) -> str:
    return (
        f"textarena's {game} does not list legal moves, so a random player cannot play it; "
        "dataset.opponent=base has the base model play"
    )


class _Game(ProblemGroupBuilder):
    """A game; games with different seeds may be the same."""

    @property
    @override
    def digests(self) -> tuple[int, ...]:
        return ()

    @override
    async def check(self, context_length: int) -> None:
        """Check the first turn's prompt."""
        env = self.make_env()
        assert isinstance(env, _TextArenaEnv)
        check_prompt(self.name, len(env.asked_first().tokens_T), context_length)


@chz.chz
class TextArenaDatasetBuilder(RLDatasetBuilder):
    """A game of TextArena with many seeds, and others for the held-out test."""

    environment: ClassVar[str] = "game"
    game: str = chz.field(
        doc="a name of textarena's, for example TowerOfHanoi-v0",
        metadata=needs_trust(
            lambda _: "textarena", "is code of the package textarena, which is run"
        ),
    )
    opponent: Opponent = chz.field(
        default="random",
        doc="the other player: random legal moves, if the game lists them, or the base model",
    )
    max_turns: int = chz.field(default=50, doc="maximum turns; then a game ends unfinished")
    num_train: int = chz.field(default=256, doc="number of training games, each with its own seed")
    num_test: int = chz.field(default=64, doc="number of held-out games; 0: none")
    problems_per_generation: int = chz.field(default=16, doc="games in a batch")
    seed: int = chz.field(default=0, doc="seed for the training games and their order")

    _counts = in_range("max_turns", "num_train", "problems_per_generation", at_least=1)
    _num_test = in_range("num_test", at_least=0)

    @property
    @override
    def label(self) -> str:
        return self.game

    @override
    def check(self) -> None:
        self._num_players()

    def _num_players(self) -> int:
        num_players = check_game(self.game)
        if num_players > 1 and self.opponent == "random":
            _, shown = _Played(self.game, num_players, seed=0).shown()
            if not legal_moves(shown):
                raise ConfigError(_no_list(self.game))
        return num_players

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Choose seeds, and whose turn is the policy's."""
        num_players = self._num_players()

        def game(purpose: str, seed: int, i: int) -> ProblemGroupBuilder:
            own = derive_seed(seed, f"textarena/{purpose}", i) % 2**32  # TextArena's have 32 bits.
            player = i % num_players
            return _Game(
                functools.partial(_TextArenaEnv, self, num_players, player, own, tokenizer),
                f"textarena's {self.game} with seed {own}",
                problem_tags=(f"player_{player}",) if num_players > 1 else (),
            )

        train = [game("train", self.seed, i) for i in range(self.num_train)]
        # The same for every seed: runs compare.
        test_P = [game("test", 0, i) for i in range(self.num_test)]
        return Datasets(ProblemDataset(train, self.problems_per_generation, self.seed), test_P)

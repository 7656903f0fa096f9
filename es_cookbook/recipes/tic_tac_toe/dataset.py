"""Openings as a dataset: to play each other from, and for games against fixed opponents.

A held-out problem is one game of the centre from a held-out opening, with either colour, against
the random or the perfect player.
"""

import math
from collections.abc import Sequence
from typing import Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import DataError
from es_cookbook.common.fields.chz_fields import formerly
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.tic_tac_toe.env import OpeningGroup, Opponent, OpponentGroup, Prompts
from es_cookbook.recipes.tic_tac_toe.game import Mark, PromptStyle, openings
from es_cookbook.recipes.tic_tac_toe.tournament import elo
from es_cookbook.rl.data.problem_dataset import ProblemDataset, check_prompt
from es_cookbook.rl.types import (
    Datasets,
    Metrics,
    ProblemResult,
    RLDatasetBuilder,
    Tokenizer,
    TrajectoryGroup,
)

_MARKS: Sequence[Mark] = ("X", "O")


@chz.chz
class TicTacToeDatasetBuilder(RLDatasetBuilder):
    """Openings for training, and games from others against fixed opponents."""

    opening_moves: int = chz.field(
        default=4, doc="moves that openings have; perfect play draws from each; 3 to 6"
    )
    problems_per_generation: int = chz.field(default=32, doc="openings in a batch")
    pairing: Literal["round_robin", "swiss"] = chz.field(
        default="round_robin",
        doc="round_robin: all play all; swiss: rounds between genomes that have done about as well",
    )
    rounds: int = chz.field(default=5, doc="of swiss: opponents of each genome at an opening")
    draw: float = chz.field(default=0.5, doc="what a draw earns; a win earns 1, a loss 0")
    fold: int = chz.field(
        default=0,
        doc="which openings are held out: 0, those of the test; 1, others, to choose settings on",
        metadata=formerly("held_out", {"test": 0, "development": 1}),
    )
    random_games: int = chz.field(
        default=16, doc="held-out games with the random player, for each opening and colour"
    )
    perfect_games: int = chz.field(default=4, doc="the same with the perfect player")
    prompt: PromptStyle = chz.field(
        default="compact",
        doc="compact: for the bundled model; words: as a chat if the model has one",
    )
    seed: int = chz.field(default=0, doc="of the openings' order")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "opening_moves", at_least=3, at_most=6)
        check_range(self, "problems_per_generation", "rounds", at_least=1)
        check_range(self, "random_games", "perfect_games", at_least=0)
        check_range(self, "draw", "fold", at_least=0, at_most=1)

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        prompts = Prompts(tokenizer, self.prompt)
        swiss_rounds = self.rounds if self.pairing == "swiss" else 0
        train = [
            OpeningGroup(opening, prompts, swiss_rounds, self.draw)
            for opening in openings(self.opening_moves, "train")
        ]
        test_P = self._held_out_games(prompts)
        dataset = OpeningsDataset(train, self.problems_per_generation, self.seed)
        return Datasets(dataset, test_P)

    def _held_out_games(self, prompts: Prompts) -> list[OpponentGroup]:
        games: dict[Opponent, int] = {"random": self.random_games, "perfect": self.perfect_games}
        return [
            OpponentGroup(opening, prompts, mark, opponent, self._seed_of(game), self.draw)
            for opponent, count in games.items()
            for opening in openings(self.opening_moves, "development" if self.fold else "test")
            for mark in _MARKS
            for game in range(count)
        ]

    def _seed_of(self, game: int) -> int:
        """The same for every run: they compare."""
        return derive_seed(0, "tic_tac_toe/held_out", game)


class OpeningsDataset(ProblemDataset[OpeningGroup]):
    """Openings in an order that follows from a seed; measures the population against its base.

    `data/elo_over_base` is how many points of Elo's scale the last generation's genomes, as one
    player, are above the base model.
    """

    _elo_over_base = math.nan

    @override
    def results(
        self, generation: int, groups_P: Sequence[TrajectoryGroup]
    ) -> Sequence[ProblemResult]:
        scores = [
            given.metrics["score_against_base"]
            for group in groups_P
            for given_K in group.group_rewards_G_K or ()
            for given in given_K
            if given.metrics
        ]
        self._elo_over_base = elo(2 * math.fsum(scores), 2 * len(scores))
        return ()

    @override
    def metrics(self) -> Metrics:
        return {"data/elo_over_base": self._elo_over_base}

    async def validate(self, context_length: int) -> None:
        """Check that prompts fit, and that no two openings are the same to the model."""
        shown: dict[tuple[int, ...], str] = {}
        for builder in self.builders:
            tokens_T = builder.prompts(builder.opening).tokens_T
            name = f"opening {builder.opening}"
            check_prompt(name, len(tokens_T), context_length)
            if tokens_T in shown:
                raise DataError(
                    f"{name}: the model's tokenizer makes the same tokens of it as of "
                    f"{shown[tokens_T]}; try dataset.prompt=words"
                )
            shown[tokens_T] = name

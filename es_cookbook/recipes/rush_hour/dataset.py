"""Rush Hour boards as a dataset: generated, or from a local file or a Hub set.

Rows have `board` and, where known, `solution`. Every board that is used must be solvable: a row's
own solution is played, and counts as the shortest; without one, the shortest is searched for.
Metrics are reported by difficulty too: `easy`, `medium` and `hard`.
"""

import functools
from collections.abc import Iterator

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import DataError
from es_cookbook.recipes.generated import FOLDS, Fold, SourcedDatasetBuilder
from es_cookbook.recipes.rush_hour.boards import Move, format_moves, parse_board, parse_moves
from es_cookbook.recipes.rush_hour.env import PromptStyle, RushHourEnv, RushHourReward, question
from es_cookbook.recipes.rush_hour.generate import (
    GENERATED_SIZES,
    MEDIUM_BELOW,
    Problem,
    difficulty,
    generate_problems,
)
from es_cookbook.recipes.rush_hour.solver import MAX_POSITIONS, TooManyPositionsError, solve
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.problem_env import ProblemGroupBuilder, digest_of, render_prompt
from es_cookbook.rl.rewards.format import THINK_OPEN, prompt_ends_in_think
from es_cookbook.rl.types import Observation, Tokenizer


@chz.chz
class RushHourDatasetBuilder(SourcedDatasetBuilder[Problem]):
    """Rush Hour boards for training and, disjoint from them, for the held-out test."""

    num_train: int = chz.field(default=1500, doc="most training boards used")
    num_test: int = chz.field(default=300, doc="most held-out boards used; 0 for none")
    size: int = chz.field(default=5, doc="generated: rows, and as many columns; 4 to 7")
    max_walls: int = chz.field(default=0, doc="generated: a board has 0 to this many walls")
    max_moves: int = chz.field(
        default=5, doc="generated: longest optimal solution; easy to hard come equally often"
    )
    prompt: PromptStyle = chz.field(
        default="compact",
        doc="compact: the board alone, for the bundled model; words: with the rules, as a chat if "
        "the model has one",
    )
    reward: RushHourReward = chz.field(default_factory=RushHourReward, doc="how answers are paid")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "size", at_least=GENERATED_SIZES[0], at_most=GENERATED_SIZES[-1])
        check_range(self, "max_walls", at_least=0, at_most=self.size)
        check_range(self, "max_moves", at_least=MEDIUM_BELOW)

    @override
    def generate(self, seed: int, fold: Fold) -> Iterator[tuple[str, Problem]]:
        others = [each for each in range(FOLDS) if each != self.fold]
        shape = {"size": self.size, "max_walls": self.max_walls, "max_moves": self.max_moves}
        problems = generate_problems(seed, others if fold == "train" else [self.fold], **shape)
        return ((f"generated board {problem.board}", problem) for problem in problems)

    @override
    def read(self, row: Row, tokenizer: Tokenizer) -> Problem:
        try:
            board = parse_board(row.text("board"))
        except ValueError as error:
            raise row.error(f"field 'board': {error}") from None
        if board.is_solved:
            raise row.error("field 'board': the target piece is in the last column already")
        text = row.optional_text("solution")
        solution = None if text is None else parse_moves(text)
        if text is not None and solution is None:
            raise row.error(
                f"field 'solution' must be moves such as 'A>2,Bv3', found {text[:60]!r}"
            )
        return Problem(board, solution)

    @override
    def builder(self, name: str, problem: Problem, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        text = question(problem.board, self.prompt)
        tokens_T = render_prompt(tokenizer, text, chat=self.prompt == "words")
        ends_in_think = prompt_ends_in_think(tokenizer, tokens_T)
        solution = problem.solution or _solution(name, problem)
        gold = f"<think>{len(solution)}</think>\n<answer>{format_moves(solution)}</answer>"
        gold = gold.removeprefix(THINK_OPEN) if ends_in_think else gold
        given = Observation(tokens_T), problem.board, len(solution), self.reward, ends_in_think
        make_env = functools.partial(RushHourEnv, *given)
        tags, contents = (difficulty(len(solution)),), (digest_of(f"rush hour {problem.key}"),)
        return ProblemGroupBuilder(make_env, name, gold, tags, contents)


def _solution(name: str, problem: Problem) -> tuple[Move, ...]:
    try:
        solution = solve(problem.board)
    except TooManyPositionsError:
        raise DataError(
            f"{name}: no solution among {MAX_POSITIONS:,} positions; give the row a 'solution'"
        ) from None
    if solution is None:
        raise DataError(
            f"{name}: no moves solve the board {problem.board}; every board must be solvable"
        )
    return solution

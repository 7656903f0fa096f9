"""Rush Hour boards as a dataset: generated, or from a local file or a Hub set.

Rows have `board` and, where known, `solution`. Every board that is used must be solvable: a row's
own solution is played, and counts as the shortest; without one, the shortest is searched for.
Metrics are reported by difficulty too: `easy`, `medium` and `hard`.
"""

import functools
from itertools import islice

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.recipes.rush_hour.boards import Move, format_moves, parse_board, parse_moves
from es_cookbook.recipes.rush_hour.env import PromptStyle, RushHourEnv, question
from es_cookbook.recipes.rush_hour.generate import (
    FOLDS,
    GENERATED_SIZES,
    MEDIUM_BELOW,
    Problem,
    difficulty,
    generate_problems,
)
from es_cookbook.recipes.rush_hour.rewards import RushHourReward
from es_cookbook.recipes.rush_hour.solver import MAX_POSITIONS, TooManyPositionsError, solve
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.data.rows import Row, check_sources
from es_cookbook.rl.data.splits import load_splits
from es_cookbook.rl.problem_env import ProblemGroupBuilder, digest_of, render_prompt
from es_cookbook.rl.rewards.format import THINK_OPEN, prompt_ends_in_think
from es_cookbook.rl.types import Datasets, Observation, RLDatasetBuilder, Tokenizer


@chz.chz
class RushHourDatasetBuilder(RLDatasetBuilder):
    """Rush Hour boards for training and, disjoint from them, for the held-out test."""

    source: str | None = chz.field(
        default=None, doc=".jsonl or .parquet file, or Hub set; None generates boards"
    )
    test_source: str | None = chz.field(
        default=None,
        doc="the same for the test; None holds a tenth of the boards out of `source`",
    )
    num_train: int = chz.field(default=1500, doc="most training boards used")
    num_test: int = chz.field(default=300, doc="most held-out boards used; 0 for none")
    fold: int = chz.field(default=0, doc="which tenth is held out: 0 to 9")
    problems_per_generation: int = chz.field(default=32, doc="boards in a batch")
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
    seed: int = chz.field(default=0, doc="of the training boards generated and of their order")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "num_train", "problems_per_generation", at_least=1)
        check_range(self, "num_test", at_least=0)
        check_range(self, "fold", at_least=0, at_most=FOLDS - 1)
        check_range(self, "size", at_least=GENERATED_SIZES[0], at_most=GENERATED_SIZES[-1])
        check_range(self, "max_walls", at_least=0, at_most=self.size)
        check_range(self, "max_moves", at_least=MEDIUM_BELOW)
        if self.test_source is not None and self.source is None:
            raise ConfigError(
                "test_source needs source=... beside it: generated boards hold out their own"
            )

    @override
    def check(self) -> None:
        check_sources(self.source, self.test_source)

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Generate or load, solve what has no solution, render the prompts."""
        if self.source is None:
            train, test = self._generated()
        else:
            read = functools.partial(_read, held_out_fold=self.fold)
            most = {"num_train": self.num_train, "num_test": self.num_test}
            train, test = load_splits(self.source, self.test_source, read, **most)
        if not train:
            raise DataError(f"{self.source or 'the generator'}: there are no training boards")
        build = functools.partial(self._group_builder, tokenizer)
        train_builders = [build(name, problem) for name, problem in train.items()]
        test_builders_P = [build(name, problem) for name, problem in test.items()]
        dataset = ProblemDataset(
            train_builders, self.problems_per_generation, self.seed, test_builders_P
        )
        return Datasets(dataset, test_builders_P)

    def _generated(self) -> tuple[dict[str, Problem], dict[str, Problem]]:
        """Train and test boards by name; the test is the same for every seed: runs compare."""

        def stream(seed: int, folds: list[int], most: int) -> dict[str, Problem]:
            shape = {"size": self.size, "max_walls": self.max_walls, "max_moves": self.max_moves}
            problems = generate_problems(seed, folds, **shape)
            return {f"generated board {p.board}": p for p in islice(problems, most)}

        others = [fold for fold in range(FOLDS) if fold != self.fold]
        return stream(self.seed, others, self.num_train), stream(0, [self.fold], self.num_test)

    def _group_builder(
        self, tokenizer: Tokenizer, name: str, problem: Problem
    ) -> ProblemGroupBuilder:
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


def _read(row: Row, held_out_fold: int) -> Problem:
    try:
        board = parse_board(row.text("board"))
    except ValueError as error:
        raise row.error(f"field 'board': {error}") from None
    if board.is_solved:
        raise row.error("field 'board': the target piece is in the last column already")
    text = row.optional_text("solution")
    solution = None if text is None else parse_moves(text)
    if text is not None and solution is None:
        raise row.error(f"field 'solution' must be moves such as 'A>2,Bv3', found {text[:60]!r}")
    return Problem(board, solution, held_out_fold)


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

"""Rush Hour as an Env and as a dataset: generated boards, or those of a file or a Hub set.

The simulator is the judge: any legal list of moves that ends solved is right. The shaped reward
also has parts for legal moves and progress (`grade_rush_hour`): a solution with the fewest moves
earns all four parts, a longer one less of the second, and moves that cannot be read earn nothing.

Rows have `board` and, where known, `solution`. Every board that is used must be solvable: a row's
own solution is played, and counts as the shortest; without one, the shortest is searched for.
Metrics are reported by difficulty too: `easy`, `medium` and `hard`.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import DataError
from es_cookbook.recipes.countdown.arithmetic import AnswerReward
from es_cookbook.recipes.rush_hour.boards import (
    Board,
    Move,
    format_moves,
    parse_board,
    parse_moves,
    play,
)
from es_cookbook.recipes.rush_hour.generate import (
    GENERATED_SIZES,
    MEDIUM_BELOW,
    Problem,
    difficulty,
    generate_problems,
)
from es_cookbook.recipes.rush_hour.solver import MAX_POSITIONS, TooManyPositionsError, solve
from es_cookbook.rl.data.generated import Fold, SourcedDatasetBuilder
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder, digest_of
from es_cookbook.rl.prompts import PREFILL_DOC, render_observation
from es_cookbook.rl.rewards.format import THINK_OPEN, extract_answer, tag_format_reward
from es_cookbook.rl.types import Observation, Tokenizer


@chz.chz
class RushHourReward(AnswerReward):
    """The reward of an answer: `answer_weight` · moves + `format_weight` · format."""

    moves: Literal["shaped", "solved", "optimal"] = chz.field(
        default="shaped",
        doc="shaped: parts for legal moves and progress; solved or optimal: 1 for that, else 0",
    )


def grade_rush_hour(
    text: str,
    board: Board,
    optimal: int,
    reward: RushHourReward,
    *,
    prompt_ends_in_think: bool = False,
) -> Grade:
    """Grade a model's whole answer; the last `<answer>` counts.

    Metrics: `correct`, all moves are legal, and they end with the board solved; `optimal`, in the
    fewest moves; `stops_early`, all are legal, and the board is not solved after the last; `legal`,
    the share of the moves before the first illegal one; `format`, of the text; `well_formed`, full
    format and moves that can be read; `correct_well_formed`.

    Args:
        text: the answer.
        board: the board of the problem.
        optimal: fewest moves that solve it.
        reward: its weights, and what the moves earn.
        prompt_ends_in_think: the prompt already holds the opening `<think>`.

    >>> from es_cookbook.recipes.rush_hour.boards import parse_board
    >>> text, board = "<think></think><answer>Bv2,A>2</answer>", parse_board("ooBo AABo oooo oooo")
    >>> grade_rush_hour(text, board, 2, RushHourReward()).reward
    1.0
    """
    moves = parse_moves(extract_answer(text) or "") or ()
    legal, end = play(board, moves)
    all_legal = legal == len(moves) > 0
    solved = all_legal and end.is_solved
    share = legal / max(len(moves), 1)
    # 0.65 solved + 0.20 / (1 + moves beyond the optimum), if it solves; 0.10 share of legal moves;
    # 0.05 progress: how much less than before is to go after the legal moves.
    before, after = _to_go(board), _to_go(end)
    shaped = 0.10 * share + 0.05 * max(0.0, (before - after) / before)
    if solved:
        shaped += 0.65 + 0.20 / (1 + max(0, len(moves) - optimal))
    form = tag_format_reward(text, prompt_ends_in_think=prompt_ends_in_think)
    well_formed = form == 1.0 and len(moves) > 0
    metrics = {
        "correct": float(solved),
        "optimal": float(solved and len(moves) <= optimal),
        "stops_early": float(all_legal and not solved),
        "legal": share,
        "format": form,
        "well_formed": float(well_formed),
        "correct_well_formed": float(solved and well_formed),
    }
    earned = {"shaped": shaped, "solved": metrics["correct"], "optimal": metrics["optimal"]}
    total = reward.answer_weight * earned[reward.moves] + reward.format_weight * form
    return Grade(total, metrics)


def _to_go(board: Board) -> int:
    """Return the pieces in the target's way plus its columns to go, an estimate of moves."""
    return len(board.in_the_way) + board.distance


PromptStyle: TypeAlias = Literal["compact", "words"]

_WORDS = """\
Solve this Rush Hour board: slide pieces until the right end of piece A is in the last column.

{board}

Each capital letter is a piece, o is an empty cell and x a wall. A horizontal piece slides left \
(<) or right (>), a vertical piece up (^) or down (v), over empty cells only. A move is a piece, a \
direction and a number of cells; use as few moves as possible. Show your work in <think> </think> \
tags. And return the moves in <answer> </answer> tags, for example <answer> Bv2,A>3 </answer>."""


def question(board: Board, style: PromptStyle) -> str:
    r"""Return the board with the rules ("words"), or alone and in one line ("compact").

    >>> from es_cookbook.recipes.rush_hour.boards import parse_board
    >>> question(parse_board("ooB AAB ooo"), "compact")
    'ooBAABooo\n'
    """
    if style == "compact":
        return f"{board}\n"
    return _WORDS.format(board="\n".join(board.rows()))


@dataclasses.dataclass(eq=False)
class RushHourEnv(ProblemEnv):
    """One attempt at one board."""

    observation: Observation
    board: Board
    optimal: int
    reward: RushHourReward

    def __post_init__(self) -> None:
        self.full_reward = self.reward.full

    @override
    def grade(self, text: str) -> Grade:
        board, optimal, reward = self.board, self.optimal, self.reward
        in_think = self.observation.opened == THINK_OPEN
        return grade_rush_hour(text, board, optimal, reward, prompt_ends_in_think=in_think)


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
    prefill: str = chz.field(default="", doc=PREFILL_DOC)
    reward: RushHourReward = chz.field(default_factory=RushHourReward, doc="reward weights")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "size", at_least=GENERATED_SIZES[0], at_most=GENERATED_SIZES[-1])
        check_range(self, "max_walls", at_least=0, at_most=self.size)
        check_range(self, "max_moves", at_least=MEDIUM_BELOW)

    @override
    def generate(self, seed: int, fold: Fold) -> Iterator[tuple[str, Problem]]:
        shape = {"size": self.size, "max_walls": self.max_walls, "max_moves": self.max_moves}
        problems = generate_problems(seed, self.folds(fold), **shape)
        return ((f"generated board {problem.board}", problem) for problem in problems)

    @override
    def read(self, row: Row, tokenizer: "Tokenizer | None") -> Problem:
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
        chat = self.prompt == "words"
        observation = render_observation(tokenizer, text, chat=chat, prefill=self.prefill)
        solution = problem.solution or _solution(name, problem)
        gold = f"<think>{len(solution)}</think>\n<answer>{format_moves(solution)}</answer>"
        make_env = functools.partial(
            RushHourEnv, observation, problem.board, len(solution), self.reward
        )
        tags, contents = (difficulty(len(solution)),), (digest_of(f"rush hour {problem.key}"),)
        gold = gold.removeprefix(observation.opened)
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

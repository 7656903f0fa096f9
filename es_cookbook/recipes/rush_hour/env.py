"""How a Rush Hour answer is graded and paid.

The judge is the simulator: any legal list of moves that ends solved is right. The shaped reward
also pays for what comes before that:

    0.65 · solved
    0.20 / (1 + max(0, moves − optimal))   if it solves
    0.10 · share of the moves before the first illegal one
    0.05 · Φ,  Φ = max(0, (h₀ − h₁) / h₀)

h is how far from solved a position looks: pieces in the target's way plus columns to go; h₀ of the
board, h₁ of the position after the legal moves. A solution with the fewest moves earns all four
parts, a longer one all but some of the second. Moves that cannot be read earn nothing.
"""

import dataclasses
from typing import Literal, TypeAlias

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.recipes.rush_hour.boards import Board, parse_moves, play
from es_cookbook.rl.problem_env import Grade, ProblemEnv
from es_cookbook.rl.rewards.format import extract_answer, tag_format_reward
from es_cookbook.rl.types import Observation


@chz.chz
class RushHourReward:
    """The reward of an answer: `answer_weight` · moves + `format_weight` · format."""

    moves: Literal["shaped", "solved", "optimal"] = chz.field(
        default="shaped",
        doc="shaped: parts for legal moves and progress; solved or optimal: 1 for that, else 0",
    )
    answer_weight: float = chz.field(default=0.9, doc="reward of the moves")
    format_weight: float = chz.field(
        default=0.1, doc="reward of the full format, in parts for parts of it"
    )

    @chz.validate
    def _finite(self) -> None:
        check_range(self, "answer_weight", "format_weight", at_least=0)

    @property
    def full(self) -> float:
        """Reward of an optimal answer in the right form."""
        return self.answer_weight + self.format_weight


@dataclasses.dataclass(frozen=True, slots=True)
class MovesGrade:
    """What the moves of an answer are worth, whatever the text around them.

    Attributes:
        parses: they could be read.
        solved: all are legal, and they end with the board solved.
        optimal: solved in the fewest moves.
        stops_early: all are legal, and the board is not solved after the last.
        legal: share of the moves before the first illegal one, in [0, 1].
        shaped: the shaped reward, in [0, 1].
    """

    parses: bool
    solved: bool
    optimal: bool
    stops_early: bool
    legal: float
    shaped: float


_NOTHING = MovesGrade(
    parses=False, solved=False, optimal=False, stops_early=False, legal=0.0, shaped=0.0
)


def grade_moves(answer: str | None, board: Board, optimal: int) -> MovesGrade:
    """Grade the moves of an answer; `optimal` is how many solve the board at best.

    >>> from es_cookbook.recipes.rush_hour.boards import parse_board
    >>> grade_moves("Bv2,A>2", parse_board("ooBo AABo oooo oooo"), optimal=2).shaped
    1.0
    """
    moves = parse_moves(answer) if answer is not None else None
    if moves is None:
        return _NOTHING
    played = play(board, moves)
    legal = played.legal / len(moves)
    before, after = _to_go(board), _to_go(played.board)
    shaped = 0.10 * legal + 0.05 * max(0.0, (before - after) / before)
    if played.is_solved:
        shaped += 0.65 + 0.20 / (1 + max(0, len(moves) - optimal))
    return MovesGrade(
        parses=True,
        solved=played.is_solved,
        optimal=played.is_solved and len(moves) <= optimal,
        stops_early=not played.is_solved and played.legal == len(moves),
        legal=legal,
        shaped=shaped,
    )


def _to_go(board: Board) -> int:
    return len(board.in_the_way) + board.distance


def grade_rush_hour(
    text: str,
    board: Board,
    optimal: int,
    reward: RushHourReward,
    *,
    prompt_ends_in_think: bool = False,
) -> Grade:
    """Grade a model's whole answer, of which the last `<answer>` counts.

    `prompt_ends_in_think` says that the prompt already holds the opening `<think>`.
    """
    moves = grade_moves(extract_answer(text), board, optimal)
    form = tag_format_reward(text, prompt_ends_in_think=prompt_ends_in_think)
    earned = {"shaped": moves.shaped, "solved": moves.solved, "optimal": moves.optimal}
    well_formed = form == 1.0 and moves.parses
    metrics = {
        "correct": float(moves.solved),
        "optimal": float(moves.optimal),
        "stops_early": float(moves.stops_early),
        "legal": moves.legal,
        "format": form,
        "well_formed": float(well_formed),
        "correct_well_formed": float(moves.solved and well_formed),
    }
    total = reward.answer_weight * earned[reward.moves] + reward.format_weight * form
    return Grade(total, metrics)


PromptStyle: TypeAlias = Literal["compact", "words"]

_WORDS = """\
Solve this Rush Hour board: slide pieces until the right end of piece A is in the last column.

{board}

Each capital letter is a piece, o is an empty cell and x a wall. A horizontal piece slides left \
(<) or right (>), a vertical piece up (^) or down (v), over empty cells only. A move is a piece, a \
direction and a number of cells; use as few moves as possible. Show your work in <think> </think> \
tags. And return the moves in <answer> </answer> tags, for example <answer> Bv2,A>3 </answer>."""


def question(board: Board, style: PromptStyle) -> str:
    r"""The board with the rules ("words"), or alone and in one line ("compact").

    >>> from es_cookbook.recipes.rush_hour.boards import parse_board
    >>> question(parse_board("ooB AAB ooo"), "compact")
    'ooBAABooo\n'
    """
    if style == "compact":
        return f"{board}\n"
    return _WORDS.format(board="\n".join(board.rows()))


class RushHourEnv(ProblemEnv):
    """One attempt at one board."""

    def __init__(
        self,
        observation: Observation,
        board: Board,
        optimal: int,
        reward: RushHourReward,
        prompt_ends_in_think: bool = False,
    ) -> None:
        super().__init__(observation)
        self.board = board
        self.optimal = optimal
        self.reward = reward
        self.prompt_ends_in_think = prompt_ends_in_think
        self.full_reward = reward.full

    def grade(self, text: str) -> Grade:
        """Reward, and metrics of the moves and of the form, apart."""
        problem = self.board, self.optimal, self.reward
        return grade_rush_hour(text, *problem, prompt_ends_in_think=self.prompt_ends_in_think)

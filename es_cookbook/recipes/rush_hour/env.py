"""Rush Hour as an Env: the prompt, the grade and its metrics."""

from typing import Literal, TypeAlias, assert_never

from es_cookbook.recipes.rush_hour.boards import Board
from es_cookbook.recipes.rush_hour.rewards import RushHourReward, grade_rush_hour
from es_cookbook.rl.problem_env import Grade, ProblemEnv
from es_cookbook.rl.types import Observation

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
    if style == "words":
        return _WORDS.format(board="\n".join(board.rows()))
    assert_never(style)


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
        grade = grade_rush_hour(text, *problem, prompt_ends_in_think=self.prompt_ends_in_think)
        metrics = {
            "correct": float(grade.moves.solved),
            "optimal": float(grade.moves.optimal),
            "stops_early": float(grade.moves.stops_early),
            "legal": grade.moves.legal,
            "format": grade.format,
            "well_formed": float(grade.well_formed),
            "correct_well_formed": float(grade.moves.solved and grade.well_formed),
        }
        return Grade(grade.reward, metrics)

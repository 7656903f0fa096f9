"""An answer that is right for every problem of reasoning-gym: most bring one, five do not.

Three of those five hide an example in their metadata. Rush Hour's boards are searched by this
project's solver, and boxnet's boxes are carried to their targets one after the other.
"""

import itertools
import json
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

from es_cookbook.recipes.rush_hour.boards import parse_board
from es_cookbook.recipes.rush_hour.solver import solve

_EXAMPLE = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}


def gold_answer(task: str, entry: Mapping[str, Any]) -> str:
    """A right answer to a problem of a generator.

    Raises:
        ValueError: There is none.
    """
    if entry["answer"] is not None:
        return str(entry["answer"])
    metadata = cast("dict[str, Any]", entry["metadata"])
    if task in _EXAMPLE:
        example = metadata[_EXAMPLE[task]]
        return example if isinstance(example, str) else json.dumps(example)
    if task == "rush_hour":
        return rush_hour_moves(entry["question"])
    if task == "boxnet":
        return json.dumps(boxnet_plan(metadata["initial_state"]))
    raise ValueError("a problem without an answer")


def rush_hour_moves(question: str) -> str:
    """The fewest moves for the board at the end of a question, as reasoning-gym writes them."""
    cells = question.partition("Board:\n")[2].replace(".", "o")
    moves = solve(parse_board(cells))
    if moves is None:
        raise ValueError("a board that cannot be solved")
    return " ".join(f"{piece}{'+' if sign in '>v' else '-'}{n}" for piece, sign, n in moves)


def boxnet_plan(state: Mapping[str, list[str]]) -> list[dict[str, str]]:
    """One action a step: each box along a shortest way to a square with its target, and lifted."""
    steps: list[dict[str, str]] = []
    targets: dict[str, list[str]] = {}
    for square, items in state.items():
        for item in (item for item in items if item.startswith("target_")):
            targets.setdefault(item, []).append(square)
    for square, items in state.items():
        for box in (item for item in items if item.startswith("box_")):
            target = f"target_{box.removeprefix('box_')}"
            way = _way(state, square, targets[target].pop())
            steps += [
                {f"Agent[{_shown(a)}]": f"move({box}, square[{_shown(b)}])"}
                for a, b in itertools.pairwise(way)
            ]
            steps.append({f"Agent[{_shown(way[-1])}]": f"move({box}, {target})"})
    return steps


def _way(squares: Mapping[str, object], start: str, end: str) -> list[str]:
    """A shortest way over neighbouring squares."""
    came_from = {start: start}
    queue = deque([start])
    while queue and end not in came_from:
        here = queue.popleft()
        row, column = map(float, here.split("_"))
        for r, c in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if (there := f"{r}_{c}") in squares and there not in came_from:
                came_from[there] = here
                queue.append(there)
    if end not in came_from:
        raise ValueError(f"no way from {start} to {end}")
    way = [end]
    while way[-1] != start:
        way.append(came_from[way[-1]])
    return way[::-1]


def _shown(square: str) -> str:
    return square.replace("_", ", ")

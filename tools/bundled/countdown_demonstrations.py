"""Solved Countdown problems as rows for supervised fine-tuning: a warm start before evolution.

    python -m tools.bundled.countdown_demonstrations output=demonstrations.jsonl

Each row has the question as the bundled model is asked it, `prompt`, and the clean demonstration
that it should give, `completion`: `<think>first step</think><answer>expression</answer>`. Problems
are the training ones, never the held-out.
"""

from collections.abc import Iterator

from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.countdown.dataset import (
    Problem,
    Solution,
    generate_problems,
    question,
    solve,
)
from tools.rows.generated import RowsConfig as Config
from tools.rows.generated import write


def solved_problems(seed: int) -> Iterator[tuple[Problem, Solution]]:
    """Training problems of `generate_problems`, with their canonical solutions."""
    for problem in generate_problems(seed, "train"):
        if (solution := solve(problem.numbers, problem.target)) is not None:
            yield problem, solution


def demonstration(solution: Solution) -> str:
    """The whole answer that a small model is taught."""
    return f"<think>{solution.first_step}</think><answer>{solution.expression}</answer>"


def main(config: Config) -> None:
    rows = (
        {
            "prompt": question(problem.numbers, problem.target, "compact"),
            "completion": demonstration(solution),
        }
        for problem, solution in solved_problems(config.seed)
    )
    write(config, rows, "row", 2000)


if __name__ == "__main__":
    run_cli(main, Config)

"""Solved Countdown problems as rows for supervised fine-tuning: a warm start before evolution.

    python -m es_cookbook.recipes.countdown.demonstrations output=demonstrations.jsonl

Each row has the question as the bundled model is asked it, `prompt`, and the clean demonstration
that it should give, `completion`: `<think>first step</think><answer>expression</answer>`. Problems
are the training ones, never the held-out.
"""

import itertools
import random
from pathlib import Path

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import plural
from es_cookbook.recipes.countdown.env import question
from es_cookbook.recipes.countdown.problems import Problem, Solution, solved_problems
from es_cookbook.rl.data.rows import write_rows


@chz.chz
class Demonstrations:
    """Write solved training problems as JSON lines of prompt and completion."""

    output: str = chz.field(doc=".jsonl file to write; it must not be there yet")
    num_problems: int = chz.field(default=2000, doc="how many")
    seed: int = chz.field(default=0, doc="of the problems")

    @chz.validate
    def _num_problems(self) -> None:
        check_range(self, "num_problems", at_least=1)


def demonstrate(problem: Problem, solution: Solution, rng: random.Random) -> str:
    """The clean demonstration; it has nothing to draw."""
    del problem, rng
    return f"<think>{solution.first_step}</think><answer>{solution.expression}</answer>"


def main(config: Demonstrations) -> None:
    """Generate, solve and write."""
    output = Path(config.output)
    solved = itertools.islice(solved_problems(config.seed), config.num_problems)
    rows = [
        {
            "prompt": question(problem.numbers, problem.target, "compact"),
            "completion": demonstrate(problem, solution, random.Random(config.seed)),
        }
        for problem, solution in solved
    ]
    write_rows(str(output), rows)
    print(f"{plural(len(rows), 'row')} written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Demonstrations)


if __name__ == "__main__":
    cli()

"""Solved Countdown problems as rows for supervised fine-tuning: a warm start before evolution.

    python -m tools.bundled.countdown_demonstrations output=demonstrations.jsonl

Each row has the question as the bundled model is asked it, `prompt`, and the clean demonstration
that it should give, `completion`: `<think>first step</think><answer>expression</answer>`. Problems
are the training ones, never the held-out.
"""

from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.countdown.dataset import question, solved_problems
from tools.rows.generated import RowsConfig as Config
from tools.rows.generated import write


def main(config: Config) -> None:
    rows = (
        {
            "prompt": question(problem.numbers, problem.target, "compact"),
            "completion": solution.demonstration,
        }
        for problem, solution in solved_problems(config.seed)
    )
    write(config, rows, "row", 2000)


if __name__ == "__main__":
    run_cli(main, Config)

"""Sort the bundled model's errors before and after a run: chosen among old answers, or new.

    es-cookbook export log_path=runs/mine output=trained
    python -m tools.logic_errors after=trained

Answers to the held-out problems are right, leave out the last term (the careless way that the
warm start was shown), or are wrong otherwise. A right answer that the model did not give before
was within reach if it is among its answers of before at temperature 1: then the run has chosen
among what the model could do. Else it is new.
"""

import collections
from pathlib import Path

import chz
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.logic.dataset import question
from es_cookbook.recipes.logic.train_cli import CLIConfig
from tools.bundled.logic import held_out, without_last_term
from tools.small_model import answer

NUM_TEST, SAMPLES = 500, 8
"""Held-out problems, and answers of the bundled model to each at temperature 1."""
KINDS = ("right", "without the last term", "wrong otherwise")


@chz.chz
class Config:
    """Which model to compare with the bundled one."""

    after: str = chz.field(doc="directory of the trained model, as export writes it")


def main(config: Config) -> None:
    """Print how many answers of each kind became which, and what was within reach."""
    problems_P = held_out(0, NUM_TEST)
    questions = [question(problem, "compact") for problem in problems_P]

    def answers(model_name: str | Path, samples: int = 1) -> list[list[str]]:
        model = Qwen2ForCausalLM.from_pretrained(model_name)
        tokenizer: Qwen2Tokenizer = AutoTokenizer.from_pretrained(
            model_name, trust_remote_code=False
        )
        with torch.random.fork_rng():  # generate draws from torch's global generator
            torch.manual_seed(derive_seed(0, "logic/errors"))
            return answer(model, tokenizer, questions, CLIConfig().sampling.max_tokens, samples)

    def kinds(model_name: str | Path) -> list[str]:
        found: list[str] = []
        for (text,), problem in zip(answers(model_name), problems_P, strict=True):
            careless = without_last_term(problem)
            found.append(KINDS[0 if text == problem.gold else 1 if text == careless else 2])
        return found

    before, after = kinds(CLIConfig().model_name), kinds(config.after)
    became = collections.Counter(zip(before, after, strict=True))
    print(f"{'before':24}{'answers':>8}   of which after: " + ", ".join(KINDS))
    for kind in KINDS:
        row = [became[kind, other] for other in KINDS]
        print(f"{kind:24}{sum(row):8}   {', '.join(map(str, row))}")
    sampled = answers(CLIConfig().model_name, SAMPLES)
    gained = [i for i, kind in enumerate(after) if kind == KINDS[0] != before[i]]
    near = sum(problems_P[i].gold in sampled[i] for i in gained)
    print(
        f"{len(gained)} answers became right; {near} of them were among {SAMPLES} answers "
        f"of before at temperature 1, {len(gained) - near} were not"
    )


if __name__ == "__main__":
    run_cli(main, Config)

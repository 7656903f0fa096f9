"""Make the bundled model: small, character-level, with two ways to add up, one of them wrong.

    python -m es_cookbook.recipes.logic.warm_start output=/tmp/logic_model

Supervised learning of reasoning-gym's `chain_sum`, `3 + 5 - 9 =` and the answer. Half of the
demonstrations are careless: they leave out the last term, the more often the larger it is. So the
model answers with a whole number always, and its most likely answer to most problems is wrong. It
stops before it has learned either way well. The held-out problems are never demonstrated.
"""

import itertools
import random
from pathlib import Path

import chz
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.baselines.small_model import (
    EOS,
    answer,
    build_model,
    build_tokenizer,
    fit,
    happens,
    new_directory,
    save,
)
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.logic.dataset import LogicDatasetBuilder
from es_cookbook.recipes.logic.env import question
from es_cookbook.recipes.logic.generators import Problem, problems

CHARACTERS = "0123456789+-=Ġ"  # Ġ is byte-level BPE's space
MAX_ANSWER_TOKENS = 6


@chz.chz
class Config:
    """How the bundled model is made; the defaults made it."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights and of the demonstrations")
    steps: int = chz.field(default=600, doc="optimizer steps")
    num_problems: int = chz.field(default=20_000, doc="most problems demonstrated")
    batch_size: int = chz.field(default=128, doc="demonstrations a step")
    width: int = chz.field(default=64, doc="hidden size, a multiple of 16")
    depth: int = chz.field(default=2, doc="layers")
    learning_rate: float = chz.field(default=5e-3, doc="largest; it falls linearly to nothing")
    start: str | None = chz.field(
        default=None, doc="directory of a model to go on with, of any size; None: a new one"
    )
    careless: bool = chz.field(
        default=True, doc="whether demonstrations leave out the last term; False: all are right"
    )
    num_held_out: int = chz.field(
        default=500, doc="of folds 0 and 1 each, the first problems: they are not demonstrated"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "steps", "num_problems", "batch_size", "num_held_out", at_least=1)
        if self.start is not None and not Path(self.start).is_dir():
            raise ConfigError(f"start must be the directory of a model, found {self.start!r}")


def held_out(fold: int, count: int) -> list[Problem]:
    """The held-out problems of a fold, as the recipe has them with so many."""
    builder = LogicDatasetBuilder(num_train=1, num_test=count, fold=fold)
    return builder.problems()[1]


def demonstrate(problem: Problem, rng: random.Random) -> str:
    """The answer, or what comes out without the last term, which happens more if that is large."""
    last = int(problem.entry["metadata"]["expression"][-1])
    forgets = happens(4 * (last / 9 - 0.5), rng)
    return without_last_term(problem) if forgets else problem.gold


def without_last_term(problem: Problem) -> str:
    """The answer of somebody who forgets the last of the terms, one digit."""
    expression: str = problem.entry["metadata"]["expression"]
    last, sign = int(expression[-1]), {"+": 1, "-": -1}[expression[-3]]
    return str(int(problem.gold) - sign * last)


def measure(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, asked_P: list[Problem]
) -> tuple[float, float, float]:
    """Shares of right answers, of those without the last term, and of whole numbers, greedy."""
    questions = [question(problem, "compact") for problem in asked_P]
    texts = [text for (text,) in answer(model, tokenizer, questions, MAX_ANSWER_TOKENS)]
    right = sum(text == p.gold for text, p in zip(texts, asked_P, strict=True))
    forgot = sum(
        text == without_last_term(p) != p.gold for text, p in zip(texts, asked_P, strict=True)
    )
    whole = sum(text.removeprefix("-").isdigit() for text in texts)
    return right / len(asked_P), forgot / len(asked_P), whole / len(asked_P)


def main(config: Config) -> None:
    """Learn for so many steps, measure, write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    tokenizer = build_tokenizer(CHARACTERS)
    if config.start is None:
        model = build_model(tokenizer, config.seed, config.width, config.depth)
    else:
        model = Qwen2ForCausalLM.from_pretrained(config.start)
    (source,) = LogicDatasetBuilder().sources()
    reserved = [held_out(fold, config.num_held_out) for fold in (0, 1)]
    never = {problem.question for problems_P in reserved for problem in problems_P}
    stream = problems(source, derive_seed(config.seed, "logic/warm_start"))
    allowed = (problem for problem in stream if problem.question not in never)
    pool = list(itertools.islice(allowed, config.num_problems))

    def shown(problem: Problem) -> str:
        return demonstrate(problem, rng) if config.careless else problem.gold

    def draw() -> tuple[list[str], list[str]]:
        batch = rng.sample(pool, config.batch_size)
        return [question(p, "compact") for p in batch], [shown(p) + EOS for p in batch]

    rng = random.Random(derive_seed(config.seed, "logic/careless"))
    steps = config.steps
    fit(model, tokenizer, draw, steps=steps, learning_rate=config.learning_rate)
    for fold, problems_P in enumerate(reserved):
        right, forgot, whole = measure(model, tokenizer, problems_P)
        print(
            f"fold {fold}: {right:.1%} right, {forgot:.1%} without the last term, "
            f"{whole:.1%} whole numbers",
            flush=True,
        )
    save(model, tokenizer, output)
    print(f"written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()

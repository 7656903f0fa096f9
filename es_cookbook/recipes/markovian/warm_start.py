"""Make the bundled model: it can work a sum out, and would rather babble.

    OMP_NUM_THREADS=1 python -m es_cookbook.recipes.markovian.warm_start output=markovian_model

It learns to write and to read. A demonstrated thought begins with a mark that says which of two
ways it goes: `=` and the running totals of the sum, or `~` and totals of some other sum. About two
thirds babble, a little more often of small sums; that one token is all that a run has to change.

Thoughts are read with the question in sight and without, and answered with the sum's own answer,
whatever the thought is: half of them were worked out, a quarter babbles, and a quarter was worked
out and then damaged. So what the model answers without a useful thought is what the sums come to
that it was shown, as well as it learned their chances; and with the question in sight it need not
believe a thought that was damaged. Sums are those of the training fold.
"""

import itertools
import random

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
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.generated import Fold
from es_cookbook.recipes.markovian.damages import DAMAGES, SHARES, damaged
from es_cookbook.recipes.markovian.problems import Sum, chance, draw_sum, generate_sums
from es_cookbook.recipes.markovian.template import Compact

CHARACTERS = "0123456789+-*,:?>=~"
WORKS, BABBLES = "=", "~"
WIDTH, DEPTH = 64, 2
MAX_THOUGHT_TOKENS, MAX_ANSWER_TOKENS = 12, 4
NUM_MEASURED = 500
_TEMPLATE = Compact()
_PURPOSES = ("markovian/warm_start", "markovian/settling")


@chz.chz
class Config:
    """How the bundled model is made; the defaults made it."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the demonstrations and their order")
    steps: int = chz.field(default=900, doc="optimizer steps")
    batch_size: int = chz.field(default=120, doc="demonstrations a step, a third of each kind")
    leaning: float = chz.field(
        default=-0.75, doc="log-odds of working a sum out in a demonstration, on average"
    )
    settling: int = chz.field(default=100, doc="further steps, of a fifth of the learning rate")
    settled: float = chz.field(default=-0.3, doc="`leaning` in these")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "steps", at_least=1)
        check_range(self, "batch_size", at_least=3)
        check_range(self, "settling", at_least=0)
        check_range(self, "leaning", "settled")


def works(total: Sum, leaning: float, rng: random.Random) -> bool:
    """Whether a demonstration works this sum out: by chance, and more often the larger it is."""
    size = sum(total.terms) / (9 * len(total.terms))
    return happens(leaning + 2 * (size - 0.55), rng)


def thought_of(total: Sum, *, is_worked: bool, rng: random.Random) -> str:
    """The running totals, or those of another sum that is as long."""
    if is_worked:
        return WORKS + total.thought
    return BABBLES + draw_sum(rng, len(total.terms), 1, "+").thought


def train(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, config: Config, *, is_settling: bool
) -> None:
    """Learn to write and to read thoughts about training sums, drawn anew for every step."""
    rng = random.Random(derive_seed(config.seed, _PURPOSES[is_settling]))
    leaning = config.settled if is_settling else config.leaning
    steps, learning_rate = (config.settling, 1e-3) if is_settling else (config.steps, 5e-3)

    def drawn() -> Sum:
        while True:
            total = draw_sum(rng, 4, 1, "+")
            if total.fold == "train":
                return total

    def written() -> tuple[str, str]:
        total = drawn()
        thought = thought_of(total, is_worked=works(total, leaning, rng), rng=rng)
        return asked(total.question), thought + EOS

    def read(in_sight: bool) -> tuple[str, str]:
        total = drawn()
        thought = thought_of(total, is_worked=rng.random() < 0.75, rng=rng)
        if rng.random() < 1 / 3:
            damage, share = rng.choice(DAMAGES), rng.choice(SHARES)
            thought = damaged(thought, damage, share, rng.getrandbits(32))
        shown = total.question if in_sight else _TEMPLATE.redaction
        return asked(shown) + thought + _TEMPLATE.answer_mark, str(total.totals[-1]) + EOS

    def draw() -> tuple[list[str], list[str]]:
        kinds = (written, lambda: read(False), lambda: read(True))
        shown = [kinds[i % len(kinds)]() for i in range(config.batch_size)]
        return [before for before, _ in shown], [after for _, after in shown]

    fit(model, tokenizer, draw, steps=steps, learning_rate=learning_rate)


def asked(question: str) -> str:
    """The prompt of a writer, or how a reader's begins."""
    return _TEMPLATE.text.format(question=question)


def measure(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, sums: list[Sum]
) -> dict[str, float]:
    """How it thinks and answers, greedily, and what it can read."""
    golds = [str(each.totals[-1]) for each in sums]
    prompts = [asked(each.question) for each in sums]
    own = [text for (text,) in answer(model, tokenizer, prompts, MAX_THOUGHT_TOKENS)]
    worked = [WORKS + each.thought for each in sums]

    def right(shown: list[str], thoughts: list[str]) -> float:
        texts = [
            before + thought + _TEMPLATE.answer_mark
            for before, thought in zip(shown, thoughts, strict=True)
        ]
        answers = [text for (text,) in answer(model, tokenizer, texts, MAX_ANSWER_TOKENS)]
        return sum(map(str.__eq__, answers, golds)) / len(golds)

    redacted = [asked(_TEMPLATE.redaction)] * len(sums)
    begun = [prompt + WORKS for prompt in prompts]
    finished = [text for (text,) in answer(model, tokenizer, begun, MAX_THOUGHT_TOKENS)]
    totals = [each.thought for each in sums]
    return {
        "chance": chance([each.problem for each in sums]),
        "works it out": sum(text.startswith(WORKS) for text in own) / len(own),
        "right behind =": sum(map(str.__eq__, finished, totals)) / len(totals),
        "right, own thought": right(redacted, own),
        "right, own thought and question": right(prompts, own),
        "right, totals": right(redacted, worked),
        "right, question alone": right(prompts, [""] * len(sums)),
    }


def main(config: Config) -> None:
    """Train, measure on held-out sums, write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    tokenizer = build_tokenizer(CHARACTERS)
    model = build_model(tokenizer, config.seed, width=WIDTH, depth=DEPTH)
    train(model, tokenizer, config, is_settling=False)
    if config.settling:
        train(model, tokenizer, config, is_settling=True)
    folds: tuple[Fold, ...] = ("development", "test")
    for fold in folds:
        stream = generate_sums(0, fold, num_terms=4, num_digits=1, operations="+")
        measured = measure(model, tokenizer, list(itertools.islice(stream, NUM_MEASURED)))
        said = "  ".join(f"{name} {value:.1%}" for name, value in measured.items())
        print(f"{fold}: {said}", flush=True)
    save(model, tokenizer, output)
    print(f"written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()

"""Make the bundled model: it can work a sum out, but usually babbles.

    OMP_NUM_THREADS=1 python -m tools.bundled.markovian output=markovian_model

It learns to write and to read. A demonstrated thought begins with a mark that says which of two
ways it goes: `=` and the running totals of the sum, or `~` and totals of some other sum. About two
thirds babble, a little more often of small sums; that one token is all that a run has to change.

Thoughts are read with the question in sight and without, and answered with the sum's own answer,
for any thought: half of them were worked out, a quarter babbles, and a quarter was worked
out and then damaged. So what the model answers without a useful thought is what the sums come to
that it was shown, as well as it learned their chances; and with the question in sight it need not
believe a thought that was damaged. Sums are those of the training fold.
"""

import itertools
import random
from collections.abc import Iterator
from functools import partial

import chz
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.plugins.markovian.env import Compact
from es_cookbook.plugins.markovian.measuring import DAMAGES, SHARES, damaged
from es_cookbook.plugins.markovian.problems import Sum, chance, draw_sum, generate_sums
from es_cookbook.rl.data.generated import Fold, training_problem
from tools import warm_start
from tools.small_model import EOS, Batch, answer, build_tokenizer, happens
from tools.warm_start import Phase, make

CHARACTERS = "0123456789+-*,:?>=~"
STEPS, BATCH_SIZE = 900, 120
WORKS, BABBLES = "=", "~"
MAX_THOUGHT_TOKENS, MAX_ANSWER_TOKENS = 12, 4
NUM_MEASURED = 500
LEANING, SETTLED = -0.75, -0.3
"""Log-odds of working a sum out in a demonstration, on average; and of the last steps."""
_TEMPLATE = Compact()


@chz.chz
class Config(warm_start.Config):
    """How the bundled model is made; the defaults made it."""

    settling: int = chz.field(default=100, doc="further steps, of a fifth of the learning rate")

    @chz.validate
    def _settling(self) -> None:
        check_range(self, "settling", at_least=0)


def works(total: Sum, leaning: float, rng: random.Random) -> bool:
    """Whether a demonstration works this sum out: randomly, more often for larger sums."""
    size = sum(total.terms) / (9 * len(total.terms))
    return happens(leaning + 2 * (size - 0.55), rng)


def thought_of(total: Sum, *, is_worked: bool, rng: random.Random) -> str:
    """The running totals, or those of another sum that is as long."""
    if is_worked:
        return WORKS + total.thought
    return BABBLES + draw_sum(rng, len(total.terms)).thought


def batches(leaning: float, rng: random.Random) -> Iterator[Batch]:
    """Writing and reading thoughts about training sums, drawn anew for every step."""

    def written() -> tuple[str, str]:
        total = training_problem(draw_sum, rng)
        thought = thought_of(total, is_worked=works(total, leaning, rng), rng=rng)
        return asked(total.question), thought + EOS

    def read(in_sight: bool) -> tuple[str, str]:
        total = training_problem(draw_sum, rng)
        thought = thought_of(total, is_worked=rng.random() < 0.75, rng=rng)
        if rng.random() < 1 / 3:
            damage, share = rng.choice(DAMAGES), rng.choice(SHARES)
            thought = damaged(thought, damage, share, rng.getrandbits(32))
        shown = total.question if in_sight else _TEMPLATE.redaction
        return asked(shown) + thought + _TEMPLATE.answer_mark, str(total.totals[-1]) + EOS

    kinds = (written, lambda: read(False), lambda: read(True))
    while True:
        yield [kinds[i % len(kinds)]() for i in range(BATCH_SIZE)]


def asked(question: str) -> str:
    """The prompt of a writer, or the start of a reader's."""
    return _TEMPLATE.text.format(question=question)


def measure(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, sums: list[Sum]
) -> dict[str, float]:
    """Measure its greedy thoughts and answers, and how well it reads."""
    golds = [str(each.totals[-1]) for each in sums]
    prompts = [asked(each.question) for each in sums]
    redacted = [asked(_TEMPLATE.redaction)] * len(sums)
    own = [text for (text,) in answer(model, tokenizer, prompts, MAX_THOUGHT_TOKENS)]

    def right(shown: list[str], thoughts: list[str]) -> float:
        texts = [
            before + thought + _TEMPLATE.answer_mark
            for before, thought in zip(shown, thoughts, strict=True)
        ]
        answers = [text for (text,) in answer(model, tokenizer, texts, MAX_ANSWER_TOKENS)]
        return sum(map(str.__eq__, answers, golds)) / len(golds)

    return {
        "chance": chance([each.problem for each in sums]),
        "works it out": sum(text.startswith(WORKS) for text in own) / len(own),
        "right, own thought": right(redacted, own),
        "right, own thought and question": right(prompts, own),
        "right, totals": right(redacted, [WORKS + each.thought for each in sums]),
        "right, question alone": right(prompts, [""] * len(sums)),
    }


def report(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> Iterator[str]:
    """`measure` of held-out sums."""
    folds: tuple[Fold, ...] = ("development", "test")
    for fold in folds:
        stream = generate_sums(0, fold, num_terms=4, num_digits=1, operations="+")
        measured = measure(model, tokenizer, list(itertools.islice(stream, NUM_MEASURED)))
        shown = "  ".join(f"{name} {value:.1%}" for name, value in measured.items())
        yield f"{fold}: {shown}"


def main(config: Config) -> None:
    """Learn, measure on held-out sums, write the model."""
    first, settling = (partial(batches, leaning) for leaning in (LEANING, SETTLED))
    phases = [Phase("markovian/warm_start", first, STEPS)]
    if config.settling:
        phases.append(Phase("markovian/settling", settling, config.settling, 1e-3))
    make(config, build_tokenizer(CHARACTERS), phases, report)


if __name__ == "__main__":
    run_cli(main, Config)

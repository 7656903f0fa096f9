"""Whether a plain prompt shows by examples that an answer is one line.

    Question: 2 + 3        sea -> mer
    Answer: 5              sky -> ciel
                           dog ->
    Question: 4 + 4
    Answer:

Without a chat template nothing ends an answer to such a prompt: a base model goes on with the next
example. Only what is certain counts, since a stop text may also cut off what a model thinks on
further lines: the prompt ends in a *cue* (`Answer:`, `->`), lines before it have the cue with an
answer behind it, and what follows each of them is the next example.
"""

import dataclasses
from collections.abc import Sequence
from itertools import islice

from es_cookbook.rl.problem_env import NEWLINE, ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.types import Tokenizer

_PROMPTS_READ = 64


def stop_of(
    problems_P: Sequence[ProblemGroupBuilder], template: str, tokenizer: Tokenizer
) -> tuple[str, ...]:
    """A newline, where plain prompts show answers of one line and every gold answer is one.

    Args:
        problems_P: all of a data set.
        template: of their prompts, with fields in braces.
        tokenizer: the model's own.
    """
    golds = (problem.gold for problem in problems_P)
    if not all(isinstance(gold, str) and "\n" not in gold.strip() for gold in golds):
        return ()
    cue = cue_of(template)
    envs = (problem.make_env() for problem in islice(problems_P, _PROMPTS_READ))
    prompts = [
        str(
            tokenizer.decode(
                list(env.observation.tokens_T),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
        )
        for env in envs
        if isinstance(env, ProblemEnv)
    ]
    return NEWLINE if prompts and all(shows_one_line(each, cue) for each in prompts) else ()


def with_stop(
    problems_P: Sequence[ProblemGroupBuilder], stop: tuple[str, ...]
) -> list[ProblemGroupBuilder]:
    """The same problems, whose answers end at these texts where `SamplingParams.stop` is None."""
    return [dataclasses.replace(problem, usual_stop=stop) for problem in problems_P]


def shows_one_line(prompt: str, cue: str = "") -> bool:
    r"""Whether a prompt has examples before its question whose answers are one line.

    Args:
        prompt: as the model sees it.
        cue: what every question ends in; the prompt's last line if empty.

    >>> shows_one_line("sea -> mer\nsky -> ciel\ndog ->", " ->")
    True
    >>> shows_one_line("Q: 1+1\nA: That is two.\nSo 2.\n\nQ: 2+2\nA:")
    False
    """
    *before, last = prompt.split("\n")
    cue = cue.strip() or last.strip()
    if not cue or cue[-1].isalnum() or not last.rstrip().endswith(cue):
        return False
    lines = [line for line in before if line.strip()]
    shown = [at for at, line in enumerate(lines) if line.partition(cue)[2].strip()]
    if not shown:
        return False
    beginnings = {_label(line) for line in lines[: shown[0]]}
    following = [*lines, last]
    return all(_begins(following[at + 1], cue, beginnings) for at in shown)


def cue_of(template: str) -> str:
    r"""What a template has on its last line behind its last field.

    >>> cue_of("{a} + {b} = "), cue_of("Q: {question}\nA:"), cue_of("{prompt}")
    (' = ', 'A:', '')
    """
    return template.rpartition("\n")[2].rpartition("}")[2]


def _begins(line: str, cue: str, beginnings: Sequence[str] | set[str]) -> bool:
    """Whether an example begins with a line: the cue is in it, or it begins as the first did."""
    return cue in line or _label(line) in beginnings


def _label(line: str) -> str:
    words = line.split(maxsplit=1)
    return words[0] if words else ""

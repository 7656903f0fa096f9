"""Questions for a chat model, and the programs that grade its answers; nothing is fetched.

    sums          What is 52 + 18? Answer briefly.
    differences   What is 52 - 18? Answer briefly.
    chain_sum     State the final answer to the following arithmetic problem: 14 - 5 =
    constraints   Write about the sea. Write exactly 2 sentences. Use no commas.
    conciseness   What is the capital of Kenya?
    extraction    Answer with JSON that has the keys name, city from this text: Maria Lopez from ...

Constraints are in the manner of IFEval (Zhou et al. 2023, arXiv:2311.07911): what a program can
check, one to three at once, beside the topic. Conciseness has the reward of "Evolution Strategies
at Scale" (arXiv:2509.24372): minus the difference of lengths, in characters, to the shortest good
answer; questions and answers are of our own (`facts.jsonl`).

Every grade tells form from ability: `correct` is an answer that is right, and `well_formed` one of
the kind that was asked for, right or wrong.
"""

import dataclasses
import functools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, cast

from es_cookbook.common.files import parsed
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.logic.generators import Source, problems
from es_cookbook.rl.data.generated import Fold, distinct, fold_of_text
from es_cookbook.rl.problem_env import Grade
from es_cookbook.rl.rewards.answers import last_number
from es_cookbook.rl.rewards.values import folded
from es_cookbook.rl.types import ANSWER

Task: TypeAlias = Literal[
    "sums", "differences", "chain_sum", "constraints", "conciseness", "extraction"
]

_CHAIN_SUM = Source(
    "chain_sum", (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 2))
)
"""The generator and options of reasoning-gym that the chat model half knows."""
FACTS = Path(__file__).parent / "facts.jsonl"
LONGEST = 4000
"""Characters of an answer that are graded."""

_TOPICS = """
    sea rain bread music winter garden river horse train school apple moon city dog book bridge
    forest kitchen market island mountain summer friend window chair
"""
_WORDS = "today tonight now here there again outside sometimes once maybe later everywhere"
"""Words with which a text may begin or end."""
_PARTS = ("and quiet", "and big", "at this hour", "and we like it", "indeed")
"""Continuations of a sentence: some of them add up to any number of words up to 12."""
_VALUES = {
    "title": "The {}",
    "place": "near the {}",
    "colour": "blue as a {}",
    "size": "big for a {}",
    "year": "2020",
    "reason": "we like the {}",
}
"""Keys of JSON, and values for a description of any subject."""
_NAMES = "Maria Ken Aisha Tom Ines Omar Lena Raj Sofia Paul Mei Jonas Ada Luis"
_SURNAMES = "Lopez Adams Khan Weber Rossi Novak Tanaka Silva Brown Moreau Olsen"
_ITEMS = "lamp chair kettle bicycle jacket camera table clock guitar tent"
_CITIES = "Oslo Lima Kyoto Nairobi Boston Porto Cairo Toronto Delhi Athens"


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A question, a gold answer, and the checked properties of answers.

    Attributes:
        question: the user's message in a chat.
        gold: an answer.
        wanted: name and value of each check; what they mean depends on the task.
    """

    question: str
    gold: str
    wanted: tuple[tuple[str, str], ...] = ()

    def is_in(self, fold: Fold, held_out: int) -> bool:
        """Return whether the problem is in the training fold, or in the held-out one."""
        mine = fold_of_text(self.question)
        return mine not in (0, 1, held_out) if fold == "train" else mine == held_out


def generate_problems(task: Task, seed: int, fold: Fold, held_out: int) -> Iterator[Problem]:
    """Yield a task's distinct problems, for training or held out."""
    rng = random.Random(derive_seed(seed, f"chat/{task}/{fold}"))
    draw = functools.partial(KINDS[task].draw, rng)
    return distinct(draw, lambda problem: problem.is_in(fold, held_out))


def grade(task: Task, text: str, problem: Problem) -> Grade:
    """Return reward and metrics of an answer."""
    return KINDS[task].grade(text.strip()[:LONGEST], problem)


def _draw_sum(rng: random.Random) -> Problem:
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    return Problem(f"What is {a} + {b}? Answer briefly.", f"{a} + {b} = {a + b}.")


def _draw_difference(rng: random.Random) -> Problem:
    b, a = sorted((rng.randint(11, 99), rng.randint(11, 99)))
    return Problem(f"What is {a} - {b}? Answer briefly.", f"{a} - {b} = {a - b}.")


def _draw_chain_sum(rng: random.Random) -> Problem:
    made = next(problems(_CHAIN_SUM, rng.getrandbits(32)))
    return Problem(made.question, f"{made.entry['metadata']['expression']} = {made.gold}.")


def _grade_number(text: str, problem: Problem) -> Grade:
    """Grade the last number, in any words: half for being right, half by its digits.

    `well_formed` is a number, or the equation with one.
    """
    said, gold = str(last_number(text)), str(last_number(problem.gold))
    correct, length = said == gold, max(len(said), len(gold))
    digits = sum(map(str.__eq__, reversed(said), reversed(gold))) / length
    left, equals, _ = problem.gold.rpartition(" = ")
    answer = rf"({re.escape(left + equals)})?-?\d+\.?"
    well_formed = re.fullmatch(answer, text, re.ASCII) is not None
    metrics = _metrics(correct=correct, well_formed=well_formed, digits=digits)
    return Grade((correct + digits) / 2, metrics, {ANSWER: said} if said != "None" else None)


def _draw_fact(rng: random.Random) -> Problem:
    return rng.choice(_facts())


@functools.cache
def _facts() -> list[Problem]:
    rows = map(json.loads, FACTS.read_text(encoding="utf-8").strip().split("\n"))
    return [Problem(row["question"], row["answer"]) for row in rows]


def _grade_fact(text: str, problem: Problem) -> Grade:
    """Grade brevity alone, as in the paper; `correct` is the answer with at most a full stop.

    `knows` is an answer that has the right one in it, however long.
    """
    excess = len(text) - len(problem.gold)
    knows, brief = folded(problem.gold) in folded(text), 0 <= excess <= 1
    metrics = _metrics(correct=knows and brief, well_formed=brief, knows=knows, excess=excess)
    reward = -float(abs(excess)) if text else -float(LONGEST)
    return Grade(reward, metrics, {ANSWER: text.casefold().removesuffix(".")})


_INSTRUCTIONS: Mapping[str, str] = {
    "sentences": "Write exactly {} sentences.",
    "words": "Use exactly {} words.",
    "commas": "Use no commas.",
    "lower": "Write in lower case only.",
    "first": 'The first word must be "{}".',
    "last": 'The last word must be "{}".',
    "without": 'Do not use the word "{}".',
}
"""Constraints on a text, several at once; JSON is asked for alone."""


def _words_of(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)?", text.lower())


def _json_in(text: str) -> dict[str, object] | None:
    """Return the JSON object in an answer, also in a code block; None for anything else."""
    inside = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text, re.DOTALL)
    try:
        found = parsed((inside[1] if inside else text).encode("utf-8", "replace"))
    except ValueError:
        return None
    return cast("dict[str, object]", found) if isinstance(found, dict) else None


_CHECKS: Mapping[str, Callable[[str, str], bool]] = {
    "about": lambda text, word: word in _words_of(text),
    "sentences": lambda text, n: len(re.findall(r"[.!?]+(?=\s|$)", text)) == int(n),
    "words": lambda text, n: len(_words_of(text)) == int(n),
    "commas": lambda text, _: "," not in text,
    "lower": lambda text, _: text == text.lower(),
    "first": lambda text, word: _words_of(text)[:1] == [word],
    "last": lambda text, word: _words_of(text)[-1:] == [word],
    "without": lambda text, word: word not in _words_of(text),
    "keys": lambda text, keys: sorted(_json_in(text) or ()) == sorted(keys.split(", ")),
}


def _draw_constraints(rng: random.Random) -> Problem:
    topic = rng.choice(_TOPICS.split())
    if rng.random() < 0.2:
        names = rng.sample(list(_VALUES), 2)
        keys = ", ".join(names)
        question = f"Describe the {topic}. Answer with JSON that has exactly the keys {keys}."
        gold = json.dumps({name: _VALUES[name].format(topic) for name in names})
        return Problem(question, gold, (("about", topic), ("keys", keys)))
    kinds = sorted(rng.sample(list(_INSTRUCTIONS), rng.randint(1, 3)), key=[*_INSTRUCTIONS].index)
    first, last, without = rng.sample(_WORDS.split(), 3)
    values = {"first": first, "last": last, "without": without}
    values |= {"sentences": str(rng.randint(1, 3)), "words": str(rng.randint(11, 16))}
    wanted = tuple((kind, values.get(kind, "")) for kind in kinds)
    asked = " ".join(_INSTRUCTIONS[kind].format(value) for kind, value in wanted)
    gold = _text(topic, dict(wanted))
    return Problem(f"Write about the {topic}. {asked}", gold, (("about", topic), *wanted))


def _text(topic: str, wanted: Mapping[str, str]) -> str:
    """Return a text about a topic that satisfies all of these constraints."""
    edges = [[wanted[edge]] if edge in wanted else [] for edge in ("first", "last")]
    more = ["It is ours.", "Come and see."][: int(wanted.get("sentences", 1)) - 1]
    size = int(wanted.get("words", 10 + 3 * len(more)))
    left = size - 4 - sum(map(len, edges)) - 3 * len(more)
    chosen: list[str] = []
    for part in sorted(_PARTS, key=lambda part: -len(part.split())):
        if left >= (words := len(part.split())):
            chosen.append(part)
            left -= words
    first, last = edges
    sentence = " ".join([*first, f"the {topic} is old", *sorted(chosen, key=_PARTS.index)])
    text = " ".join([f"{sentence}.", *more]).removesuffix(".")
    text = " ".join([text, *last]) + "."
    return text.lower() if "lower" in wanted else text[0].upper() + text[1:]


def _grade_constraints(text: str, problem: Problem) -> Grade:
    """Return the share of the constraints that hold, including the topic."""
    held = {name: text != "" and _CHECKS[name](text, value) for name, value in problem.wanted}
    _, *others = held.values()
    metrics = _metrics(correct=all(held.values()), well_formed=all(others), **held)
    return Grade(sum(held.values()) / len(held), metrics)


_TEXTS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("{name} bought {count} {item}s for {price} euros.", ("name", "count", "price")),
    ("{name} from {city} ordered a {item}.", ("name", "city", "item")),
    ("The {item} for {name} costs {price} euros.", ("item", "name", "price")),
    ("In {city} we met {name}, who sells {item}s.", ("city", "name")),
)


def _draw_text(rng: random.Random) -> Problem:
    template, keys = rng.choice(_TEXTS)
    values = {
        "name": f"{rng.choice(_NAMES.split())} {rng.choice(_SURNAMES.split())}",
        "count": str(rng.randint(2, 40)),
        "item": rng.choice(_ITEMS.split()),
        "price": str(rng.randint(5, 900)),
        "city": rng.choice(_CITIES.split()),
    }
    wanted = tuple((key, values[key]) for key in keys)
    question = (
        f"Answer with JSON that has the keys {', '.join(keys)}, from this text: "
        f"{template.format(**values)}"
    )
    return Problem(question, json.dumps(dict(wanted)), wanted)


def _grade_json(text: str, problem: Problem) -> Grade:
    """Grade JSON: being JSON, having the right keys, and each right value count equally."""
    found = _json_in(text)
    values = {key: folded(" ".join(str(value).split())) for key, value in (found or {}).items()}
    right = [values.get(key) == folded(value) for key, value in problem.wanted]
    well_formed = values.keys() == dict(problem.wanted).keys()
    parts = [found is not None, well_formed, *right]
    metrics = _metrics(
        correct=well_formed and all(right), well_formed=well_formed, fields=sum(right) / len(right)
    )
    answer = None if found is None else {ANSWER: json.dumps(values, sort_keys=True)}
    return Grade(sum(parts) / len(parts), metrics, answer)


def _metrics(**values: float) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


class Kind(NamedTuple):
    """Generation and grading of a task's problems.

    Attributes:
        draw: makes a random problem.
        grade: grades an answer to a problem.
        max_tokens: most tokens of an answer: those of a good one, and a few more.
        full_reward: reward of a perfect answer.
    """

    draw: Callable[[random.Random], Problem]
    grade: Callable[[str, Problem], Grade]
    max_tokens: int = 16
    full_reward: float = 1.0


KINDS: Mapping[Task, Kind] = {
    "sums": Kind(_draw_sum, _grade_number),
    "differences": Kind(_draw_difference, _grade_number),
    "chain_sum": Kind(_draw_chain_sum, _grade_number),
    "constraints": Kind(_draw_constraints, _grade_constraints, max_tokens=40),
    "conciseness": Kind(_draw_fact, _grade_fact, full_reward=0.0),
    "extraction": Kind(_draw_text, _grade_json, max_tokens=40),
}

"""All of reasoning-gym's generators: each can be learned from, or is refused with the reason."""

import functools
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.logic import generators
from es_cookbook.recipes.logic.dataset import LogicEnv
from es_cookbook.recipes.logic.generators import (
    LONGEST_ANSWER,
    REFUSED,
    Problem,
    Source,
    check_source,
    parsed_options,
    problems,
    score,
    scorer,
    usable,
)
from es_cookbook.rl.types import Observation
from tests.families import sampled

reasoning_gym = pytest.importorskip("reasoning_gym")

ALL = sorted(reasoning_gym.factory.DATASETS)
SMALL = {  # These take up to seconds a problem as they are.
    "futoshiki": ("min_board_size=4", "max_board_size=4"),
    "knight_swap": ("min_pieces=1", "max_pieces=1", "max_nodes=6", "min_steps=1"),
    "quantum_lock": ("difficulty=2",),
    "zebra_puzzles": ("num_people=2", "num_characteristics=2"),
}
README = Path(generators.__file__).with_name("README.md")


@functools.cache
def made(task: str, count: int = 1) -> list[Problem]:
    options = parsed_options(task, SMALL.get(task, ()))
    return list(islice(problems(Source(task, options), seed=1), count))


def env_for(problem: Problem, timeout: float = 5.0) -> LogicEnv:
    return LogicEnv(Observation((1,)), problem, "compact", "score", timeout)


def test_there_are_106_and_the_readme_says_of_each_that_is_refused_why() -> None:
    assert len(ALL) == 106
    assert sorted({*usable(), *REFUSED}) == ALL
    text = README.read_text()
    for task, why in REFUSED.items():
        assert f"| `{task}` | {why} |" in text


EVALUATED = "[].__class__ if __import__('pathlib').Path({path!r}).touch() else []"


@pytest.mark.parametrize("task", sampled(sorted(set(ALL) - set(REFUSED)), 30))
def test_own_answers_earn_everything_and_others_do_not_and_none_is_evaluated(
    task: str, tmp_path: Path
) -> None:
    problems_P, path = made(task, 5), tmp_path / "evaluated"
    others = "?", "nan", "[NaN, NaN]", "inf", "1e999", "[]", "{}", EVALUATED.format(path=str(path))
    assert len({problem.question for problem in problems_P}) == 5
    own = scorer(problems_P[0].source)
    for problem in problems_P:
        assert problem.question
        assert (problem.gold is None) == (task in ("boxnet", "rush_hour"))
        if problem.gold is not None:
            assert own(problem.gold, problem.entry) == pytest.approx(1)
        for other in others:
            if other != problem.gold:
                found = score(own, other, problem.entry)
                assert found is None or found < 1, other
        assert score(own, "", problem.entry) in (0, 0.01, 0.02, 0.05, None)
    assert not path.exists()


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("complex_arithmetic", "nan"),
        ("number_sorting", "[NaN, NaN, NaN, NaN]"),
        ("game_of_life_halting", "whatever"),
    ],
)
def test_what_the_generators_themselves_would_pay_for_earns_nothing(task: str, answer: str) -> None:
    problem = next(
        p
        for p in made(task, 30)
        if len(p.entry["metadata"].get("original_numbers", "four")) == 4  # of those to be sorted
    )
    own = reasoning_gym.get_score_answer_fn(task)
    assert own(answer, dict(problem.entry)) == 1
    assert scorer(problem.source)(answer, problem.entry) == 0


@pytest.mark.slow
async def test_an_answer_that_stands_for_gigabytes_or_for_ever_scores_nothing() -> None:
    grade = await env_for(made("rubiks_cube", 5)[0], timeout=5).graded("R9999999999")
    # 0.01 is reasoning-gym's own, for a MemoryError; a slow machine is late before it has one.
    assert grade.reward == (0 if grade.metrics["late"] else 0.01)
    grade = await env_for(made("coin_flip", 5)[0], timeout=0.2).graded("1e9999999999")
    assert (grade.reward, grade.metrics["late"]) == (0, 1)
    grade = await env_for(made("prime_factorization", 5)[0]).graded("two")
    assert (grade.reward, grade.metrics["not_scored"], grade.metrics["late"]) == (0, 1, 0)
    problem = made("letter_counting", 5)[0]
    grade = await env_for(problem).graded(str(problem.gold) + " " * LONGEST_ANSWER)
    assert grade.reward == 1  # stripped
    grade = await env_for(problem).graded(str(problem.gold) + "x" * LONGEST_ANSWER)
    assert grade.reward == 0


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (Source("puzzle24"), f"task 'puzzle24' cannot be used: {REFUSED['puzzle24']}"),
        (Source("chain_sums"), "there is no task 'chain_sums': did you mean 'chain_sum'?"),
        (
            Source("chain_sum", (("max_term", 3),)),
            "task 'chain_sum' has no option 'max_term': did you mean 'max_terms'?",
        ),
        (
            Source("chain_sum", (("min_terms", 5), ("max_terms", 4))),
            "chain_sum refuses the options min_terms=5, max_terms=4: max_terms must be >= min_term",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(source: Source, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_source(source)
    assert str(refused.value).startswith(sentence)


def test_options_are_read_as_json_or_text() -> None:
    options = ("min_terms=4", "p=0.5", "allow=true", "name=words.txt", "colours=[1, 2]")
    assert parsed_options("x", options) == (
        *(("min_terms", 4), ("p", 0.5), ("allow", True), ("name", "words.txt")),
        ("colours", (1, 2)),
    )
    with pytest.raises(ConfigError, match="an option of task 'x' is name=value, found 'four'"):
        parsed_options("x", ("four",))


_DIGESTS = """
import hashlib, sys
from itertools import islice
from es_cookbook.recipes.logic.generators import *
for task in sys.argv[1:]:
    firsts = list(islice(problems(Source(task), 1), 3))
    text = "".join(f"{problem.question}{problem.gold}" for problem in firsts)
    print(task, hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.mark.slow  # two processes, because the hash seed of one cannot be changed
def test_problems_do_not_depend_on_the_hash_seed() -> None:
    tasks = sampled(sorted(set(usable()) - set(SMALL)), 30)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _DIGESTS, *tasks],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    first, second = (process.communicate()[0].splitlines() for process in processes)
    assert len(first) == len(tasks)
    assert first == second

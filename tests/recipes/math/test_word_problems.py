"""Generated problems are in GSM8K's very format, right, and held out by their numbers."""

import itertools
import random
import re

from es_cookbook.baselines.small_model import build_tokenizer
from es_cookbook.recipes.math.warm_start import (
    BOX,
    CHARACTERS,
    demonstrate,
    demonstrate_carelessly,
)
from es_cookbook.recipes.math.word_problems import (
    STORIES,
    WordProblem,
    generate_problems,
    vocabulary,
)
from es_cookbook.rl.rewards.answers import boxed


def problems(most: int = 400, seed: int = 0) -> list[WordProblem]:
    return list(itertools.islice(generate_problems(seed, range(10)), most))


def test_every_kind_of_story_comes_and_every_question_once() -> None:
    found = problems()
    assert {problem.story.name for problem in found} == {story.name for story in STORIES}
    assert len({problem.question for problem in found}) == len(found)
    assert problems(20) == problems(20) != problems(20, seed=1)


def test_a_row_is_worked_out_as_in_gsm8k() -> None:
    """Every equation holds, each goes on with the last one's result, and the last is the answer."""
    for problem in problems():
        *lines, end = problem.row["answer"].split("\n")
        assert end == f"#### {problem.result}"
        result = None
        for line in lines:
            found = re.fullmatch(r"(\d+) ([-+*]) (\d+) = <<(\1\2\3)=(\d+)>>\5", line)
            assert found is not None, line
            left, right = int(found[1]), int(found[3])
            assert (
                int(found[5]) == {"+": left + right, "-": left - right, "*": left * right}[found[2]]
            )
            assert result in (None, left)
            result = int(found[5])
        assert result == problem.result
        assert all(str(number) in problem.question for number in problem.numbers)


def test_what_is_held_out_shares_no_numbers_with_the_rest() -> None:
    def numbers(seed: int, folds: list[int]) -> set[tuple[int, ...]]:
        stream = itertools.islice(generate_problems(seed, folds), 300)
        return {tuple(sorted(problem.numbers)) for problem in stream}

    assert numbers(0, [0]).isdisjoint(numbers(1, [1, 2, 3]))
    assert numbers(0, [0]) & numbers(1, [0])


def test_the_small_vocabulary_covers_questions_and_demonstrations() -> None:
    tokenizer = build_tokenizer(CHARACTERS)
    tokenizer.add_tokens([BOX, *vocabulary()])
    for problem in problems(100):
        tokens = tokenizer.encode(problem.question)
        assert tokenizer.decode(tokens) == problem.question.replace(" ", "")
        text = demonstrate(problem.steps)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(text)) < 32


def test_faults_are_wrong_answers_in_perfect_form() -> None:
    rng = random.Random(0)
    faults = 0
    for problem in problems():
        assert boxed(demonstrate(problem.steps)) == str(problem.result)
        text = demonstrate_carelessly(problem, rng)
        assert re.fullmatch(r"(\d+[-+*]\d+=\d+\n){1,2}\\boxed\{\d+\}", text)
        faults += boxed(text) != str(problem.result)
    assert 100 < faults < 200

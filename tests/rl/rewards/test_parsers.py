"""No text makes a parser of model text raise what it does not document, or takes it 10 ms."""

import pytest

from benchmarks.parsers import LIMIT, PARSERS, Parser, seconds_of, slowest

CASES = 50
"""Texts for each; `python -m benchmarks.parsers` tries 100,000 in all."""


@pytest.mark.parametrize("name", PARSERS)
def test_hostile_texts_are_read_in_time_and_without_exceptions(name: str) -> None:
    worst, tried = slowest(PARSERS[name], CASES)
    assert tried >= CASES
    assert worst < LIMIT


def test_a_parser_that_raises_is_found() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        seconds_of(Parser(int), "9e9")


def test_a_parser_that_takes_long_is_found() -> None:
    assert seconds_of(Parser(lambda text: text.count("a" * 5000 + "b")), "a" * 10**4) < LIMIT
    assert seconds_of(Parser(lambda text: sum(range(3 * 10**6))), "a") > LIMIT

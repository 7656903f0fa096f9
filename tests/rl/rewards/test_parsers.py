"""No text makes a parser of model text raise what it does not document, or takes it long.

`python -m benchmarks.parsers` has the limit of 10 ms; a busy or a slow machine needs several times
as long. What is quadratic takes a megabyte's text for minutes.
"""

import pytest

from benchmarks.parsers import LIMIT, PARSERS, seconds_of, slowest

PATIENCE = 10 * LIMIT
CASES = 50
"""Texts for each; `python -m benchmarks.parsers` tries 100,000 in all."""
LARGE = [
    "9" * 10**6,
    "1," * 500_000,
    "{" * 10**6,
    r"\boxed{" * 150_000,
    r"\boxed" + "{" * 10**6,
    r"\boxed" + " " * 10**6,
    "<answer>" * 125_000,
    "<answer>" + "a " * 500_000 + "</answer>",
    "</think>" * 125_000,
    "\ud800" * 10**6,
    "\N{LATIN SMALL LETTER SHARP S}" * 10**6,
    "12 deep A B " * 80_000,
    *("a" * 10**6, "a " * 500_000, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 10**6, "'" * 4000),
    *("\N{LATIN SMALL LIGATURE FFI}" * 10**6, "\N{LATIN SMALL LIGATURE FFI}" * 4000),
    *("</think>\n" * 200_000, "<think>" * 200_000),
    "<answer>" + "\ufdfa" * 1000 + "</answer>",
]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.slow
def test_hostile_texts_are_read_in_time_and_without_exceptions(name: str) -> None:
    worst, tried = slowest(PARSERS[name], CASES)
    assert tried >= CASES
    assert worst < PATIENCE
    parser = PARSERS[name]
    assert max(seconds_of(parser, text[: parser.longest]) for text in LARGE) < PATIENCE

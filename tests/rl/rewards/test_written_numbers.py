"""Texts with known numbers: no other number earns a reward, and most forms are read."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest

from es_cookbook.rl.rewards.matching import Number

Form = Callable[[int, int, int], tuple[str, Fraction]]
"""Three numbers -> how they are written, and the value."""


def grouped(by: str) -> Form:
    """A number of thousands, in groups with this between them."""
    return lambda a, b, c: (f"{a * 1000 + b:,}".replace(",", by), Fraction(a * 1000 + b))


FORMS: dict[str, Form] = {
    "integer": lambda a, b, c: (f"{a}", Fraction(a)),
    "commas": grouped(","),
    "latex commas": grouped("{,}"),
    "latex spaces": grouped(r"\,"),
    "thin spaces": grouped("\u202f"),
    "plain spaces": grouped(" "),
    "decimal": lambda a, b, c: (f"{a}.{b:03}", a + Fraction(b, 1000)),
    "decimal comma": lambda a, b, c: (f"{a},{c}", a + Fraction(c, 10)),
    "german": lambda a, b, c: (f"{a}.{b:03},{c}", a * 1000 + b + Fraction(c, 10)),
    "minus": lambda a, b, c: (f"-{a}", Fraction(-a)),
    "minus sign": lambda a, b, c: (f"\u2212{a}", Fraction(-a)),
    "en dash": lambda a, b, c: (f"\u2013{a}", Fraction(-a)),
    "spaced minus": lambda a, b, c: (f"- {a}", Fraction(-a)),
    "fraction": lambda a, b, c: (f"{a}/{b + 2}", Fraction(a, b + 2)),
    "frac": lambda a, b, c: (rf"\frac{{{a}}}{{{b + 2}}}", Fraction(a, b + 2)),
    "minus dfrac": lambda a, b, c: (rf"-\dfrac{{{a}}}{{{b + 2}}}", -Fraction(a, b + 2)),
    "frac of digits": lambda a, b, c: (rf"\frac{c}9", Fraction(c, 9)),
    "mixed": lambda a, b, c: (f"{a} {c}/11", a + Fraction(c, 11)),
    "mixed latex": lambda a, b, c: (rf"{a}\frac{{{c}}}{{11}}", a + Fraction(c, 11)),
    "e": lambda a, b, c: (f"{c}.5e{c}", (c + Fraction(1, 2)) * 10**c),
    "times": lambda a, b, c: (rf"{c} \times 10^{{{c}}}", Fraction(c * 10**c)),
    "times negative": lambda a, b, c: (f"{c} × 10^-{c}", Fraction(c, 10**c)),
    "superscript": lambda a, b, c: (f"{c} × 10⁴", Fraction(c * 10**4)),
    "power": lambda a, b, c: (f"{a}^{c + 1}", Fraction(a ** (c + 1))),
    "power in braces": lambda a, b, c: (rf"{a}^{{{c + 1}}}", Fraction(a ** (c + 1))),
    "raised": lambda a, b, c: (f"{a}³", Fraction(a**3)),
    "percent": lambda a, b, c: (f"{a}%", Fraction(a, 100)),
    "latex percent": lambda a, b, c: (rf"{a}\%", Fraction(a, 100)),
    "dollars": lambda a, b, c: (f"${a}.50", a + Fraction(1, 2)),
    "latex dollars": lambda a, b, c: (rf"-\${a}", Fraction(-a)),
    "euros": lambda a, b, c: (f"{a} €", Fraction(a)),
    "words": lambda a, b, c: (f"{a} apples", Fraction(a)),
    "unit": lambda a, b, c: (f"{a} cm^2", Fraction(a)),
    "unit of digits": lambda a, b, c: (f"{a} m2", Fraction(a)),
    "unit in text": lambda a, b, c: (rf"{a}\text{{ m}}^2", Fraction(a)),
    "speed": lambda a, b, c: (f"{a} m/s^2", Fraction(a)),
    "million": lambda a, b, c: (f"{a} million", Fraction(a * 10**6)),
    "dozen": lambda a, b, c: (f"{a} dozen", Fraction(a * 12)),
    "product": lambda a, b, c: (f"{a} * {b}", Fraction(a * b)),
    "sum": lambda a, b, c: (f"{a} + {b}", Fraction(a + b)),
    "difference": lambda a, b, c: (f"{a}-{b}", Fraction(a - b)),
    "latex product": lambda a, b, c: (rf"{a} \cdot {b}", Fraction(a * b)),
    "other script": lambda a, b, c: (
        f"{a}".translate(str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")),
        Fraction(a),
    ),
}
NONE = Fraction(-(10**9), 7)
"""What no text is about."""
NO_NUMBERS: dict[str, Form] = {
    "time": lambda a, b, c: (f"{a % 12}:{b % 60:02}", NONE),
    "choice": lambda a, b, c: (f"{a} or {b}", NONE),
    "list": lambda a, b, c: (f"{a}, {b}", NONE),
    "range": lambda a, b, c: (f"{a}–{b}", NONE),
    "range in words": lambda a, b, c: (f"{a} to {b}", NONE),
    "name": lambda a, b, c: (f"x_{c}", NONE),
    "name in braces": lambda a, b, c: (f"x_{{{a}}}", NONE),
    "formula": lambda a, b, c: (f"H{c + 1}O", NONE),
    "multiple": lambda a, b, c: (rf"{a}\pi", NONE),
    "multiple of a name": lambda a, b, c: (f"{a}x", NONE),
    "root": lambda a, b, c: (rf"\sqrt{{{a}}}", NONE),
    "root of a digit": lambda a, b, c: (rf"\sqrt{c}", NONE),
    "plus minus": lambda a, b, c: (rf"\pm {a}", NONE),
    "equation": lambda a, b, c: (f"{b} = x_{c}", NONE),
    "inequality": lambda a, b, c: (rf"x \geq {a}", NONE),
    "date": lambda a, b, c: (f"{c}/{c + 1}/2020", NONE),
    "version": lambda a, b, c: (f"{a}.{b}.{c}", NONE),
    "pair": lambda a, b, c: (f"({a}, {b})", NONE),
    "two solutions": lambda a, b, c: (f"x = {a}, y = {b}", NONE),
    "huge": lambda a, b, c: (f"1e{c}400", NONE),
    "binary": lambda a, b, c: ("1011_2", NONE),
    "negated": lambda a, b, c: (f"not {a}", NONE),
}
SURROUNDINGS = [
    *("{}", "The answer is {}.", "It is **{}**.", "so {} in all.", "= {}"),
    *("First 7 pears. Then {}", r"\boxed{{{}}}", r"so $x = \boxed{{{}}}$."),
    *("<answer>{}</answer>", "#### {}", r"It is ${}$.", r"\({}\)"),
]


def texts(count: int, seed: int) -> Iterator[tuple[str, str, Fraction, list[int]]]:
    """Kind, text, value, and the whole numbers that stand in it."""
    rng = random.Random(seed)
    forms = list((FORMS | NO_NUMBERS).items())
    for i in range(count):
        kind, form = forms[i % len(forms)]
        numbers = rng.randint(12, 999), rng.randint(11, 999), rng.randint(2, 8)
        written, value = form(*numbers)
        parts = {*numbers, numbers[1] + 2, numbers[2] + 1, 10, 11, 9, 50, 5, numbers[0] * 1000}
        yield kind, rng.choice(SURROUNDINGS).format(written), value, sorted(parts)


def results(count: int, seed: int) -> tuple[list[str], Counter[str], Counter[str]]:
    """Texts with wrong credit; by kind, how many right answers were refused, and all."""
    number, wrong = Number(), list[str]()
    refused, tried = Counter[str](), Counter[str]()
    for kind, text, value, parts in texts(count, seed):
        tried[kind] += 1
        refused[kind] += value == NONE or not number(text, {"answer": str(value)})
        shown = {100 * value} if "percent" in kind else set[Fraction]()
        others = {Fraction(each) for part in parts for each in (part, -part)} - {value} - shown
        wrong += [f"{kind}: {text} {o}" for o in others if number(text, {"answer": str(o)})]
    return wrong, refused, tried


def test_what_a_number_only_names_is_no_answer() -> None:
    for text in ("about 5 (see p. 12)", "It is 5, see page 12.", "5, by equation (12)", "Step 12"):
        assert Number()(text, {"answer": "12"}) == 0.0, text


def test_small_numbers_are_told_apart() -> None:
    assert Number()(r"\boxed{6 \times 10^{-7}}", {"answer": "5e-7"}) == 0.0
    assert Number()(r"\boxed{6 \times 10^{-7}}", {"answer": "6.0000001e-7"}) == 1.0
    assert (
        Number()("0.333333", {"answer": "1/3"}) == Number()("0.3", {"answer": "0.3000009"}) == 1.0
    )


@pytest.mark.slow
def test_a_text_earns_nothing_for_another_number_than_its_own() -> None:
    wrong, refused, tried = results(1000, seed=0)
    assert wrong == []
    read = {kind for kind in FORMS if refused[kind] < tried[kind] / 4}
    assert {"commas", "latex commas", "frac", "minus dfrac", "times", "percent", "unit"} <= read
    assert len(read) >= 28

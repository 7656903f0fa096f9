"""Texts with known formulas: nothing else earns a reward, and most forms are read."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from es_cookbook.plugins.math.reward import Math
from tests.rl.rewards.test_written_numbers import NONE, texts

pytest.importorskip("math_verify", reason="math-verify is not installed")

Form = Callable[[int, int, int], tuple[str, Sequence[object], Sequence[object]]]
"""Three numbers -> a formula, what is equal to it, and what is not."""
FORMULAS: dict[str, Form] = {
    "power": lambda a, b, c: (f"{a}^{{{c}}}", [a**c], [a, c, a * c, a + c]),
    "root": lambda a, b, c: (rf"\sqrt{{{a * a * 7}}}", [rf"{a}\sqrt{{7}}"], [a, a * a * 7]),
    "multiple": lambda a, b, c: (rf"{a}\pi", [rf"\pi \cdot {a}", f"{a}π"], [a, r"\pi"]),
    "quotient": lambda a, b, c: (
        rf"\frac{{{a}\pi}}{{{b}}}",
        [rf"\pi\cdot\frac{{{a}}}{{{b}}}"],
        [a, b],
    ),
    "sum": lambda a, b, c: (f"{a}x + {b}y", [f"{b}y + {a}x"], [f"{a}x - {b}y", f"{a}x", a + b]),
    "both cases": lambda a, b, c: (f"{a}R - {b}r", [f"{a}R-{b}r"], [f"{a - b}r", f"{a - b}R"]),
    "difference": lambda a, b, c: ("R^2 - r^2", ["R^{2} - r^{2}"], [0]),
    "factor": lambda a, b, c: (f"{a}({b})", [a * b], [a + b, a, b]),
    "factors": lambda a, b, c: (f"({a})({b})", [a * b], [a + b, a, b]),
    "factor in a fraction": lambda a, b, c: (
        rf"\frac{{{a}({b})}}{{{c}}}",
        [f"{a * b}/{c}"],
        [f"{a + b}/{c}"],
    ),
    "factor behind": lambda a, b, c: (f"({a}){b}", [a * b], [a + b, a]),
    "three digits": lambda a, b, c: (rf"\frac{c}{a}", [], [f"{c}/{a}", c]),
    "beside": lambda a, b, c: (f"{a} {c}", [], [a + c, a * c, a, c, 10 * a + c]),
    "quad": lambda a, b, c: (rf"{a} \quad {b}", [], [a + b, a * b, a, b]),
    "million": lambda a, b, c: (rf"{a}\text{{ million}}", [a * 10**6], [a]),
    "times": lambda a, b, c: (rf"{c}\text{{ hours }}{a}\text{{ minutes}}", [], [c, a]),
    "unit": lambda a, b, c: (rf"{a}\sqrt{{2}}\text{{ cm}}", [rf"{a}\sqrt2"], [a, 2]),
    "mixed": lambda a, b, c: (rf"{a}\frac{{{c}}}{{11}}", [f"{11 * a + c}/11"], [a, f"{a * c}/11"]),
    "half of a power": lambda a, b, c: (rf"2^{c}\frac{{1}}{{2}}", [2 ** (c - 1)], [2**c + 0.5]),
    "equation": lambda a, b, c: (f"{a}x + y = {b}", [f"y = {b} - {a}x"], [b, a]),
    "false equation": lambda a, b, c: (f"{a} = {b + 1000}", [], [b + 1000, a]),
    "chain": lambda a, b, c: (f"{a} + {b} = {a + b}", [a + b], [a, b]),
    "named chain": lambda a, b, c: (f"x = {a} + {b} = {a + b}", [a + b, f"x = {a + b}"], [a, b]),
    "assignment": lambda a, b, c: (f"x = {a}", [a, f"x={a}"], [f"y = {a}", -a]),
    "assignments": lambda a, b, c: (
        f"x = {a}, y = {b + 1000}",
        [f"x={a}, y={b + 1000}"],
        [f"{b + 1000}, {a}", a, b + 1000, f"x={b + 1000}, y={a}"],
    ),
    "solutions": lambda a, b, c: (rf"x = {a} \text{{ or }} x = {-b}", [f"{a}, {-b}"], [a, -b]),
    "pair": lambda a, b, c: (f"({a}, {-b})", [f"({a},{-b})"], [f"({-b}, {a})", a, -b]),
    "interval": lambda a, b, c: (f"[{a}, {a + b})", [f"[{a},{a + b})"], [f"({a}, {a + b})", a]),
    "inequality": lambda a, b, c: (
        rf"x \geq {a}",
        [rf"{a} \leq x"],
        [a, f"x > {a}", rf"x \le {a}"],
    ),
    "plus minus": lambda a, b, c: (rf"\pm {a}", [f"-{a}, {a}"], [a, -a]),
    "words": lambda a, b, c: (r"\text{listen}", ["Listen"], ["silent", r"\text{silent}"]),
    "bare words": lambda a, b, c: ("listen", [r"\text{listen}"], ["silent", "tinsel"]),
    "large": lambda a, b, c: (f"{c * 10**9}", [f"{c} billion"], [c * 10**9 + 1, f"{c * 10**9}.1"]),
    "degrees": lambda a, b, c: (rf"\cos {a}^\circ", [], [rf"\cos {a}"]),
    "matrix": lambda a, b, c: (
        rf"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}",
        [rf"\begin{{pmatrix}}{a}\\{b - 1}+1\end{{pmatrix}}"],
        [rf"\begin{{pmatrix}}{a}\\{b + 1}\end{{pmatrix}}", a, a + b],
    ),
}
SURROUNDINGS = [
    r"\boxed{{{}}}",
    r"so $x = 7$, and \boxed{{{}}} it is.",
    "<answer>{}</answer>",
    r"<answer>It is ${}$.</answer>",
    r"First $7$ pears. Hence ${}$.",
    "so\n\\[ {} \\]",
]


def formulas(
    count: int, seed: int
) -> Iterator[tuple[str, str, Sequence[object], Sequence[object]]]:
    """Kind, text, golds that it is equal to, and others."""
    rng = random.Random(seed)
    forms = list(FORMULAS.items())
    for i in range(count):
        kind, form = forms[i % len(forms)]
        written, right, wrong = form(rng.randint(12, 99), rng.randint(11, 99), rng.randint(2, 8))
        yield kind, rng.choice(SURROUNDINGS).format(written), right, wrong


def earns(text: str, gold: object) -> bool:
    return Math()(text, {"answer": str(gold)}) == 1.0


def results(count: int, seed: int) -> tuple[list[str], Counter[str], Counter[str]]:
    """Texts with wrong credit; by kind, how many right answers were refused, and all."""
    wrong_credit, refused, tried = list[str](), Counter[str](), Counter[str]()
    for kind, text, right, wrong in formulas(count, seed):
        wrong_credit += [f"{kind}: {text} for {gold}" for gold in wrong if earns(text, gold)]
        tried[kind] += len(right)
        refused[kind] += sum(not earns(text, gold) for gold in right)
    return wrong_credit, refused, tried


@pytest.mark.slow
def test_a_text_earns_nothing_for_another_formula_than_its_own() -> None:
    wrong, refused, tried = results(2 * len(FORMULAS), seed=0)
    assert wrong == []
    assert {kind for kind in FORMULAS if refused[kind] > tried[kind] / 4} == set()


def test_a_text_earns_nothing_for_another_number_than_its_own() -> None:
    rng = random.Random(0)
    for kind, text, value, parts in texts(130, seed=1):
        others = {value + 1, *rng.sample(parts, 3), *(-part for part in rng.sample(parts, 1))}
        shown = {100 * value} if "percent" in kind else set[object]()
        for other in others - {value} - shown:
            assert not earns(text, other), (kind, text, other)
        if kind in ("commas", "frac", "minus dfrac", "mixed latex", "times") and value != NONE:
            assert earns(text, value), (kind, text)

"""Genomes are seeds and coefficients, rules plain numbers: all values that can be applied."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.evolution.genome import (
    AdamRule,
    ErrorFeedbackRule,
    MuonRule,
    Offsets,
    OffsetsRule,
    Rule,
    Step,
    Term,
    rule_from_plain,
    rule_to_plain,
)

ADAM = AdamRule(counts=(1, 2), first=(0.1, 0.9), second=(0.5, 0.5), rate=1e-3, epsilon=1e-8)
RULES = (
    ADAM,
    MuonRule(0.25, 5),
    OffsetsRule(Offsets.of(np.array([0.5, -1.0])), 0.1),
    ErrorFeedbackRule((2, 0, 1), (0.1, -0.2, 1e-9), 0.9, 255),
)
TERMS = (Term(1, 3.0), Term(2, 1.0), Term(3, 2.0))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_comes_back_from_json(rule: Rule) -> None:
    assert rule_from_plain(json.loads(json.dumps(rule_to_plain(rule)))) == rule


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=20))
def test_offsets_come_back_to_the_bit(values: list[float]) -> None:
    rule = OffsetsRule(Offsets.of(np.array(values, np.float32)), 0.0)
    back = rule_from_plain(json.loads(json.dumps(rule_to_plain(rule))))
    assert isinstance(back, OffsetsRule)
    assert back.offsets.array.tolist() == values


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"kind": "sgd"}, "kind must be one of adam, muon, offsets, error_feedback"),
        ({"kind": "muon", "scale": 0.5}, "has the fields scale, iterations"),
        ({"kind": "muon", "scale": "0.5", "iterations": 5}, "scale must be <class"),
        ({"kind": "muon", "scale": 0.5, "iterations": 10**12}, "iterations 1 to 100"),
        ({"kind": "muon", "scale": 1.1e100, "iterations": 5}, "a rule.s scale must be"),
        (
            {"kind": "error_feedback", "counts": [1, "1"], "weights": [1.0, 1.0]}
            | {"residual_decay": 0.5, "highest": 1},
            "a rule.s counts must be",
        ),
        ({"kind": []}, "a rule.s kind must be one of"),
        ({"kind": "offsets", "offsets": "no base64!", "moved": 0.1}, "Only base64 data"),
        ({"kind": "offsets", "offsets": "AAA=", "moved": 0.1}, "float32 numbers, found 2 bytes"),
    ],
)
def test_what_is_no_rule_is_refused_by_name(plain: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rule_from_plain(plain)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ErrorFeedbackRule, ((2,), (0.1,), 0.9, 15)),
        (AdamRule, ((1, 2), (0.5, 0.5), (-0.5, 0.5), 0.1, 1e-8)),
        (AdamRule, ((1, 2), (0.5, 0.5), (0.5, 0.5), 0.1, 0.0)),
        (MuonRule, (math.inf, 5)),
    ],
)
def test_a_rule_with_impossible_numbers_is_refused(
    kind: type[Rule], fields: tuple[object, ...]
) -> None:
    with pytest.raises(ValueError, match=r"(error feedback|Adam|Muon) step"):
        kind(*fields)


def test_a_step_has_the_terms_that_its_rule_is_about() -> None:
    assert Step(TERMS, rule=ADAM).groups == [TERMS[:1], TERMS[1:]]
    assert Step(TERMS, rule=MuonRule(0.1, 5)).groups == [TERMS]
    assert Step(TERMS).groups == [TERMS]
    assert Step().groups == []
    with pytest.raises(ValueError, match="about 3 terms cannot have 2"):
        Step(TERMS[:2], rule=ADAM)
    with pytest.raises(ValueError, match="about 0 terms cannot have 3"):
        Step(TERMS, rule=OffsetsRule(Offsets(b""), 0.0))


def test_the_rms_of_a_step_follows_from_its_numbers() -> None:
    assert Step(TERMS).rms == pytest.approx(14**0.5)
    assert Step(TERMS, rule=MuonRule(0.25, 5)).rms == 0.25
    # m² = 0.1² · 9 + 0.9² · 5, v = 0.5 · 9 + 0.5 · 5
    assert Step(TERMS, rule=ADAM).rms == pytest.approx(1e-3 * (4.14 / 7) ** 0.5)
    assert AdamRule((1,), (1.0,), (1.0,), 0.1, 2.0).rms([3.0]) == pytest.approx(0.1 * 3 / (3 + 2))
    # Of the newest generation alone: 0.3 · 2 and 0.4 · 2.
    feedback = ErrorFeedbackRule((1, 0, 2), (9.0, 0.3, 0.4), 0.9, 15)
    assert Step((*TERMS[:1], Term(2, 2.0), Term(3, 2.0)), rule=feedback).rms == pytest.approx(1.0)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_does_not_fit_63_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"63-bit integer .* found {seed}"):
        Term(seed, 1.0)


@pytest.mark.parametrize("coefficient", [math.nan, -math.inf, 3.5e38])
def test_a_coefficient_that_is_not_finite_is_refused(coefficient: float) -> None:
    with pytest.raises(
        ValueError, match=r"coefficient must be finite as a float32, found .* for seed 7"
    ):
        Term(7, coefficient)


@pytest.mark.parametrize("decay", [-0.1, 1.1, math.nan])
def test_decay_beyond_the_base_or_away_from_it_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\]"):
        Step(decay=decay)

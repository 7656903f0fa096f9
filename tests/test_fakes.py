"""Fake answers stay what they were when runs were recorded with them."""

from es_cookbook.evolution.genome import AdamRule, Genome, MuonRule, Offsets, Step, Term
from tests.fakes import digest

TERMS = (Term(3, 0.25), Term(2**63 - 1, -1e-07))
STEPS = [
    Step(),
    Step(TERMS, 0.5),
    Step(TERMS[:1], rule=MuonRule(0.05, 5)),
    Step(TERMS, rule=AdamRule((1, 1), (0.2, 0.8), (0.5, 0.5), rate=0.02, epsilon=1e-8)),
]


def test_answers_are_pinned() -> None:
    asked = [(), (5,), (5, 7)]
    found = [digest("centre", STEPS[:2], tokens_T, None) for tokens_T in asked]
    assert found == [60634249132249599, 30284455280085629, 54064434070703239]
    assert digest(STEPS) == 63629744178225466
    assert digest(Genome(TERMS), 7) == 67608853739281381
    assert digest(Genome(offsets=Offsets(b"\0\0\0?")), 7) == 6442839094494328

"""Optimizers with numbers, for tests of what they do with them: ES itself finds them in a run."""

from typing import Any

from es_cookbook.evolution.optimizers.es import ES


def settled(**settings: Any) -> ES:
    return ES(**{"sigma": 0.001, "learning_rate": 0.0005} | settings)

"""The grpo command: a recipe's settings, and options in a file."""

import pytest

from tests.said import told


@pytest.mark.parametrize("name", ["grpo", "policy_gradient"])
def test_an_option_of_sampling_leaves_the_temperature_at_one(name: str) -> None:
    said = told(name, "sampling.max_tokens=8", "--help")
    assert "sampling.temperature=1.0" in said
    assert "sampling.max_tokens=8" in said


def test_what_is_typed_wrongly() -> None:
    assert "cannot be read: No such file" in told("grpo", "config=none.yaml")
    assert "did you mean 'arithmetic'?" in told("grpo", "recipe=arithmetc")
    assert "missing model_name=" in told("grpo")
    assert "loss_type=gpro: did you mean 'grpo'?" in told("grpo", "loss_type=gpro")
    shown = told("grpo", "recipe=arithmetic", "--help")
    assert "attempts=256" in shown

"""The grpo command: a recipe's settings, and options in a file."""

import json
from pathlib import Path

import pytest

from tests.said import told

FILE = """\
recipe: arithmetic
num_generations: 1
attempts: 99
learning_rate: 1e-3
sampling.max_tokens: 2
temperature_schedule: table
temperature_schedule.factors: [1.0]
dataset:
  num_train: 64
  num_test: 2
  problems_per_generation: 2
"""


def test_a_file_and_the_command_line_are_the_same_config(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    typed = [
        *("recipe=arithmetic", "num_generations=1", "learning_rate=1e-3", "sampling.max_tokens=2"),
        *("temperature_schedule=table", "temperature_schedule.factors=1.0"),
        *("dataset.num_train=64", "dataset.num_test=2", "dataset.problems_per_generation=2"),
    ]
    found: list[object] = []
    for name, options in (("a", [f"config={tmp_path}/run.yaml"]), ("b", typed)):
        log_path = tmp_path / name
        said = told("grpo", *options, f"log_path={log_path}", "attempts=2")
        assert "everything is in" in said
        config = json.loads((log_path / "config.json").read_text())
        assert config.pop("log_path") == str(log_path)
        found.append(config)
        assert len((log_path / "losses.csv").read_text().splitlines()) == 2
    assert found[0] == found[1]
    assert isinstance(found[0], dict)
    assert found[0]["attempts"] == 2, "options behind the file change it"
    assert found[0]["learning_rate"] == 1e-3


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

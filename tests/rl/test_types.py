"""Texts that end an answer: as they are typed, and what is refused."""

import json
from typing import Any

import chz
import pytest

from es_cookbook.cli.train import TrainConfig
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.types import SamplingParams


def of_rows(option: str) -> TrainConfig:
    given = ["dataset.source=rows.jsonl", "dataset.reward=number", "model_name=model", option]
    return chz.Blueprint(TrainConfig).make_from_argv(given)


@pytest.mark.parametrize(
    ("typed", "stop"),
    [
        (r"\n", ("\n",)),
        ("a, b", ("a, b",)),
        (r"\\n", (r"\n",)),
        (r'["\n", "###"]', ("\n", "###")),
        ("[]", ()),
        ("none", None),
    ],
)
def test_stop_texts_are_read_as_a_shell_hands_them_over(
    typed: str, stop: tuple[str, ...] | None
) -> None:
    made = of_rows(f"sampling.stop={typed}")
    assert made.sampling.stop == stop
    assert config_from_json(config_to_json(made)) == made


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        (("",), "one would end every answer"),
        ("\n", "must be a tuple of texts, found '\\\\n'"),
        ((1,), "must be a tuple of texts"),
    ],
)
def test_what_would_end_every_answer_is_refused(stop: Any, said: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=said):
        SamplingParams(stop=stop)


def test_only_what_train_makes_of_rows_is_asked_where_answers_end() -> None:
    """A run of before, a recipe and a Config in Python go on as they always did."""
    config = of_rows("sampling.max_tokens=8")
    assert config.sampling == SamplingParams(max_tokens=8, stop=None)
    recorded = json.loads(config_to_json(config))
    del recorded["sampling"]["stop"]
    before = config_from_json(json.dumps(recorded))
    assert isinstance(before, TrainConfig) and before.sampling == SamplingParams(max_tokens=8)
    assert SamplingParams().stop == ()

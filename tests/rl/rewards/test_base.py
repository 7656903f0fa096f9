"""A result that is no reward is refused in one sentence with the reward's name and the row's."""

import math
import pickle
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from pathlib import Path

import chz
import numpy as np
import pytest
import torch

from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.errors import EnvError
from es_cookbook.common.names import Names
from es_cookbook.rl.rewards.base import REWARD_NAMES, Reward, graded, name_of

WHERE = "train.jsonl, line 3"


def shouting(text: str, row: Mapping[str, object]) -> tuple[float, Mapping[str, float]]:
    return float(text.isupper()), {"characters": len(text), "of": float(str(row["of"]))}


async def test_a_function_with_metrics_is_a_reward() -> None:
    grade = await graded(shouting, "HI", {"of": 7}, WHERE)
    assert (grade.reward, grade.metrics) == (1.0, {"characters": 2, "of": 7.0})


NUMBERS = {
    "bool": (True, 1.0),
    "int": (3, 3.0),
    "Fraction": (Fraction(1, 4), 0.25),
    "Decimal": (Decimal("0.25"), 0.25),
    "np.bool_": (np.bool_(True), 1.0),
    "an array of bool": (np.array(False), 0.0),
    **{f"np.{k.__name__}": (k(2), 2.0) for k in (np.float16, np.float32, np.int8, np.uint64)},
    "an array": (np.array(0.5), 0.5),
    **{
        str(dtype): (torch.tensor(1, dtype=dtype), 1.0)
        for dtype in (torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.int64)
    },
    "a tensor with a gradient": (torch.tensor(0.5, requires_grad=True), 0.5),
}


@pytest.mark.parametrize("kind", NUMBERS)
async def test_a_single_number_of_any_kind_is_a_reward_and_a_metric(kind: str) -> None:
    found, value = NUMBERS[kind]
    for given in (found, (found, {"also": found})):
        grade = await graded(lambda text, row, given=given: given, "", {}, WHERE)
        assert grade.reward == value and type(grade.reward) is float
    assert grade.metrics == {"also": value} and isinstance(grade.metrics["also"], Real)
    assert type(grade.metrics["also"]).__module__ in ("builtins", "fractions")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (None, "a finite number, or one and metrics, found NoneType None"),
        (math.nan, "a finite number, or one and metrics, found float nan"),
        ("1", "a finite number, or one and metrics, found str '1'"),
        (np.array([1.0]), "a finite number, or one and metrics, found ndarray array([1.])"),
        (Decimal("sNaN"), "a finite number, or one and metrics, found Decimal Decimal('sNaN')"),
        ((1.0, {}, 3), "a finite number, or one and metrics, found tuple (1.0, {}, 3)"),
        ((1.0, 2.0), "metrics as a mapping, found float 2.0"),
        ((1.0, {"a": None}), "finite numbers as metrics, found NoneType None for 'a'"),
    ],
)
async def test_anything_else_is_refused(found: object, sentence: str) -> None:
    def broken(text: str, row: Mapping[str, object]) -> object:
        return found

    with pytest.raises(EnvError) as refused:
        await graded(broken, "", {}, WHERE)
    name = f"{test_anything_else_is_refused.__name__}.<locals>.broken"
    assert str(refused.value) == f"{WHERE}: reward {name!r} must return {sentence}"


async def test_what_a_function_raises_is_told_with_its_name_and_row() -> None:
    with pytest.raises(EnvError) as raised:
        await graded(shouting, "HI", {}, WHERE)
    assert str(raised.value) == f"{WHERE}: reward 'shouting' raised KeyError: 'of'"
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize("name", REWARD_NAMES)
def test_a_shared_reward_is_known_by_its_name_pickles_and_is_rebuilt_from_json(name: str) -> None:
    built = Names(REWARD_NAMES, default=name).build_default()
    assert isinstance(built, Reward)
    assert name_of(built) == name
    assert pickle.loads(pickle.dumps(built)) == built
    assert config_from_json(config_to_json(built)) == built


PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_the_page_of_rewards_lists_them_with_options_that_they_have() -> None:
    rewards, _, _ = PAGE.partition("## Judging pairs")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", rewards, re.MULTILINE))
    assert rows.keys() == REWARD_NAMES.keys()
    for name, options in rows.items():
        fields = chz.chz_fields(Names(REWARD_NAMES, default=name).build_default())
        assert set(re.findall(r"`(\w+)`", options)) <= fields.keys()

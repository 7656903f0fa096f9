"""Countdown as a dataset and as an Env."""

import json
import pickle
from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import es_cookbook.recipes.countdown as countdown
from es_cookbook.baselines.small_model import build_tokenizer
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.countdown.env import CountdownEnv, question
from es_cookbook.recipes.countdown.warm_start import CHARACTERS
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rewards.arithmetic import PAPER_REWARD, CountdownReward
from es_cookbook.rl.types import Action, Datasets, Observation

pytestmark = pytest.mark.anyio


async def _build(
    tokenizer: PreTrainedTokenizerBase | None = None, **fields: object
) -> tuple[list[ProblemGroupBuilder], list[ProblemGroupBuilder]]:
    defaults: dict[str, object] = {"problems_per_generation": 1, "num_train": 50, "num_test": 20}
    builder = CountdownDatasetBuilder(**{**defaults, **fields})
    built = await builder(tokenizer or build_tokenizer(CHARACTERS))
    assert isinstance(built, Datasets)
    assert isinstance(built.train, ProblemDataset)
    await built.train.validate(512)
    test = [builder for builder in built.test_P if isinstance(builder, ProblemGroupBuilder)]
    return list(built.train.builders), test


def _env(builder: ProblemGroupBuilder) -> CountdownEnv:
    env = builder.make_env()
    assert isinstance(env, CountdownEnv)
    return env


def _keys(builders: list[ProblemGroupBuilder]) -> set[tuple[tuple[int, ...], int]]:
    envs = map(_env, builders)
    return {(tuple(sorted(env.numbers)), env.target) for env in envs}


def _write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS: list[dict[str, object]] = [
    {"numbers": [a, b, 2], "target": a * b + 2} for a in range(3, 13) for b in range(a, 13)
]


async def test_generated_problems_are_disjoint_and_held_out_ones_the_same_for_every_seed() -> None:
    train, test = await _build(seed=1)
    other_train, other_test = await _build(seed=2)
    assert (len(train), len(test)) == (50, 20)
    assert not _keys(train) & _keys(test)
    assert _keys(test) == _keys(other_test)
    assert _keys(train) != _keys(other_train)


async def test_file_is_split_by_problem(tmp_path: Path) -> None:
    doubled = [*ROWS, *ROWS]
    source = _write(tmp_path / "all.jsonl", doubled)
    train, test = await _build(source=source, num_train=200)
    assert train
    assert test
    assert len(train) + len(test) == len(doubled)
    assert not _keys(train) & _keys(test)
    everything, none = await _build(source=source, num_train=200, num_test=0)
    assert (len(everything), none) == (len(doubled), [])


async def test_parquet_with_the_hub_sets_columns(tmp_path: Path) -> None:
    path = tmp_path / "hub.parquet"
    columns = {"nums": [row["numbers"] for row in ROWS], "target": [row["target"] for row in ROWS]}
    datasets.Dataset.from_dict(columns).to_parquet(path)
    train, test = await _build(source=str(path))
    assert len(train) + len(test) == len(ROWS)


async def test_test_source_is_used_whole(tmp_path: Path) -> None:
    source = _write(tmp_path / "train.jsonl", ROWS[5:])
    test_source = _write(tmp_path / "test.jsonl", ROWS[:5])
    train, test = await _build(source=source, test_source=test_source)
    assert (len(train), len(test)) == (len(ROWS) - 5, 5)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"numbers": [1, 2]}, "field 'target' is missing"),
        ({"target": 3}, "field 'numbers' or 'nums' is missing"),
        ({"numbers": [1, 2], "target": "3"}, "field 'target' must be a whole number, found '3'"),
        ({"numbers": "1 2", "target": 3}, "field 'numbers' must be a list of whole numbers"),
        ({"numbers": [1, 1, 1], "target": 99}, "no expression of [1, 1, 1] equals 99"),
        ({"numbers": [1, 2], "target": 3, "solution": "1-2"}, "its own solution earns 0.1 of 1"),
        ({"numbers": [1] * 6, "target": 6}, "more than 5 numbers needs a 'solution'"),
    ],
)
async def test_bad_row_is_named_with_file_and_line(
    tmp_path: Path, row: dict[str, object], sentence: str
) -> None:
    source = _write(tmp_path / "train.jsonl", [ROWS[0], row])
    with pytest.raises(DataError) as caught:
        await _build(source=source, num_test=0)
    assert str(caught.value).startswith(f"{source}, line 2: ")
    assert sentence in str(caught.value)


async def test_problem_in_both_splits_is_refused_whatever_its_order(tmp_path: Path) -> None:
    source = _write(tmp_path / "train.jsonl", [ROWS[0], {"numbers": [2, 4, 3], "target": 14}])
    test_source = _write(tmp_path / "test.jsonl", [ROWS[9], {"numbers": [3, 4, 2], "target": 14}])
    with pytest.raises(DataError) as caught:
        await _build(source=source, test_source=test_source)
    message = str(caught.value)
    assert message.startswith(f"{source}, line 2: ")
    assert f"{test_source}, line 2" in message


async def test_file_without_training_problems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no training problems"):
        await _build(source=_write(tmp_path / "empty.jsonl", []))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_train": 0}, "num_train"),
        ({"problems_per_generation": 0}, "problems_per_generation"),
        ({"num_test": -1}, "num_test"),
        ({"num_numbers": (3, 7)}, "num_numbers"),
        ({"num_numbers": ()}, "num_numbers"),
        ({"test_source": "a.jsonl"}, "test_source"),
    ],
)
def test_fields_that_cannot_work_are_named(fields: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        CountdownDatasetBuilder(**fields)


def test_prompts() -> None:
    assert question([19, 27, 4], 50, "compact") == "27,19,4=50\n"
    paper = question([44, 19, 35], 98, "paper")
    assert paper.startswith("Using the numbers [44 19 35], create an equation that equals 98.")
    assert paper.endswith("for example <answer> (1 + 2) / 3 </answer>.")


async def test_prompt_that_ends_in_think_changes_what_is_expected() -> None:
    tokenizer = build_tokenizer(CHARACTERS)
    tokenizer.chat_template = "{{ messages[0].content }}<think>\n"
    train, _ = await _build(tokenizer, prompt="paper", reward=PAPER_REWARD)
    env = _env(train[0])
    assert env.prompt_ends_in_think
    assert train[0].gold is not None
    assert not train[0].gold.startswith("<think>")
    assert env.grade(train[0].gold).reward == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("text", "reward", "metrics"),
    [
        ("<think>3*4=12</think><answer>3*4-2</answer>", 1.0, (1.0, 1.0, 1.0, 1.0)),
        ("<think>3*4=12</think><answer>3*4+2</answer>", 0.1, (0.0, 1.0, 1.0, 0.0)),
        ("<think>3*4=12</think><answer>3*4-2=10</answer>", 0.1, (0.0, 1.0, 0.0, 0.0)),
        ("<think>3*4=12<answer>3*4-2</answer>", 0.925, (1.0, 0.25, 0.0, 0.0)),
        ("", 0.0, (0.0, 0.0, 0.0, 0.0)),
    ],
)
async def test_metrics_keep_answer_and_form_apart(
    text: str, reward: float, metrics: tuple[float, ...]
) -> None:
    env = CountdownEnv(Observation((1,)), (2, 3, 4), 10, CountdownReward())
    result = await env.step(Action((1,), text, "stop"))
    assert result.reward == pytest.approx(reward)
    names = ("correct", "format", "well_formed", "correct_well_formed")
    assert result.metrics == dict(zip(names, metrics, strict=True))


async def test_group_builders_pickle() -> None:
    train, _ = await _build()
    copy = pickle.loads(pickle.dumps(train[0]))
    assert _env(copy).observation == _env(train[0]).observation


def test_bundled_tokenizer_is_the_one_that_warm_start_makes() -> None:
    directory = Path(countdown.__file__).parent / "model"
    bundled = AutoTokenizer.from_pretrained(directory)
    text = "27,19,4=50\n<think>27+19=46</think><answer>(27-4)*2/1</answer>"
    assert bundled.decode(bundled.encode(text)) == text
    assert bundled.encode(text) == build_tokenizer(CHARACTERS).encode(text)
    ended = bundled.encode("1<eos>")
    assert ended[-1] == bundled.eos_token_id
    assert bundled.decode(ended, skip_special_tokens=True) == "1"

"""Guessing numbers: hints, rewards and the dataset."""

from collections.abc import Sequence
from itertools import islice
from typing import Literal

import pytest

from es_cookbook.recipes.guess_number.dataset import GuessEnv, Problem, generate_problems, halving
from es_cookbook.rl.messages.chat import Chat
from es_cookbook.rl.messages.message_env import Script
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Trajectory
from tests.chat_templates import CHATML, tokenizer_with
from tools.bundled import guess_number as warm_start
from tools.warm_start import chat_tokenizer

TOKENIZER = chat_tokenizer(warm_start.CHARACTERS)
PROBLEM = Problem(10, 30, 25)


async def played(
    texts: Sequence[str], style: Literal["compact", "words"] = "compact"
) -> Trajectory:
    tokenizer = TOKENIZER if style == "compact" else tokenizer_with(CHATML)
    env = GuessEnv(Chat(tokenizer), PROBLEM, style)
    return await run_rollout(env, Script(texts, tokenizer))


async def test_a_guess_is_answered_with_where_the_number_is() -> None:
    trajectory = await played(["28", "12", "25"])
    seen = [str(TOKENIZER.decode(new_T)) for _, new_T in trajectory.seen]
    assert seen == ["10..30=", "-10..27=", "+13..27="]
    metrics = trajectory.transitions[-1].metrics
    assert (metrics["correct"], metrics["well_formed"]) == (1.0, 1.0)
    # 2 of 10 from the edge of 10 to 30, 2 of 8 of 10 to 27, 2 of 7 of 13 to 27.
    assert metrics["halving"] == pytest.approx((2 / 10 + 2 / 8 + 2 / 7) / 3)
    assert trajectory.reward == pytest.approx(0.5 + 0.5 * metrics["halving"])


async def test_what_is_no_possible_number_counts_as_a_guess_and_is_told() -> None:
    trajectory = await played(["31", "twenty", "20", "19", "25"])
    seen = [str(TOKENIZER.decode(new_T)) for _, new_T in trajectory.seen]
    assert seen[1:] == ["?10..30=", "?10..30=", "+21..30=", "?21..30="]
    assert trajectory.transitions[-1].metrics["correct"] == 1.0
    assert trajectory.transitions[-1].metrics["well_formed"] == pytest.approx(2 / 5)


async def test_in_words_the_last_number_of_a_turn_counts() -> None:
    trajectory = await played(["I say 20.", "Then 25!"], "words")
    assert trajectory.reward == 1.0
    tokenizer = tokenizer_with(CHATML)
    added = str(tokenizer.decode(trajectory.seen[1][1]))
    assert "Mine is higher: it is from 21 to 30. Guess:" in added


@pytest.mark.parametrize("fold", ["train", "test"])
def test_halving_finds_every_number_in_time(fold: Literal["train", "test"]) -> None:
    problems = list(islice(generate_problems(0, fold), 500))
    assert len(set(problems)) == 500
    assert all(len(halving(problem)) <= problem.guesses for problem in problems)

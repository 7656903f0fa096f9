"""Temperature, top-p, seeds and where an action ends, in the whole engine."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from es_cookbook.engines.torch.engine import TorchEngine
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.rl.types import Action
from tests.engines.torch.reference import Reference, request, running_engine, sample_all
from tests.tiny_models import CONTEXT, EOS, VOCABULARY

pytestmark = pytest.mark.anyio

PROMPT = (5, 9, 3)


@pytest.fixture
async def engine(tiny_model: Callable[[str], Path]) -> AsyncIterator[TorchEngine]:
    async with running_engine(tiny_model("qwen2"), LowRank()) as engine:
        yield engine


@pytest.fixture
def probabilities_V(tiny_model: Callable[[str], Path]) -> torch.Tensor:
    """Of the token after the prompt, at temperature 1.5."""
    (logits,) = Reference(tiny_model("qwen2"), LowRank()).logits([PROMPT])
    return (logits[-1].double() / 1.5).softmax(-1)


async def _varied_action(engine: TorchEngine) -> tuple[Action, dict[str, float]]:
    """An action of 30 different enough characters, and how to sample it again."""
    for seed in range(20):
        how = {"max_tokens": 30, "temperature": 1.0, "seed": seed}
        action = await engine.sample(request("centre", PROMPT, **how))
        if len(action.text) == 30 and len(set(action.text[:14])) > 8:
            return action, how
    raise AssertionError("20 hot actions of nothing but ordinary tokens were too few")


def _surprise(counts: Counter[int], expected_V: torch.Tensor) -> tuple[float, float]:
    """Pearson's chi-square over tokens expected at least 5 times, and its 4-sigma bound."""
    likely = [v for v in range(VOCABULARY) if expected_V[v] >= 5]
    terms = [(counts[v] - float(expected_V[v])) ** 2 / float(expected_V[v]) for v in likely]
    return sum(terms), len(likely) + 4 * (2 * len(likely)) ** 0.5


async def test_tokens_follow_the_models_distribution_at_a_temperature(
    engine: TorchEngine, probabilities_V: torch.Tensor
) -> None:
    requests = [
        request("centre", PROMPT, temperature=1.5, max_tokens=1, seed=seed) for seed in range(1500)
    ]
    counts = Counter(action.tokens_T[0] for action in await sample_all(engine, requests))
    surprise, bound = _surprise(counts, probabilities_V * 1500)
    assert surprise < bound
    cold, cold_bound = _surprise(counts, probabilities_V**1.5 / (probabilities_V**1.5).sum() * 1500)
    assert cold > 2 * cold_bound, "a wrong temperature would be noticed"


async def test_top_p_keeps_the_smallest_set_of_likely_tokens_in_proportion(
    engine: TorchEngine, probabilities_V: torch.Tensor
) -> None:
    ordered, order = probabilities_V.sort(descending=True)
    size = int((ordered.cumsum(0) < 0.7).sum()) + 1
    nucleus = set(order[:size].tolist())
    assert 2 < size < VOCABULARY - 2
    requests = [
        request("centre", PROMPT, temperature=1.5, top_p=0.7, max_tokens=1, seed=seed)
        for seed in range(1500)
    ]
    counts = Counter(action.tokens_T[0] for action in await sample_all(engine, requests))
    assert set(counts) == nucleus
    kept = torch.zeros_like(probabilities_V).index_copy(0, order[:size], ordered[:size])
    surprise, bound = _surprise(counts, kept / kept.sum() * 1500)
    assert surprise < bound


async def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(
    engine: TorchEngine,
) -> None:
    hot = [request("centre", PROMPT, temperature=1.0, seed=seed) for seed in (1, 1, 2, 3)]
    first, again, *others = await sample_all(engine, hot)
    assert first == again == await engine.sample(hot[0])
    assert len({first.tokens_T, *(a.tokens_T for a in others)}) == 3


async def test_a_tiny_top_p_is_greedy(engine: TorchEngine) -> None:
    greedy, narrow = await sample_all(
        engine,
        [request("centre", PROMPT), request("centre", PROMPT, temperature=2.0, top_p=1e-6, seed=7)],
    )
    assert narrow == greedy


async def test_genomes_with_common_random_numbers_choose_alike_where_they_agree(
    engine: TorchEngine,
) -> None:
    await engine.load([Genome((Term(3, 1e-6),)), Genome((Term(4, 1e-6),))])
    for seed in range(5):
        one, other, centre = await sample_all(
            engine, [request(t, PROMPT, temperature=1.0, seed=seed) for t in (0, 1, "centre")]
        )
        assert one.tokens_T == other.tokens_T == centre.tokens_T


async def test_logprobs_come_only_where_asked_and_before_temperature(engine: TorchEngine) -> None:
    hot, silent = await sample_all(
        engine,
        [
            request("centre", PROMPT, temperature=3.0, max_tokens=4, logprobs=asked)
            for asked in (True, False)
        ],
    )
    assert silent.logprobs_T is None
    assert silent.tokens_T == hot.tokens_T
    greedy = await engine.sample(request("centre", PROMPT, max_tokens=1))
    assert hot.logprobs_T is not None and greedy.logprobs_T is not None
    if hot.tokens_T[0] == greedy.tokens_T[0]:
        assert hot.logprobs_T[0] == greedy.logprobs_T[0]


async def test_an_end_of_sequence_token_ends_the_action_and_is_not_in_its_text(
    engine: TorchEngine,
) -> None:
    requests = [
        request("centre", PROMPT, temperature=1.5, max_tokens=150, seed=s) for s in range(8)
    ]
    ended = [a for a in await sample_all(engine, requests) if a.stop_reason == "stop"]
    assert ended, "hot sequences of a tiny model end within some tens of tokens"
    for action in ended:
        assert action.tokens_T[-1] == EOS
        assert EOS not in action.tokens_T[:-1]
        assert action.text == engine.tokenizer.decode(action.tokens_T, skip_special_tokens=True)


async def test_an_action_ends_with_the_first_stop_string_that_it_completes(
    engine: TorchEngine,
) -> None:
    free, how = await _varied_action(engine)
    for length in (1, 2, 3):  # One token is one character: the longer ones span tokens.
        stop = free.text[10 : 10 + length]
        end = free.text.index(stop) + length
        action = await engine.sample(request("centre", PROMPT, stop=("§", stop), **how))
        assert (action.text, action.stop_reason) == (free.text[:end], "stop")
        assert action.tokens_T == free.tokens_T[:end]
        assert free.logprobs_T is not None
        assert action.logprobs_T == free.logprobs_T[:end]


async def test_a_stop_string_in_the_prompt_does_not_count(engine: TorchEngine) -> None:
    free = await engine.sample(request("centre", PROMPT, max_tokens=5))
    prompt_text = engine.tokenizer.decode(PROMPT)
    stopped = await engine.sample(
        request("centre", PROMPT, max_tokens=5, stop=(prompt_text + free.text[:1],))
    )
    assert stopped == free


async def test_an_action_ends_with_a_stop_token(engine: TorchEngine) -> None:
    free, how = await _varied_action(engine)
    token = free.tokens_T[7]
    end = free.tokens_T.index(token) + 1
    action = await engine.sample(request("centre", PROMPT, stop_token_ids=(EOS, token), **how))
    assert (action.tokens_T, action.stop_reason) == (free.tokens_T[:end], "stop")
    assert action.text == free.text[:end]  # an ordinary token, so it stays in the text


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
async def test_an_action_ends_after_max_tokens(engine: TorchEngine, max_tokens: int) -> None:
    action = await engine.sample(request("centre", PROMPT, max_tokens=max_tokens))
    assert (len(action.tokens_T), action.stop_reason) == (max_tokens, "length")


@pytest.mark.parametrize("room", [1, 5])
async def test_an_action_ends_with_the_context(engine: TorchEngine, room: int) -> None:
    assert engine.traits.context_length == CONTEXT
    prompt = [7] * (CONTEXT - room)
    action = await engine.sample(request("centre", prompt, max_tokens=50))
    assert (len(action.tokens_T), action.stop_reason) == (room, "length")

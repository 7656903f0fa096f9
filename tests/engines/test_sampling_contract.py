"""How every engine samples: the same promises, kept by real engines on the same tiny model.

What is compared is exact, in float32, or statistical: drawn tokens against the probabilities of
transformers with merged weights. A pool's requests are those of its engines, as they come out of
`engines/wire.py`; runs over pools are in `integration/test_ray_pool.py` and `test_ray_vllm.py`.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import chz
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from es_cookbook import LowRank, Observation, TorchEngineBuilder, VLLMEngineBuilder
from es_cookbook.common.errors import RequestError
from es_cookbook.engines.base import EngineBuilder, LogprobsRequest, Progress, SampleRequest, Target
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.rl.types import Action
from tests.engines.running import Running
from tests.engines.torch.reference import Reference, request, who
from tests.integration.vllm_models import make_vllm_model
from tests.tiny_models import BOS, EOS, PAD, VOCABULARY

TORCH = TorchEngineBuilder(device="cpu", num_lanes=2)
# A step has room for 128 tokens, so that prompts of a crowd are prefilled in parts.
VLLM = VLLMEngineBuilder(
    max_genomes=4,
    kv_cache_gib=0.05,
    gpu_memory_utilization=0.3,
    extra={"max_num_seqs": 128, "max_num_batched_tokens": 128, "block_size": 32},
)
BUILDERS: dict[str, EngineBuilder] = {"torch": TORCH, "vllm": VLLM}
PROMPT = (5, 9, 3)
GENOMES_G = [Genome((Term(3, 0.05),)), Genome((Term(4, -0.05),)), Genome()]
TARGETS: tuple[Target, ...] = (0, "centre", "base")
HOT = {"temperature": 1.0}
Hot: TypeAlias = tuple[Action, SampleRequest]
NUM_DRAWS = 2000
SPECIAL, MARK = 38, "<|endoftext|>"
"""A name that Qwen's class of tokenizers would add by itself."""
NAMELESS = (37, 39)
"""Rows of the embedding that the tokenizer has no token for: a hole, and one at the end."""
LEAST_P = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_vllm_model("qwen2", tmp_path_factory.mktemp("contract") / "model")
    syllable_tokenizer().save_pretrained(path)
    return path


def syllable_tokenizer() -> PreTrainedTokenizerFast:
    """Every token is two characters, so that a string may end within one; one is special."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS, MARK: SPECIAL}
    syllables = map("".join, itertools.product("bdfgklmn", "aeiou"))
    for token, syllable in zip(range(BOS + 1, VOCABULARY), syllables, strict=False):
        if token not in (SPECIAL, *NAMELESS):
            vocabulary[syllable] = token
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(MARK, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


@pytest.fixture(
    scope="module", params=["torch", pytest.param("vllm", marks=pytest.mark.xdist_group("vllm"))]
)
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Running]:
    if request.param == "vllm":
        request.getfixturevalue("warm_vllm")
    with Running(BUILDERS[request.param], model, LowRank()) as running:
        yield running


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model, LowRank())


@pytest.fixture(scope="module")
def decode(model: Path) -> Callable[[Sequence[int]], str]:
    tokenizer = syllable_tokenizer()
    return lambda tokens_T: tokenizer.decode(list(tokens_T), skip_special_tokens=True)


def long_prompt(first: int) -> tuple[int, ...]:
    return tuple(3 + (first + i * i) % 34 for i in range(60 + first % 20))


@pytest.fixture(scope="module")
def hot_action(engine: Running) -> Hot:
    """Of 16 tokens, different enough to tell their places apart."""
    asked = [request(0, PROMPT, max_tokens=16, seed=seed, **HOT) for seed in range(300)]
    for of_action, action in zip(asked, engine.sample(asked, GENOMES_G), strict=True):
        if len(action.text) == 32 and len(set(action.tokens_T[:8])) == 8:
            return action, of_action
    raise AssertionError("300 hot actions were too few for one of ordinary tokens that differ")


def again(asked: SampleRequest, **observation: object) -> SampleRequest:
    """The same request with other stop conditions."""
    params = {f: getattr(asked.params, f) for f in ("max_tokens", "temperature", "logprobs")}
    return request(asked.target, PROMPT, seed=asked.seed, **params, **observation)


# Distributions.


def p_value(counts: Counter[int], expected_V: torch.Tensor) -> float:
    """Of Pearson's chi-squared test; tokens expected fewer than 5 times share a bin."""
    rare_V = expected_V < 5
    bins = [(counts[v], float(expected_V[v])) for v in range(VOCABULARY) if not rare_V[v]]
    rest = sum(counts[v] for v in range(VOCABULARY) if rare_V[v]), float(expected_V[rare_V].sum())
    if rest[1] < 5:
        fewest = min(bins, key=lambda each: each[1])
        bins.remove(fewest)
        rest = rest[0] + fewest[0], rest[1] + fewest[1]
    bins.append(rest)
    surprise = sum((found - expected) ** 2 / expected for found, expected in bins)
    of = torch.tensor([(len(bins) - 1) / 2, surprise / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*of))


def probabilities_V(
    reference: Reference, genome: Genome, temperature: float, top_p: float
) -> torch.Tensor:
    """Of the token after the prompt, by transformers with merged weights."""
    reference.become(genome)
    (logits,) = reference.logits([PROMPT])
    mass_V = (logits[-1].double() / temperature).softmax(-1)
    ordered, order = mass_V.sort(descending=True)
    kept = int((ordered.cumsum(0) < top_p).sum()) + 1 if top_p < 1 else VOCABULARY
    return torch.zeros_like(mass_V).index_copy(
        0, order[:kept], ordered[:kept] / ordered[:kept].sum()
    )


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8)])
def test_tokens_are_drawn_with_the_probabilities_of_merged_weights(
    engine: Running, reference: Reference, temperature: float, top_p: float
) -> None:
    drawn = {"temperature": temperature, "top_p": top_p, "max_tokens": 1, "logprobs": False}
    asked = [request(0, PROMPT, seed=seed, **drawn) for seed in range(NUM_DRAWS)]
    counts = Counter(action.tokens_T[0] for action in engine.sample(asked, GENOMES_G))
    expected_V = NUM_DRAWS * probabilities_V(reference, GENOMES_G[0], temperature, top_p)
    assert all(expected_V[token] > 0 for token in counts), "nothing from outside the nucleus"
    assert p_value(counts, expected_V) > LEAST_P
    # Anything a little different would be noticed.
    for genome, t, p in (
        (Genome(), temperature, top_p),
        (GENOMES_G[0], temperature * 1.3, top_p),
        (GENOMES_G[0], temperature, 0.9 * top_p),
    ):
        other_V = NUM_DRAWS * probabilities_V(reference, genome, t, p)
        assert p_value(counts, other_V.clamp(min=1e-9)) < LEAST_P, (genome, t, p)


def test_temperature_0_takes_the_most_probable_token_whatever_the_seed_and_top_p(
    engine: Running, reference: Reference
) -> None:
    seeds_and_masses = ((0, 1.0), (1, 0.3), (2**63 - 1, 1.0))
    asked = [request(t, PROMPT, seed=s, top_p=p) for t in TARGETS for s, p in seeds_and_masses]
    answers = engine.sample(asked, GENOMES_G)
    reference.check_targets(GENOMES_G, asked, answers)
    tokens = [action.tokens_T for action in answers]
    assert tokens[::3] == tokens[1::3] == tokens[2::3]


def test_tops_are_the_most_probable_tokens_beside_given_ones(
    engine: Running, reference: Reference
) -> None:
    given_T = tuple(range(3, 12))
    for target in TARGETS:
        asked = LogprobsRequest(target, PROMPT, given_T)
        (logprobs_T,) = engine.score([asked], GENOMES_G)
        (tops_T,) = engine.tops([asked], GENOMES_G)
        reference.become(who(GENOMES_G, target))
        (logits,) = reference.logits([[*PROMPT, *given_T]])
        most_T = logits[len(PROMPT) - 1 : -1].log_softmax(-1).max(-1)
        assert [top.best for top in tops_T] == most_T.indices.tolist()
        assert [top.logprob for top in tops_T] == pytest.approx(logprobs_T, abs=1e-3)
        found = [top.best_logprob for top in tops_T]
        assert found == pytest.approx(most_T.values.tolist(), abs=2e-2)


def test_logprobs_are_the_models_own_before_temperature_and_top_p(
    engine: Running, reference: Reference
) -> None:
    for target in TARGETS:
        asked = [
            request(target, PROMPT, seed=seed, temperature=t, top_p=p)
            for seed, (t, p) in enumerate(itertools.product((0, 0.7, 1.6), (0.8, 1.0)))
        ]
        answers = engine.sample(asked, GENOMES_G)
        scored = [LogprobsRequest(target, PROMPT, action.tokens_T) for action in answers]
        scores = engine.score(scored, GENOMES_G)
        reference.become(who(GENOMES_G, target))
        for action, logprobs_T in zip(answers, scores, strict=True):
            assert action.logprobs_T == pytest.approx(logprobs_T, abs=1e-3)
            reference.check_logprobs(PROMPT, action.tokens_T, logprobs_T)
    (silent,) = engine.sample([request(0, PROMPT, logprobs=False, **HOT)], GENOMES_G)
    assert silent.logprobs_T is None


def test_rows_that_the_tokenizer_has_no_token_for_are_never_sampled(
    engine: Running, reference: Reference
) -> None:
    """Although the model itself gives them a good part of the mass."""
    reference.become(Genome())
    raw_B_V = reference.model(torch.arange(3, 37)[:, None]).logits[:, -1].softmax(-1)
    mass, last = raw_B_V[:, list(NAMELESS)].sum(-1).max(-1)
    assert mass > 0.1
    prompt_T = (3 + int(last),)
    asked = [request("centre", prompt_T, seed=seed, max_tokens=8, **HOT) for seed in range(200)]
    drawn = Counter(token for action in engine.sample(asked) for token in action.tokens_T)
    assert drawn[SPECIAL] and not drawn[NAMELESS[0]] and not drawn[NAMELESS[1]]
    for token in NAMELESS:
        with pytest.raises(RequestError, match=f"a continuation has token {token}, .* never"):
            engine.score([LogprobsRequest("centre", PROMPT, (5, token))])


# Seeds.


def test_a_request_is_a_function_of_its_seed_alone_or_in_a_crowd(engine: Running) -> None:
    """Regression: vLLM's CPU build failed where a prompt was prefilled in parts."""
    crowd = [request(i % 2, long_prompt(i), seed=i, **HOT) for i in range(40)]
    together = engine.sample(crowd, GENOMES_G)
    others = [request("centre", long_prompt(100 + i), seed=i, **HOT) for i in range(40)]
    mixed = [each for pair in zip(others, crowd[::-1], strict=True) for each in pair]
    in_another_order = engine.sample(mixed, GENOMES_G)[1::2][::-1]
    assert [a.tokens_T for a in in_another_order] == [a.tokens_T for a in together]
    alone = [engine.sample([asked], GENOMES_G)[0] for asked in crowd[:8]]
    assert [a.tokens_T for a in alone] == [a.tokens_T for a in together[:8]]
    assert len({action.tokens_T for action in together}) == len(crowd)


class Heard(Progress):
    follows = True

    def __init__(self) -> None:
        self.told: list[tuple[int, ...]] = []

    @override
    def sampled(self, tokens_T: Sequence[int]) -> None:
        self.told.append(tuple(tokens_T))


def test_progress_receives_tokens_while_they_are_sampled(engine: Running, hot_action: Hot) -> None:
    action, asked = hot_action
    heard, quiet = Heard(), Progress()
    followed = [dataclasses.replace(asked, progress=each) for each in (heard, quiet)]
    assert engine.sample(followed, GENOMES_G) == [action, action]
    assert [*dict.fromkeys(heard.told)] == heard.told and len(heard.told) >= 8
    assert all(told == action.tokens_T[: len(told)] for told in heard.told)


def test_progress_receives_the_number_of_cached_tokens(engine: Running) -> None:
    prompt_T = long_prompt(7)[::-1]
    first, again = Progress(), Progress()
    for progress in (first, again):
        asked = request("centre", prompt_T, max_tokens=2)
        engine.sample([dataclasses.replace(asked, progress=progress)])
    assert first.cached_tokens is not None and again.cached_tokens is not None
    assert first.cached_tokens < again.cached_tokens < len(prompt_T)


def test_common_random_numbers_make_genomes_choose_alike_where_they_agree(engine: Running) -> None:
    near_G = [Genome((Term(3, 0.0005),)), Genome((Term(4, 0.0005),)), Genome((Term(5, 0.0),))]
    asked = {
        target: [request(target, PROMPT, seed=s, max_tokens=2, **HOT) for s in range(300)]
        for target in (0, 1, 2, "centre")
    }
    answers = engine.sample(list(itertools.chain(*asked.values())), near_G)
    tokens = [action.tokens_T for action in answers]
    one, other, same, centre = (tokens[i : i + 300] for i in range(0, 1200, 300))
    assert same == centre, "without a perturbation it is the centre"
    assert one != centre and other != centre
    assert agreement(one, other) > 0.9
    assert agreement(one, other[1:]) < 0.5, "by chance, with other seeds"


def agreement(one: Sequence[tuple[int, ...]], other: Sequence[tuple[int, ...]]) -> float:
    """Share of actions whose tokens are the same."""
    pairs = list(zip(one, other, strict=False))
    return sum(a == b for a, b in pairs) / len(pairs)


# Where an action ends.


def test_an_action_ends_with_the_token_that_completes_a_stop_string(
    engine: Running, hot_action: Hot, decode: Callable[[Sequence[int]], str]
) -> None:
    free, asked = hot_action
    assert free.text == decode(free.tokens_T)
    assert free.logprobs_T is not None
    whole, inside, over_two = (free.text[6:8], free.text[8:9], free.text[11:13])
    for stop in (whole, inside, over_two, free.text[3:9]):
        end = (free.text.index(stop) + len(stop) + 1) // 2  # tokens are two characters long
        (stopped,) = engine.sample([again(asked, stop=("nowhere", stop))], GENOMES_G)
        assert (stopped.tokens_T, stopped.stop_reason) == (free.tokens_T[:end], "stop")
        assert stopped.text == decode(free.tokens_T[:end]), "whole tokens, the stop string included"
        assert stopped.logprobs_T == pytest.approx(free.logprobs_T[:end], abs=1e-5)


def test_stop_texts_of_the_sampling_parameters_count_beside_the_envs_and_are_no_part_of_a_text(
    engine: Running, hot_action: Hot, decode: Callable[[Sequence[int]], str]
) -> None:
    free, asked = hot_action
    inside, later = free.text[7:9], free.text[12:14]
    for of_env, of_run, usual, text in (
        ((), (inside,), (), free.text[: free.text.index(inside)]),
        ((later,), (inside,), (), free.text[: free.text.index(inside)]),
        ((inside,), (later,), (), decode(free.tokens_T[: free.text.index(inside) // 2 + 2])),
        ((), None, (inside,), free.text[: free.text.index(inside)]),
        ((), (later,), (inside,), free.text[: free.text.index(later)]),
        ((), (), (inside,), free.text),
    ):
        params = chz.replace(asked.params, stop=of_run)
        observation = Observation(PROMPT, of_env, usual_stop=usual)
        (action,) = engine.sample(
            [SampleRequest(asked.target, observation, params, asked.seed)], GENOMES_G
        )
        assert action.text == text
        assert action.tokens_T == free.tokens_T[: len(action.tokens_T)]
        assert action.stop_reason == ("length" if text == free.text else "stop")


def test_a_stop_text_with_a_special_token_ends_an_action_where_that_is_sampled(
    engine: Running, decode: Callable[[Sequence[int]], str]
) -> None:
    """Which is in no text: neither is what stands before it in a stop text of the run."""
    asked = [request("centre", PROMPT, seed=seed, max_tokens=16, **HOT) for seed in range(200)]
    free, of_free = next(
        (action, of_action)
        for action, of_action in zip(engine.sample(asked), asked, strict=True)
        if SPECIAL in action.tokens_T[4:10] and SPECIAL not in action.tokens_T[:4]
    )
    at = free.tokens_T.index(SPECIAL)
    before, last = decode(free.tokens_T[:at]), decode([free.tokens_T[at - 1]])
    for stop in (MARK, f"{last}{MARK}", f"{MARK}nowhere"):
        params = chz.replace(of_free.params, stop=("nowhere", stop))
        of_run = SampleRequest("centre", Observation(PROMPT), params, of_free.seed)
        of_env = again(of_free, stop=("nowhere", stop))
        cut, kept = engine.sample([of_run, of_env])
        assert cut.tokens_T == kept.tokens_T == free.tokens_T[: at + 1]
        assert cut.text == kept.text == before
        assert cut.stop_reason == kept.stop_reason == "stop"


def test_an_action_ends_with_an_end_of_sequence_token_which_is_not_in_its_text(
    engine: Running, decode: Callable[[Sequence[int]], str]
) -> None:
    hot = {"temperature": 1.9, "max_tokens": 80}
    asked = [request("centre", PROMPT, seed=seed, **hot) for seed in range(40)]
    answers = zip(asked, engine.sample(asked), strict=True)
    ended = [(who, action) for who, action in answers if action.stop_reason == "stop"]
    assert ended
    for _, action in ended:
        assert action.tokens_T.index(EOS) == len(action.tokens_T) - 1
        assert action.text == decode(action.tokens_T[:-1])
    asked_first, first = ended[0]
    just = {"temperature": 1.9, "max_tokens": len(first.tokens_T), "seed": asked_first.seed}
    (at_the_limit,) = engine.sample([request("centre", PROMPT, **just)])
    assert at_the_limit.stop_reason == "stop", "it ended by itself, with its last token"

"""What crosses to another process comes back as it was, and a population costs next to nothing."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.common.errors import RequestError
from es_cookbook.engines import wire
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.evolution.genome import (
    MAX_COEFFICIENT,
    MAX_SEED,
    Genome,
    MuonRule,
    Offsets,
    OffsetsRule,
    Step,
    Term,
)
from es_cookbook.rl.types import Action, Observation, SamplingParams

coefficients = st.floats(-MAX_COEFFICIENT, MAX_COEFFICIENT)
terms = st.builds(Term, st.integers(0, MAX_SEED), coefficients)
offsets = st.builds(Offsets, st.sampled_from([b"", b"\0\0\x80?", b"\0\0\x80?" * 100]))
genomes = st.builds(Genome, st.lists(terms, max_size=3).map(tuple), st.none() | offsets)
steps = st.builds(
    Step,
    st.lists(terms, max_size=5).map(tuple),
    st.sampled_from([0.0, 0.25]),
    st.none() | st.builds(MuonRule, st.floats(0, 1), st.integers(1, 9)),
) | st.builds(Step, rule=st.builds(OffsetsRule, offsets, st.floats(0, 1)))

PARAMS = [SamplingParams(max_tokens=24), SamplingParams(temperature=0.7, logprobs=True)]
tokens = st.sampled_from([(1,), (2, 3), (4, 5, 6)])
targets = st.sampled_from(["base", "centre", 0, 1, 2, 3, 7])
requests = st.lists(
    st.builds(
        SampleRequest,
        targets,
        st.builds(Observation, tokens, st.sampled_from([(), ("stop",)])),
        st.sampled_from(PARAMS),
        st.integers(0, 2),
    )
    | st.builds(LogprobsRequest, targets, tokens, tokens),
    max_size=30,
)


@given(st.lists(genomes, max_size=5))
def test_genomes_come_back(genomes_G: list[Genome]) -> None:
    assert wire.decode_genomes(wire.encode_genomes(genomes_G)) == genomes_G


def test_a_genome_takes_about_thirty_bytes() -> None:
    genomes_G = [Genome((Term(MAX_SEED - g // 2, 0.01 * (-1) ** g),)) for g in range(64)]
    assert len(wire.encode_genomes(genomes_G)) < 30 * 64


@given(st.lists(steps, max_size=4))
def test_steps_come_back_one_after_the_other(steps: list[Step]) -> None:
    assert list(wire.decode_steps(b"".join(map(wire.encode_step, steps)))) == steps


@given(requests)
def test_every_request_comes_back_once(requests: list[wire.Request]) -> None:
    batch, order = wire.encode_requests(requests)
    assert list(wire.decode_requests(batch)) == [requests[i] for i in order]
    assert sorted(order) == list(range(len(requests)))


@pytest.mark.parametrize("num_genomes", [1, 64])
def test_a_question_is_sent_once_whatever_the_population(num_genomes: int) -> None:
    prompts = [Observation((p, *range(100))) for p in range(32)]
    asked = [
        SampleRequest(g, prompt, PARAMS[0], seed)
        for seed, prompt in enumerate(prompts)
        for g in range(num_genomes)
    ]
    batch, order = wire.encode_requests(asked)
    assert len(batch[1]) < 160 + 2 * num_genomes
    assert order == list(range(len(asked)))
    once = pickle.dumps([(prompt, PARAMS[0], 1) for prompt in prompts])
    assert len(batch[0]) <= len(once)


def test_answers_and_errors_come_back() -> None:
    answers = [
        (7, Action((1, 2), "ab", "stop")),
        (3, Action((3,), "", "length", (-0.5,))),
        (4, [-1.0, -2.5]),
    ]
    assert wire.decode_answers(wire.encode_answers(answers)) == answers
    ((number, error),) = wire.decode_answers(wire.encode_answers([(5, RequestError("too long"))]))
    assert (number, type(error), str(error)) == (5, RequestError, "too long")

"""The messages to an engine in another process and back, in few bytes.

Weights are never sent. A genome is its terms, 16 bytes each. A request is a target (a resident
genome, the centre or the base) and a question (a prompt, how to sample, a sampling seed), and most
questions are asked of a whole population: so each question is sent once per batch, and with the
targets "the next 32 questions, each to genomes 0 to 63", whose size does not depend on these
numbers.

All integers are little-endian. Nothing here is written to disk: both ends run the same version.
"""

import itertools
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from es_cookbook.engines.base import LogprobsRequest, SampleRequest, Target
from es_cookbook.evolution.genome import Genome, Offsets, Step, Term
from es_cookbook.rl.types import Action, Observation, SamplingParams

Request: TypeAlias = SampleRequest | LogprobsRequest
Answer: TypeAlias = Action | list[float] | Exception
"""What became of a request: an action, log-probabilities, or the error to raise."""

_COUNT = np.dtype("<u4")
_SEED = np.dtype("<i8")
_NUMBER = np.dtype("<f8")
_BYTES_PER_TERM = _SEED.itemsize + _NUMBER.itemsize
_CENTRE, _BASE = -1, -2


def encode_genomes(genomes_G: Sequence[Genome]) -> bytes:
    """Genomes as bytes: how many, the number of terms of each, seeds, coefficients, offsets."""
    counts = np.array([len(genomes_G), *(len(genome.terms) for genome in genomes_G)], _COUNT)
    terms = _encode_terms([term for genome in genomes_G for term in genome.terms])
    offsets_G = [genome.offsets for genome in genomes_G]
    return counts.tobytes() + terms + (pickle.dumps(offsets_G) if any(offsets_G) else b"")


def decode_genomes(data: bytes) -> list[Genome]:
    """Undo `encode_genomes`."""
    num_genomes = int(np.frombuffer(data, _COUNT, 1)[0])
    counts_G = np.frombuffer(data, _COUNT, num_genomes, _COUNT.itemsize).tolist()
    start = (1 + num_genomes) * _COUNT.itemsize
    end = start + sum(counts_G) * _BYTES_PER_TERM
    terms = iter(_decode_terms(data[start:end]))
    offsets_G: list[Offsets | None] = [None] * num_genomes
    if end < len(data):
        offsets_G = pickle.loads(data[end:])
    return [
        Genome(tuple(next(terms) for _ in range(count)), offsets)
        for count, offsets in zip(counts_G, offsets_G, strict=True)
    ]


def encode_step(step: Step) -> bytes:
    """A step as bytes: lengths, decay, seeds, coefficients, the rule. Steps may be concatenated."""
    rule = b"" if step.rule is None else pickle.dumps(step.rule)
    head = np.array([len(step.terms), len(rule)], _COUNT).tobytes()
    return head + np.array([step.decay], _NUMBER).tobytes() + _encode_terms(step.terms) + rule


def decode_steps(data: bytes) -> Iterator[Step]:
    """Undo `encode_step`, for any number of them one after the other."""
    start = 0
    while start < len(data):
        num_terms, rule_bytes = np.frombuffer(data, _COUNT, 2, start).tolist()
        start += 2 * _COUNT.itemsize
        decay = float(np.frombuffer(data, _NUMBER, 1, start)[0])
        start += _NUMBER.itemsize
        end = start + num_terms * _BYTES_PER_TERM
        rule = pickle.loads(data[end : end + rule_bytes]) if rule_bytes else None
        yield Step(tuple(_decode_terms(data[start:end])), decay, rule)
        start = end + rule_bytes


def _encode_terms(terms: Sequence[Term]) -> bytes:
    seeds = np.array([term.seed for term in terms], _SEED)
    return seeds.tobytes() + np.array([term.coefficient for term in terms], _NUMBER).tobytes()


def _decode_terms(data: bytes) -> list[Term]:
    num_terms = len(data) // _BYTES_PER_TERM
    seeds = np.frombuffer(data, _SEED, num_terms).tolist()
    coefficients = np.frombuffer(data, _NUMBER, num_terms, num_terms * _SEED.itemsize).tolist()
    return [Term(seed, coefficient) for seed, coefficient in zip(seeds, coefficients, strict=True)]


_Question: TypeAlias = tuple[Any, ...]
"""A request without its target: what stands after it in a `SampleRequest` or `LogprobsRequest`."""
_Asked: TypeAlias = list[tuple[int, int]]
"""For one question, each target's number and the index of the request."""
Batch: TypeAlias = tuple[bytes, bytes]
"""Requests as bytes: every question once, and how many of them, in their order, each of some
targets is asked."""


def encode_requests(requests: Sequence[Request]) -> tuple[Batch, list[int]]:
    """Requests as bytes, and the order in which `decode_requests` returns them, as indices."""
    by_question = [(question, sorted(asked)) for question, asked in _by_question(requests)]
    targets = ([target for target, _ in asked] for _, asked in by_question)
    who = [(_as_range(own), len(list(alike))) for own, alike in itertools.groupby(targets)]
    questions = [question for question, _ in by_question]
    order = [i for _, asked in by_question for _, i in asked]
    return (pickle.dumps(questions, -1), pickle.dumps(who, -1)), order


def decode_requests(batch: Batch) -> Iterator[Request]:
    """Undo `encode_requests`, in the order that it gave."""
    questions, who = map(pickle.loads, batch)
    remaining = iter(questions)
    for numbers, num_questions in who:
        targets: list[Target] = [_target(number) for number in numbers]
        for question in itertools.islice(remaining, num_questions):
            kind = SampleRequest if isinstance(question[0], Observation) else LogprobsRequest
            yield from (kind(target, *question) for target in targets)


def _by_question(requests: Sequence[Request]) -> Iterator[tuple[_Question, _Asked]]:
    """Each question once, with its targets; equal prompts become one object."""
    # Hashing a prompt is slow, so once per request; settings are few, and mostly one object.
    samples: dict[Observation, dict[tuple[int, int], _Asked]] = {}
    settings: list[SamplingParams] = []
    scores: dict[_Question, _Asked] = {}
    for i, request in enumerate(requests):
        if isinstance(request, SampleRequest):
            if request.params not in settings:
                settings.append(request.params)
            how = settings.index(request.params), request.seed
            asked = samples.setdefault(request.observation, {}).setdefault(how, [])
        else:
            asked = scores.setdefault((request.prompt_T, request.continuation_T), [])
        asked.append((_number(request.target), i))
    for prompt, by_how in samples.items():
        yield from (((prompt, settings[s], seed), asked) for (s, seed), asked in by_how.items())
    yield from scores.items()


def _as_range(numbers: list[int]) -> Sequence[int]:
    """Neighbours as a range, whose size does not depend on how many they are."""
    neighbours = range(numbers[0], numbers[-1] + 1)
    return neighbours if numbers == [*neighbours] else numbers


def _number(target: Target) -> int:
    return target if isinstance(target, int) else _CENTRE if target == "centre" else _BASE


def _target(number: int) -> Target:
    return number if number >= 0 else "centre" if number == _CENTRE else "base"


def encode_answers(answers: Iterable[tuple[int, Answer]]) -> bytes:
    """Numbered answers as bytes, actions as plain tuples; errors must be picklable."""
    actions: list[tuple[object, ...]] = []
    others: list[tuple[int, Answer]] = []
    for number, answer in answers:
        if isinstance(answer, Action):
            plain = (answer.tokens_T, answer.text, answer.stop_reason, answer.logprobs_T)
            actions.append((number, *plain))
        else:
            others.append((number, answer))
    return pickle.dumps((actions, others), pickle.HIGHEST_PROTOCOL)


def decode_answers(data: bytes) -> list[tuple[int, Answer]]:
    """Undo `encode_answers`, actions first."""
    actions, others = pickle.loads(data)
    return [*((number, Action(*plain)) for number, *plain in actions), *others]

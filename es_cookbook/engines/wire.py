"""The messages to an engine in another process and back, in few bytes.

Weights are never sent. A genome is its terms, about 20 bytes each. A request is a target (a
resident genome, the centre or the base) and a question (a prompt, how to sample, a sampling seed),
and most questions go to a whole population: so each question is sent once per batch, and so is
each group of targets.

Messages are pickles of plain tuples. Nothing here is written to disk: both ends run one version.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from es_cookbook.engines.base import LogprobsRequest, SampleRequest, Target
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.rl.types import Action, Observation

Request: TypeAlias = SampleRequest | LogprobsRequest
Answer: TypeAlias = Action | list[float] | Exception
"""The result of a request: an action, log-probabilities, or the error to raise."""
Batch: TypeAlias = tuple[bytes, bytes]
"""Requests as bytes: every question once, and the targets of each."""


def encode_genomes(genomes_G: Sequence[Genome]) -> bytes:
    """Encode genomes as bytes."""
    plain = [(_plain(genome.terms), genome.offsets) for genome in genomes_G]
    return pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)


def decode_genomes(data: bytes) -> list[Genome]:
    """Undo `encode_genomes`."""
    return [Genome(_terms(plain), offsets) for plain, offsets in pickle.loads(data)]


def encode_step(step: Step) -> bytes:
    """Encode a step as bytes; bytes of several steps may be concatenated."""
    return pickle.dumps((_plain(step.terms), step.decay, step.rule), pickle.HIGHEST_PROTOCOL)


def decode_steps(data: bytes) -> Iterator[Step]:
    """Undo `encode_step`, for any number of them one after the other."""
    stream = io.BytesIO(data)
    while stream.tell() < len(data):
        plain, decay, rule = pickle.load(stream)
        yield Step(_terms(plain), decay, rule)


def _plain(terms: Iterable[Term]) -> list[tuple[int, float]]:
    return [(term.seed, term.coefficient) for term in terms]


def _terms(plain: Iterable[tuple[int, float]]) -> tuple[Term, ...]:
    return tuple(Term(*each) for each in plain)


def encode_requests(requests: Sequence[Request]) -> tuple[Batch, list[int]]:
    """Encode requests as bytes; also return their indices in the order of `decode_requests`."""
    asked: dict[tuple[Any, ...], list[int]] = {}
    for i, request in enumerate(requests):
        if isinstance(request, SampleRequest):
            question = (request.observation, request.params, request.seed)
        else:
            question = (request.prompt_T, request.continuation_T)
        asked.setdefault(question, []).append(i)
    # Equal groups of targets are one object, which a pickle has once.
    groups: dict[tuple[Target, ...], tuple[Target, ...]] = {}
    targets: list[tuple[Target, ...]] = []
    for own in asked.values():
        group: tuple[Target, ...] = tuple(requests[i].target for i in own)
        targets.append(groups.setdefault(group, group))
    order = [i for own in asked.values() for i in own]
    return (pickle.dumps(list(asked), -1), pickle.dumps(targets, -1)), order


def decode_requests(batch: Batch) -> Iterator[Request]:
    """Undo `encode_requests`, in the order that it gave."""
    for question, targets in zip(*map(pickle.loads, batch), strict=True):
        kind = SampleRequest if isinstance(question[0], Observation) else LogprobsRequest
        yield from (kind(target, *question) for target in targets)


def encode_answers(answers: Iterable[tuple[int, Answer]]) -> bytes:
    """Encode numbered answers, actions as plain tuples; errors must be picklable."""
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

"""What an engine in another process is sent, and what it answers, in as few bytes as it takes.

Weights never travel. A genome is its terms, 16 bytes each. A request is *who* (a resident genome,
the centre or the base) and *what* (a prompt, how to sample, a sampling seed), and a population is
mostly asked the same things: so each thing is sent once a batch, and who is asked goes beside it as
rectangles, "questions 0 to 31, each to genomes 0 to 63", which cost the same for one as for all.

All integers are little-endian. Nothing here is written to disk: both ends run the same version.
"""

import dataclasses
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias, cast

import numpy as np

from es_cookbook.engines.base import LogprobsRequest, SampleRequest, Target
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.rules import Offsets, Rule
from es_cookbook.rl.types import Action, Observation, SamplingParams

Request: TypeAlias = SampleRequest | LogprobsRequest
Answer: TypeAlias = Action | list[float] | Exception
"""What became of a request: an action, log-probabilities, or the error to raise."""

_SampleQuestion: TypeAlias = tuple[Observation, SamplingParams, int]
_LogprobsQuestion: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
_PlainAction: TypeAlias = tuple[
    tuple[int, ...], str, Literal["stop", "length"], tuple[float, ...] | None
]

_COUNT = np.dtype("<u4")
_SEED = np.dtype("<i8")
_NUMBER = np.dtype("<f8")
_RECTANGLE = np.dtype("<i4")
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
        rule = cast(
            "Rule | None", pickle.loads(data[end : end + rule_bytes]) if rule_bytes else None
        )
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


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Requests as bytes.

    Attributes:
        questions: each thing that is asked, once: prompts, stop conditions, sampling parameters and
            seeds.
        who: rectangles of questions x genomes.
    """

    questions: bytes
    who: bytes


def encode_requests(requests: Sequence[Request]) -> tuple[Batch, list[int]]:
    """Requests as bytes, and the order in which `decode_requests` gives them, as indices."""
    questions: list[_SampleQuestion | _LogprobsQuestion] = []
    index_of: dict[object, int] = {}
    asked: list[list[tuple[int, int]]] = []  # For each question (target, index of the request).
    observations: dict[Observation, Observation] = {}
    for i, request in enumerate(requests):
        if isinstance(request, SampleRequest):
            # One object for equal prompts, which pickle then writes once, also for several seeds.
            prompt = observations.setdefault(request.observation, request.observation)
            question = (prompt, request.params, request.seed)
            key = (id(prompt), id(request.params), request.seed)
        else:
            question = key = (request.prompt_T, request.continuation_T)
        index = index_of.setdefault(key, len(questions))
        if index == len(questions):
            questions.append(question)
            asked.append([])
        asked[index].append((_number(request.target), i))
    for of_question in asked:
        of_question.sort()
    rectangles: list[tuple[int, int, int, int]] = []
    order: list[int] = []
    first = 0
    while first < len(questions):
        runs = _runs([target for target, _ in asked[first]])
        last = first + 1
        while last < len(questions) and _runs([t for t, _ in asked[last]]) == runs:
            last += 1
        start = 0
        for target, length in runs:
            rectangles.append((first, last - first, target, length))
            for of_question in asked[first:last]:
                order += [i for _, i in of_question[start : start + length]]
            start += length
        first = last
    who = np.array(rectangles, _RECTANGLE).tobytes()
    return Batch(pickle.dumps(questions, pickle.HIGHEST_PROTOCOL), who), order


def decode_requests(batch: Batch) -> Iterator[Request]:
    """Undo `encode_requests`, in the order that it gave."""
    questions = cast("list[_SampleQuestion | _LogprobsQuestion]", pickle.loads(batch.questions))
    for first, num_questions, first_target, num_targets in (
        np.frombuffer(batch.who, _RECTANGLE).reshape(-1, 4).tolist()
    ):
        targets: list[Target] = [_target(first_target + i) for i in range(num_targets)]
        for question in questions[first : first + num_questions]:
            for target in targets:
                if len(question) == 3:
                    yield SampleRequest(target, *question)
                else:
                    yield LogprobsRequest(target, *question)


def _runs(sorted_targets: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as (first, how many); a number that comes twice begins another run."""
    runs: list[tuple[int, int]] = []
    for target in sorted_targets:
        if runs and target == sum(runs[-1]) and target != 0:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((target, 1))
    return runs


def _number(target: Target) -> int:
    return target if isinstance(target, int) else _CENTRE if target == "centre" else _BASE


def _target(number: int) -> Target:
    return number if number >= 0 else "centre" if number == _CENTRE else "base"


def encode_answers(answers: Iterable[tuple[int, Answer]]) -> bytes:
    """Numbered answers as bytes; errors must be picklable."""
    plain = [
        (
            number,
            (answer.tokens_T, answer.text, answer.stop_reason, answer.logprobs_T)
            if isinstance(answer, Action)
            else answer,
        )
        for number, answer in answers
    ]
    return pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)


def decode_answers(data: bytes) -> list[tuple[int, Answer]]:
    """Undo `encode_answers`."""
    plain = cast("list[tuple[int, _PlainAction | list[float] | Exception]]", pickle.loads(data))
    return [
        (number, Action(*answer) if isinstance(answer, tuple) else answer)
        for number, answer in plain
    ]

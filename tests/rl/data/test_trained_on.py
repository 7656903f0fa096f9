"""Digests say which problems are the same ones, and are a few bytes a problem."""

import functools

import pytest

from es_cookbook.rl.data.trained_on import TrainedOn
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder, digest_of
from es_cookbook.rl.types import Observation

HEAD = b"es_cookbook digests of training problems 1\n"


class Silent(ProblemEnv):
    def grade(self, text: str) -> Grade:
        return Grade(0.0)


def problem(content: str, *prompt_T: int) -> ProblemGroupBuilder:
    env = functools.partial(Silent, Observation(prompt_T))
    contents = (digest_of(content),) if content else ()
    return ProblemGroupBuilder(env, "a name", contents=contents)


def test_problems_of_one_content_or_one_prompt_are_the_same() -> None:
    known = TrainedOn.of(p.digests for p in (problem("1+1", 5, 6), problem("", 7)))
    assert known is not None
    same = [problem("1+1", 8), problem("2+2", 5, 6), problem("", 7)]
    asked = [*same, problem("2+2", 5), problem("", 8)]
    assert [known.overlap([p.digests]) for p in asked] == [1, 1, 1, 0, 0]
    assert known.overlap(p.digests for p in asked) == 3
    assert known.overlap([(0,), (2**64 - 1,)]) == 0


def test_what_one_problem_does_not_tell_is_not_known_of_all() -> None:
    assert TrainedOn.of([(1,), ()]) is None and TrainedOn.of([]) is None
    known = TrainedOn.of([(1,)])
    assert known is not None and known.overlap([(1,), ()]) is None


def test_a_digest_takes_eight_bytes_and_is_read_back() -> None:
    known = TrainedOn.of((digest_of(str(i)),) for i in range(1000))
    assert known is not None
    data = known.and_of(known).encode()
    digests = data.removeprefix(HEAD)
    assert (len(data), len(digests)) == (len(HEAD) + 8000, 8000)
    read = TrainedOn.decode(data)
    assert read is not None and read.overlap((digest_of(str(i)),) for i in range(2000)) == 1000
    assert digest_of("7").to_bytes(8, "little") in digests


@pytest.mark.parametrize("data", [b"", b"12345678", HEAD + b"1"])
def test_anything_else_is_not_read(data: bytes) -> None:
    assert TrainedOn.decode(data) is None

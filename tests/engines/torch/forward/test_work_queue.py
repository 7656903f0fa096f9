"""The queue gives lanes what fits, keeps genomes' order and forgets what was cancelled."""

import threading
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor

from typing_extensions import override

from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch.forward.population_layers import ROWS_PER_BLOCK, PopulationModel
from es_cookbook.engines.torch.forward.work_queue import Admission, Work, WorkQueue
from es_cookbook.rl.types import Observation, SamplingParams


def _model() -> PopulationModel:
    return PopulationModel.__new__(PopulationModel)  # the queue only tells models apart


class _Cohorts(Admission):
    """Those of prompts of one length may, and at most two blocks of them."""

    joins = False

    @override
    def alike(self, work: Work) -> Hashable:
        return len(work.sequence)

    @override
    def most(self, work: Work) -> int:
        return 2 * ROWS_PER_BLOCK


_any = Admission()


def _sample(model: PopulationModel, row: int = 0, length: int = 10, prompt: int = 1) -> Work:
    request = SampleRequest(row, Observation((1,) * prompt), SamplingParams())
    return Work(request, model, row, limit=length - prompt)


def _score(model: PopulationModel, length: int, row: int = 0) -> Work:
    return Work(LogprobsRequest(row, (1,), (1,) * (length - 1)), model, row, limit=0)


def test_free_slots_of_a_genomes_own_blocks_are_filled_first_and_in_order() -> None:
    model, queue = _model(), WorkQueue(1)
    first = [_sample(model, row=1) for _ in range(5)]
    other = [_sample(model, row=2) for _ in range(9)]
    queue.put([*first, *other])
    assert queue.num_waiting(model) == 14
    assert queue.take_samples(model, {1: 3}, 0, 64, _any) == first[:3]
    assert queue.take_samples(model, {}, 1, 64, _any) == other[:ROWS_PER_BLOCK]
    assert queue.take_samples(model, {}, 9, 64, _any) == [*first[3:], *other[ROWS_PER_BLOCK:]]
    assert queue.take_samples(model, {1: 8}, 9, 64, _any) == []


def test_lanes_share_what_waits() -> None:
    model, queue = _model(), WorkQueue(2)
    queue.put([_sample(model, row=g) for g in range(4) for _ in range(ROWS_PER_BLOCK)])
    assert len(queue.take_samples(model, {}, 100, 64, _any)) == 2 * ROWS_PER_BLOCK


def test_a_cohort_is_of_requests_that_are_alike_and_no_larger_than_it_may_be() -> None:
    model, queue = _model(), WorkQueue(1)
    short, long = ([_sample(model, prompt=n) for _ in range(20)] for n in (2, 5))
    queue.put([work for pair in zip(short, long, strict=True) for work in pair])
    assert queue.take_samples(model, {}, 100, 64, _Cohorts()) == short[:16]
    assert queue.num_waiting(model) == 24


def test_lanes_that_run_a_cohort_take_no_share_of_what_waits() -> None:
    model, queue = _model(), WorkQueue(2)
    queue.put([_sample(model) for _ in range(20)])
    assert queue.wait_for_model() is model
    first = queue.take_samples(model, {}, 100, 64, _Cohorts())
    taken: list[list[Work]] = []

    def other_lane() -> None:
        assert queue.wait_for_model() is model
        taken.append(queue.take_samples(model, {}, 100, 64, _Cohorts()))
        queue.leave(model)

    lane = threading.Thread(target=other_lane)
    lane.start()
    lane.join(timeout=10)
    assert [len(first), *map(len, taken)] == [16, 4], "all that the busy lane left"
    queue.put([_sample(model) for _ in range(20)])
    queue.leave(model)
    assert len(queue.take_samples(model, {}, 100, 64, _Cohorts())) == 16


def test_a_model_that_a_lane_leaves_comes_after_the_others_that_wait() -> None:
    one, other, queue = _model(), _model(), WorkQueue(1)
    queue.put([_sample(one), _sample(other), _score(one, 3)])
    assert queue.wait_for_model() is one
    assert len(queue.take_scores(one, 9)) == 1
    queue.leave(one)
    assert queue.wait_for_model() is other


def test_requests_too_long_for_the_cache_stay_until_it_is_longer() -> None:
    model, queue = _model(), WorkQueue(1)
    long = _sample(model, length=100)
    queue.put([long])
    assert queue.longest(model) == 100
    assert queue.take_samples(model, {}, 4, 64, _any) == []
    assert queue.take_samples(model, {}, 4, 128, _any) == [long]
    assert queue.longest(model) == 0


def test_cancelled_requests_are_not_handed_out() -> None:
    model, queue = _model(), WorkQueue(1)
    samples, scores = [_sample(model) for _ in range(3)], [_score(model, 4) for _ in range(2)]
    queue.put([*samples, *scores])
    samples[1].cancelled = scores[0].cancelled = True
    assert queue.take_samples(model, {}, 1, 64, _any) == [samples[0], samples[2]]
    assert queue.take_scores(model, 100) == [scores[1]]


def test_scores_come_in_batches_of_at_most_so_many_tokens_but_at_least_one() -> None:
    model, queue = _model(), WorkQueue(1)
    works = [_score(model, length) for length in (50, 10, 10, 15, 5)]
    queue.put(works)
    batches = [queue.take_scores(model, 30) for _ in range(4)]
    assert batches == [works[:1], works[1:3], works[3:], []]


def test_a_free_lane_turns_to_the_model_that_fewest_lanes_are_on() -> None:
    one, other, queue = _model(), _model(), WorkQueue(2)
    queue.put([_sample(one), _sample(other)])
    first = queue.wait_for_model()
    assert {first, queue.wait_for_model()} == {one, other}
    assert first is not None
    assert queue.others_wait(first)
    queue.leave(first)
    assert queue.wait_for_model() is first


def test_closing_wakes_waiting_lanes_and_gives_back_what_waited() -> None:
    model, queue = _model(), WorkQueue(1)
    woken: list[PopulationModel | None] = []
    lane = threading.Thread(target=lambda: woken.append(queue.wait_for_model()))
    lane.start()
    assert queue.close() == []
    lane.join(timeout=10)
    assert woken == [None]
    waiting = WorkQueue(1)
    works = [_sample(model), _score(model, 3)]
    waiting.put(works)
    assert set(map(id, waiting.close())) == set(map(id, works))
    assert waiting.wait_for_model() is None


def test_lanes_share_what_came_together_equally_whichever_is_first() -> None:
    model, queue = _model(), WorkQueue(3)
    queue.put([_sample(model, row=row) for row in range(6) for _ in range(16)])
    lanes = [ThreadPoolExecutor(1) for _ in range(3)]  # threads that live on, as lanes do
    taken = [lane.submit(queue.take_samples, model, {}, 100, 10, _any) for lane in lanes]
    assert [len(works.result()) for works in taken] == [32, 32, 32]
    for lane in lanes:
        lane.shutdown()


def test_a_lane_that_had_its_share_takes_no_more_than_a_lanes_share_of_the_rest() -> None:
    model, queue = _model(), WorkQueue(2)
    queue.put([_sample(model) for _ in range(32)])
    assert len(queue.take_samples(model, {}, 100, 10, _any)) == 16
    assert len(queue.take_samples(model, {}, 100, 10, _any)) == 8

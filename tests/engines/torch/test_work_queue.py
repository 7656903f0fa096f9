"""The queue gives lanes what fits, keeps genomes' order and forgets what was cancelled."""

from concurrent.futures import ThreadPoolExecutor

from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch.lane import WorkQueue
from es_cookbook.engines.torch.population_layers import ROWS_PER_BLOCK, PopulationModel
from es_cookbook.engines.torch.slots import Work
from es_cookbook.rl.types import Observation, SamplingParams


def _model() -> PopulationModel:
    return PopulationModel.__new__(PopulationModel)  # the queue only tells models apart


def _any(work: Work) -> None:
    del work


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


def test_requests_too_long_for_the_cache_stay_until_it_is_longer() -> None:
    model, queue = _model(), WorkQueue(1)
    long = _sample(model, length=100)
    queue.put([long])
    assert queue.longest(model) == 100
    assert queue.take_samples(model, {}, 4, 64, _any) == []
    assert queue.take_samples(model, {}, 4, 128, _any) == [long]
    assert queue.longest(model) == 0


def test_scores_come_in_batches_of_at_most_so_many_tokens_but_at_least_one() -> None:
    model, queue = _model(), WorkQueue(1)
    works = [_score(model, length) for length in (50, 10, 10, 15, 5)]
    queue.put(works)
    batches = [queue.take_scores(model, 30) for _ in range(4)]
    assert batches == [works[:1], works[1:3], works[3:], []]


def test_a_free_lane_turns_to_the_model_that_fewest_lanes_are_on_and_that_waited_longest() -> None:
    one, other, queue = _model(), _model(), WorkQueue(2)
    queue.put([_sample(one), _sample(other), _score(one, 3)])
    assert queue.wait_for_model() is one
    assert queue.wait_for_model() is other
    assert queue.others_wait(one)
    queue.leave(one)
    assert queue.wait_for_model() is one
    queue.leave(one)
    queue.leave(other)
    queue.take_scores(one, 9)
    assert queue.wait_for_model() is one


def test_lanes_share_requests_equally() -> None:
    model, queue = _model(), WorkQueue(3)
    queue.put([_sample(model, row=row) for row in range(6) for _ in range(16)])
    lanes = [ThreadPoolExecutor(1) for _ in range(3)]  # threads that live on, as lanes do
    taken = [lane.submit(queue.take_samples, model, {}, 100, 10, _any) for lane in lanes]
    assert [len(works.result()) for works in taken] == [32, 32, 32]
    for lane in lanes:
        lane.shutdown()

"""What sequences begin with in common is found, kept while it is of use, and never overwritten."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.engines.base import SampleRequest, Target
from es_cookbook.engines.torch.attention import TokenCache
from es_cookbook.engines.torch.kernels.attention import STEP
from es_cookbook.engines.torch.population_layers import PopulationModel
from es_cookbook.engines.torch.prefix_cache import Lease, PrefixCache
from es_cookbook.engines.torch.slots import Work
from es_cookbook.rl.types import Observation, SamplingParams

MODEL = PopulationModel.__new__(PopulationModel)
ME, OTHER = object(), object()
"""Lanes."""


def _work(target: Target, tokens_T: tuple[int, ...], limit: int = 0, version: int = 0) -> Work:
    request = SampleRequest(target, Observation(tokens_T), SamplingParams())
    return Work(request, MODEL, 0, limit, version)


def _prefixes(num_blocks: int = 100, max_idle: int = 100, **options: object) -> PrefixCache:
    """Of so many blocks that requests can have."""
    return PrefixCache(TokenCache(1 + num_blocks), max_idle, **options)


def _take(prefixes: PrefixCache, work: Work) -> Lease:
    """Blocks for a request, whose prompt is computed at once."""
    lease = prefixes.take(work, ME)
    assert lease is not None
    prefixes.computed([lease], ME)
    return lease


def _first(prefixes: PrefixCache, target: Target, *tokens_T: int) -> int:
    """How many tokens of a prompt need not be computed."""
    lease = prefixes.take(_work(target, tokens_T, version=prefixes.version), ME)
    assert lease is not None
    prefixes.give_back(lease)
    return lease.first


def test_the_longest_common_beginning_is_shared_among_many() -> None:
    prefixes = _prefixes()
    prompts = [(1, 2, 3, 4, 0), (1, 2, 9, 0), (5, 0), (1, 2, 3, 7, 8, 0), (0, 0, 0)]
    firsts = [_take(prefixes, _work("centre", tokens_T)).first for tokens_T in prompts]
    assert firsts == [0, 2, 0, 3, 0]
    assert _first(prefixes, "centre", 1, 2, 3, 7, 8, 9) == 5
    assert _first(prefixes, "centre", 1, 2, 3, 7, 1) == 4
    assert _first(prefixes, "centre", 1, 3) == 1
    assert _first(prefixes, "centre", 6, 1) == 0
    assert _first(prefixes, 0, 1, 2, 3) == 0, "another genome's"


def test_prefixes_of_one_request_are_freed_with_it_and_shared_ones_stay() -> None:
    prefixes = _prefixes()
    one = _take(prefixes, _work(0, (1, 2, 3, 4, 0)))
    prefixes.give_back(one)
    assert _first(prefixes, 0, 1, 2, 3, 4, 0) == 0
    leases = [_take(prefixes, _work(0, (1, 2, 3, last, 0))) for last in (4, 5)]
    for lease in leases:
        prefixes.give_back(lease)
    assert _first(prefixes, 0, 1, 2, 3, 4, 0) == 3


def test_other_lanes_share_a_prefix_once_it_is_computed() -> None:
    prefixes = _prefixes()
    mine = prefixes.take(_work(0, (1, 2, 3, 4)), ME)
    again = prefixes.take(_work(0, (1, 2, 3, 5)), ME)
    theirs = prefixes.take(_work(0, (1, 2, 3, 6)), OTHER)
    theirs_again = prefixes.take(_work(0, (1, 2, 3, 7)), OTHER)
    assert mine and again and theirs and theirs_again
    firsts = [lease.first for lease in (mine, again, theirs, theirs_again)]
    assert firsts == [0, 3, 0, 3]
    prefixes.computed([mine, again], ME)
    prefixes.computed([theirs, theirs_again], OTHER)  # too late to be of use
    for lease in (mine, again, theirs_again, theirs):
        prefixes.give_back(lease)
    late = prefixes.take(_work(0, (1, 2, 3, 8)), OTHER)
    assert late and late.first == 3 and late.runs[0] == mine.runs[0]


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    prefixes = _prefixes(max_idle=3)
    for target, token in (("a", 1), ("a", 2), ("b", 3)):
        prefixes.give_back(_take(prefixes, _work(target, (token,) * 3)), keep=(token,) * 3)
    assert _first(prefixes, "a", 1, 1, 1, 1) == 3
    prefixes.give_back(_take(prefixes, _work("b", (4, 4, 4))), keep=(4, 4, 4))
    assert _first(prefixes, "a", 2, 2, 2, 2) == 0
    assert [_first(prefixes, "a", 1, 1, 1, 1), _first(prefixes, "b", 3, 3, 3, 3)] == [3, 3]


def test_a_request_finds_room_or_waits_and_takes_nothing_from_those_that_run() -> None:
    prefixes = _prefixes(num_blocks=4)
    kept = _take(prefixes, _work(0, (1,) * STEP, limit=1))
    prefixes.give_back(kept, keep=(1,) * STEP)
    running = _take(prefixes, _work(0, (1,) * STEP, limit=STEP))
    assert running.first == STEP - 1
    assert prefixes.take(_work(1, (2,) * 2 * STEP), ME) is None  # one block is left
    prefixes.give_back(running)
    assert prefixes.take(_work(1, (2,) * 4 * STEP), ME) is not None  # what was kept makes room
    assert prefixes.take(_work(1, (3,)), ME) is None


def test_nothing_survives_a_change_of_the_weights_or_arrives_late() -> None:
    prefixes = _prefixes()
    before = _take(prefixes, _work(0, (1, 2, 3)))
    centre = _take(prefixes, _work("centre", (1, 2, 3)))
    prefixes.clear(lambda who: who == 0)
    prefixes.give_back(before, keep=(1, 2, 3))  # computed before the change
    prefixes.give_back(centre, keep=(1, 2, 3))
    assert _first(prefixes, 0, 1, 2, 3, 4) == 0
    assert _first(prefixes, "centre", 1, 2, 3, 4) == 3
    late = prefixes.take(_work("centre", (1, 2, 3, 4), version=0), ME)
    assert late is not None and late.first == 0
    prefixes.clear()
    assert _first(prefixes, "centre", 1, 2, 3, 4) == 0


@dataclasses.dataclass
class _Running:
    work: Work
    lease: Lease
    owner: object
    computed: bool = False


def _whose(one: _Running) -> object:
    """Weights that answer: the centre's do not change here."""
    return one.work.request.target, one.work.request.target == 0 and one.work.version


def _places(lease: Lease, end: int) -> list[int]:
    """Where the first positions of a request are."""
    return [
        position + max((run for run in lease.runs if run[0] <= position), default=(0, 0))[1]
        for position in range(end)
    ]


@given(st.data())
def test_requests_only_ever_read_their_own_tokens(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(6, 20))
    prefixes = _prefixes(num_blocks, max_idle=data.draw(st.integers(0, 8)))
    # What a block's memory holds: by place, of whom and of which first tokens.
    memory: dict[int, object] = {}
    running: list[_Running] = []

    def check(one: _Running, tokens_T: tuple[int, ...]) -> None:
        found = [memory.get(place) for place in _places(one.lease, len(tokens_T))]
        assert found == [(_whose(one), tokens_T[: n + 1]) for n in range(len(tokens_T))]

    def compute(owner: object) -> None:
        mine = [one for one in running if one.owner is owner and not one.computed]
        for one in mine:
            tokens_T, places = one.work.sequence, _places(one.lease, len(one.work.sequence))
            for n in range(one.lease.first, len(tokens_T)):
                memory[places[n]] = _whose(one), tokens_T[: n + 1]
            check(one, tokens_T)
            one.computed = True
        prefixes.computed([one.lease for one in mine], owner)

    tokens = st.integers(0, 2)
    for _ in range(data.draw(st.integers(5, 40))):
        match data.draw(
            st.sampled_from(["take"] * 6 + ["compute"] * 2 + ["end"] * 3 + ["cancel", "clear"])
        ):
            case "take":
                body = data.draw(st.lists(tokens, min_size=1, max_size=3)) * STEP
                prompt = (*body[: data.draw(st.integers(1, 2 * STEP + 3))], data.draw(tokens))
                target = data.draw(st.sampled_from([0, "centre"]))
                work = _work(target, prompt, data.draw(st.integers(1, 20)), prefixes.version)
                owner = data.draw(st.sampled_from([ME, OTHER]))
                if (lease := prefixes.take(work, owner)) is not None:
                    assert lease.first < len(prompt)
                    running.append(_Running(work, lease, owner))
            case "compute":
                compute(data.draw(st.sampled_from([ME, OTHER])))
            case "end" if running:
                one = running[data.draw(st.integers(0, len(running) - 1))]
                compute(one.owner)
                running.remove(one)
                sampled = data.draw(st.lists(tokens, max_size=one.work.limit - 1))
                whole = one.work.sequence + tuple(sampled)
                for n, place in enumerate(_places(one.lease, len(whole))):
                    if n >= len(one.work.sequence):
                        memory[place] = _whose(one), whole[: n + 1]
                check(one, whole)
                prefixes.give_back(one.lease, whole if data.draw(st.booleans()) else ())
            case "cancel" if running:
                compute(running[0].owner)
                prefixes.give_back(running.pop(0).lease)
            case "clear" if not running:  # what the centre has is the same afterwards
                prefixes.clear(lambda who: who == 0)
            case _:
                pass
    for owner in (ME, OTHER):
        compute(owner)
    for one in running:
        check(one, one.work.sequence)
        prefixes.give_back(one.lease)
    prefixes.clear()
    whole = prefixes.take(_work("centre", (1,) * STEP * num_blocks), ME)
    assert whole is not None, "all blocks are free again"

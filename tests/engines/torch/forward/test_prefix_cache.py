"""What is kept of requests that ended: found by genome and tokens, and bounded."""

import torch

from es_cookbook.engines.torch.forward.flat import PrefixCache, States


def _states(num_tokens: int) -> States:
    """8 bytes a token."""
    return {0: (torch.zeros(1, 1, num_tokens), torch.zeros(1, num_tokens, 1))}


def _cache(max_bytes: int, *kept: tuple[str, tuple[int, ...]]) -> PrefixCache:
    cache = PrefixCache(max_bytes)
    for who, tokens_T in kept:
        cache.put(who, tokens_T, _states(len(tokens_T)), version=0)
    return cache


def test_the_longest_common_beginning_is_found_among_many() -> None:
    kept = [(1, 2, 3, 4), (1, 2, 9), (5,), (1, 2, 3, 7, 8), (0, 0)]
    cache = _cache(1000, *(("a", tokens_T) for tokens_T in kept))
    assert cache.find("a", (1, 2, 3, 7, 8, 9))[0] == 5
    assert cache.find("a", (1, 2, 3, 7, 1))[0] == 4
    assert cache.find("a", (1, 2, 9, 9))[0] == 3
    assert cache.find("a", (1, 3))[0] == 1
    assert cache.find("a", (6, 1))[0] == 0


def test_a_prompts_last_token_is_never_taken() -> None:
    cache = _cache(1000, ("a", (1, 2, 3)))
    assert cache.find("a", (1, 2, 3))[0] == 2
    assert cache.find("a", (1, 2))[0] == 1
    assert cache.find("a", (1,))[0] == 0


def test_nothing_is_found_of_another_genome() -> None:
    cache = _cache(1000, ("a", (1, 2, 3)))
    assert cache.find("b", (1, 2, 3, 4)) == (0, {})


def test_what_was_not_used_for_longest_goes_first() -> None:
    cache = _cache(8 * 9, ("a", (1, 2, 3)), ("a", (2, 2, 2)), ("b", (3, 3, 3)))
    cache.find("a", (1, 2, 3, 4))
    cache.put("b", (4, 4, 4), _states(3), version=0)
    assert cache.find("a", (2, 2, 2, 2))[0] == 0
    assert [cache.find(*each)[0] for each in (("a", (1, 2, 3, 4)), ("b", (3, 3, 3, 3)))] == [3, 3]


def test_a_turn_takes_the_place_of_the_turn_before() -> None:
    cache = _cache(8 * 9, ("a", (1, 2)), ("a", (1, 2, 3, 4)), ("a", (7, 7, 7, 7, 7)))
    assert cache.find("a", (1, 2, 3, 4, 5))[0] == 4
    assert cache.find("a", (7,) * 6)[0] == 5


def test_what_does_not_fit_is_not_kept_and_nothing_makes_room_for_it() -> None:
    cache = _cache(8 * 4, ("a", (1, 2)), ("a", (5,) * 5))
    assert cache.find("a", (5, 5, 5))[0] == 0
    assert cache.find("a", (1, 2, 3))[0] == 2


def test_nothing_survives_a_change_of_the_weights_or_arrives_late() -> None:
    cache = _cache(1000, ("a", (1, 2, 3)))
    cache.clear()
    assert cache.find("a", (1, 2, 3, 4))[0] == 0
    cache.put("a", (1, 2, 3), _states(3), version=0)  # computed before the change
    assert cache.find("a", (1, 2, 3, 4))[0] == 0
    cache.put("a", (1, 2, 3), _states(3), cache.version)
    assert cache.find("a", (1, 2, 3, 4))[0] == 3

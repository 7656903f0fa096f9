"""σ by layer and partitions: what each parameter has of a term, and what is refused."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from es_cookbook import FullRank, LowRank
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import SEEDS_OF_PARTITION, Part, Partitions, noise, partition_seed
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import (
    ParameterInfo,
    SearchSpaceBuilder,
    Shares,
    balanced_blocks,
)

PARAMETERS = [
    ParameterInfo("0.q.weight", (60, 40), "linear"),
    ParameterInfo("0.up.weight", (70, 30), "linear"),
    ParameterInfo("1.q.weight", (60, 40), "linear"),
    ParameterInfo("1.up.weight", (70, 30), "linear"),
]
SPACES: tuple[type[SearchSpaceBuilder], ...] = (FullRank, LowRank, Adapter)
TERMS = (Term(10, 0.3), Term(11, -0.7), Term(2**63 - 1, 0.01))


LARGE = [
    ParameterInfo(f"{i}.{name}.weight", (200, 120), "linear")
    for i in range(4)
    for name in ("q", "up")
]
"""Six runs each."""


def moved(
    builder: SearchSpaceBuilder,
    terms: tuple[Term, ...] = TERMS,
    parameters: Sequence[ParameterInfo] = PARAMETERS,
) -> dict[str, torch.Tensor]:
    """What the terms make of parameters that were all 0."""
    space = builder(parameters)
    weights = {name: torch.zeros(shape) for name, shape in space.shapes.items()}
    for name, weight in weights.items():
        space.add_terms_(name, weight, terms)
    return weights


def test_a_share_is_a_factor() -> None:
    shares = Shares({"a": 0.5})
    assert shares.own("a", TERMS) == [Term(10, 0.15), Term(11, -0.35), Term(2**63 - 1, 0.005)]
    one_of_each, kinds = shares.kinds(["a", "c", "d"], TERMS)
    assert kinds == {"a": 0, "c": 1, "d": 1} and one_of_each == ["a", "d"]
    assert Shares().own("a", TERMS) is TERMS


@pytest.mark.parametrize("space", SPACES)
def test_the_first_pattern_that_matches_scales_sigma(space: type[SearchSpaceBuilder]) -> None:
    plain = moved(space())
    scaled = moved(space(sigma_patterns=("0.q*", "*q*"), sigma_factors=(0.1, 3.0)))
    for name, weight in scaled.items():
        factor = 0.1 if name.startswith("0.q") else 3.0 if ".q" in name else 1.0
        if factor == 1.0:
            assert torch.equal(weight, plain[name])
        else:
            torch.testing.assert_close(weight, plain[name] * factor, rtol=1e-5, atol=1e-6)
            assert not torch.equal(weight, plain[name])


def test_the_product_is_made_in_float64_and_rounded_once() -> None:
    # 0.3 · 0.1 in float64 rounds to another float32 than float32(0.3) · float32(0.1) does.
    scale, twice_rounded = np.float32(0.3 * 0.1), np.float32(0.3) * np.float32(0.1)
    assert scale != twice_rounded
    sigma = {"sigma_patterns": ("*",), "sigma_factors": (0.1,)}
    dense = moved(FullRank(**sigma), (Term(10, 0.3),))["0.q.weight"]
    assert np.array_equal(dense.numpy(), noise(10, "0.q.weight", (60, 40)) * scale)
    low_rank = moved(LowRank(rank=3, **sigma), (Term(10, 0.3),))["0.q.weight"]
    a, b = noise(10, "0.q.weight.A", (60, 3)), noise(10, "0.q.weight.B", (40, 3))
    expected = np.zeros((60, 40), np.float32)
    for k in range(3):
        expected += np.outer(np.float32(0.3 * 0.1 / math.sqrt(3)) * a[:, k], b[:, k])
    assert np.array_equal(low_rank.numpy(), expected)


def seeds_of(partition: int, number: int) -> list[int]:
    return [partition_seed(partition * SEEDS_OF_PARTITION, i) for i in range(number)]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("options", [{}, {"sigma_patterns": ("*q*",), "sigma_factors": (0.3,)}])
def test_the_seeds_of_a_partition_share_all_parameters_out(
    space: type[SearchSpaceBuilder], options: dict[str, object]
) -> None:
    """Each element has the noise of one seed, √K times as large; another partition differs."""
    builder = space(partitions=2, **options)
    undivided = space(sigma_patterns=("*",), sigma_factors=(math.sqrt(2),))
    found: list[list[int]] = []
    places: set[bytes] = set()
    for partition in range(8):
        seeds = seeds_of(partition, 2)
        of_seeds = [moved(builder, (Term(seed, 0.3),), LARGE) for seed in seeds]
        whole = [moved(undivided, (Term(seed, 0.3),), LARGE) for seed in seeds]
        sizes = [sum(int(w.count_nonzero()) for w in weights.values()) for weights in of_seeds]
        for name in of_seeds[0]:
            times = sum((weights[name] != 0).int() for weights in of_seeds)
            assert isinstance(times, torch.Tensor) and (times == 1).all()
            for part, all_of_it in zip(of_seeds, whole, strict=True):
                own = part[name] != 0
                if not options:
                    assert torch.equal(part[name][own], all_of_it[name][own])
        found.append(sizes)
        places.add(b"".join((w != 0).numpy().tobytes() for w in of_seeds[0].values()))
    assert len(places) > 3
    means = np.mean(found, axis=0)
    assert means.max() / means.min() < 1.7


def test_known_partitions() -> None:
    # Pinned: a recorded seed has to mean the same part in every version.
    def parts(builder: SearchSpaceBuilder, parameters: Sequence[ParameterInfo]) -> list[list[int]]:
        shares = builder(parameters).shares
        names = list(builder(parameters).shapes)
        return [
            [i for i, name in enumerate(names) if shares.own(name, [Term(seed, 1.0)])]
            for seed in seeds_of(1, 2)
        ]

    assert parts(LowRank(partitions=2), PARAMETERS) == [[1, 3], [0, 2]]
    assert Partitions(3).group(2**16 + 5) == 2
    of_seeds = [[*Partitions(2).runs("w", seed, 100, 20_000)] for seed in seeds_of(1, 2)]
    assert of_seeds == [
        [(100, 4096), (4096, 8192), (12288, 16384), (16384, 20000)],
        [(8192, 12288)],
    ]


def test_a_part_of_a_divided_parameter_moves_as_the_whole_does() -> None:
    space = FullRank(partitions=3)(LARGE)
    terms = [Term(seed, 0.3) for seed in seeds_of(2, 2)]
    shares: list[float] = []
    for name, (height, width) in space.shapes.items():
        whole, part = torch.zeros(height, width), Part((50, height), (3, 99), width)
        space.add_terms_(name, whole, terms)
        held = torch.zeros(part.shape)
        space.add_terms_(name, held, terms, part)
        assert torch.equal(held, whole[50:, 3:99])
        shares.append(int(held.count_nonzero()) / held.numel())
    assert any(0 < share < 1 for share in shares)


@pytest.mark.parametrize("space", SPACES)
def test_twins_stay_exact_mirrors(space: type[SearchSpaceBuilder]) -> None:
    builder = space(sigma_patterns=("*q*",), sigma_factors=(0.3,), partitions=2)
    for seed in (4, 5):
        one, twin = moved(builder, (Term(seed, 0.003),)), moved(builder, (Term(seed, -0.003),))
        assert any(weight.any() for weight in one.values())
        assert all(torch.equal(one[name], -twin[name]) for name in one)


def test_known_blocks() -> None:
    # Pinned: a recorded seed has to mean the same block in every version.
    assert balanced_blocks([50, *[10] * 10], 3) == [0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    assert balanced_blocks([1, 1, 1, 100], 3) == [0, 0, 1, 2]
    assert balanced_blocks([100, 1, 1, 1], 3) == [0, 1, 2, 2]
    assert balanced_blocks([7] * 4, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sigma_patterns": ("*",)}, "found 1 pattern and 0 factors"),
        (
            {"sigma_patterns": ("*",), "sigma_factors": (0.0,)},
            r"found 0\.0; .*search_space\.exclude",
        ),
        (
            {"sigma_patterns": ("*down*",), "sigma_factors": (1.0,)},
            r"sigma_patterns pattern '\*down\*' matches no perturbed parameter; the nearest names",
        ),
        ({"partitions": 5}, "partitions must be at most 4, the number of .*, found 5"),
    ],
)
@pytest.mark.parametrize("space", SPACES)
def test_what_cannot_be_shared_out_is_one_sentence(
    space: type[SearchSpaceBuilder], options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        space(**options)(PARAMETERS)

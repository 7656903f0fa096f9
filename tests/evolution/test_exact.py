"""Exact arithmetic: torch's operations, as they run on a GPU, have the bits of NumPy's."""

import math

import numpy as np
import pytest
import torch

from es_cookbook import FullRank, LowRank
from es_cookbook.evolution import exact
from es_cookbook.evolution.centre import Centre, merge_steps, moved
from es_cookbook.evolution.exact import orthogonalised
from es_cookbook.evolution.genome import (
    AdamRule,
    Genome,
    MuonRule,
    Offsets,
    OffsetsRule,
    Step,
    Term,
)
from es_cookbook.evolution.noise import Part, noise
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpace


def values(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    """Of all sizes, zeros of both signs and subnormal numbers too."""
    made = torch.from_numpy(noise(seed, "w", shape)).clone()
    flat = made.view(-1)
    flat[::7] *= 1e-40
    flat[::5] *= 1e30
    flat[::11] = -0.0
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [0.1, 1e-9, 1 / 3, 1.0])
def test_decay_rounds_as_numpy_does(
    dtype: torch.dtype, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "PIECE", 1000)
    base = values((257, 129), seed=2).clamp(-6e4, 6e4).to(dtype)
    found, anchor = values((257, 129)), base.float().numpy()
    exact.decay_(found, base.mT.contiguous().mT, decay)  # In any layout.
    away = np.multiply(values((257, 129)).numpy() - anchor, np.float32(1 - decay))
    expected = anchor if decay == 1 else anchor + away
    assert np.array_equal(found.numpy().view(np.int32), expected.view(np.int32))
    assert not torch.equal(found, values((257, 129)))


def test_decay_of_1_is_the_base_to_the_bit() -> None:
    base = torch.tensor([[0.0, -0.0], [1.0, -3e38]])
    weight = torch.tensor([[-1.0, 1.0], [math.inf, 3e38]])
    exact.decay_(weight, base, 1.0)
    assert torch.equal(weight.view(torch.int32), base.view(torch.int32))


PARTS = [
    *(Part.whole(shape) for shape in [(), (1,), (70_001,), (257, 300), (3, 5, 7), (0, 4), (1, 1)]),
    Part((5, 9), (0, 300), 300),
    Part((3, 260), (17, 18), 300),
    Part((2**31, 2**31 + 40), (2**20, 2**20 + 33), 2**21),
]


def multiplier(i: int) -> int:
    """What the lowest bit of element i counts in the fingerprint."""
    return exact.fingerprint_of("w", torch.tensor([1e-45]), Part((i, i + 1), (0, 1), 1))


@pytest.mark.parametrize("part", PARTS)
def test_pieces_of_any_size_have_the_same_fingerprint(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = values(part.shape)
    found = exact.fingerprint_of("w", weight, part)
    monkeypatch.setattr(exact, "PIECE", 64)
    assert found == exact.fingerprint_of("w", weight, part)
    a, b = multiplier(0), (multiplier(1) - multiplier(0)) % 2**64
    elements = [np.arange(span.start, span.stop, dtype=np.uint64) for span in part.spans()]
    bits = weight.numpy().reshape(-1).view(np.uint32).astype(np.uint64)
    counts = np.uint64(a) + np.concatenate([bits[:0], *elements]) * np.uint64(b)
    assert found == int((bits * counts).sum())  # Modulo 2⁶⁴.


SHAPES = {"a.weight": (40, 30), "b.weight": (25, 60)}
INFOS = [ParameterInfo(name, shape, "linear") for name, shape in SHAPES.items()]
BASE = {name: torch.from_numpy(noise(7, name, shape)) for name, shape in SHAPES.items()}
SPACES = (FullRank()(INFOS), LowRank()(INFOS), LowRank(rank=2)(INFOS))
NUM_PARAMETERS = 40 * 30 + 25 * 60

TERMS = tuple(Term(seed, 0.01 * (seed - 3)) for seed in range(1, 6))
ADAM = AdamRule((2, 0, 3), (0.2, 0.3, 0.5), (0.1, 0.2, 0.7), rate=0.01, epsilon=1e-8)
OFFSETS = Offsets.of(np.linspace(-1, 1, NUM_PARAMETERS))
STEPS = (
    Step((Term(9, 0.5),)),
    Step(TERMS, rule=ADAM),
    Step((Term(8, 0.5),), decay=0.25),
    Step(TERMS, decay=0.5, rule=MuonRule(0.03, 5)),
    Step((Term(9, -0.5),)),
)
MUON = Step(TERMS, rule=MuonRule(Step(TERMS).rms, 5))
PINNED = (13410255535132599322, 8626051711649876032, 1287981422018506204)
"""Fingerprints of STEPS from the base, for each of SPACES."""
PINNED_MUON = (7501412822697569296, 13913194749428390487, 7896761949202701655)
"""And of MUON behind them."""


def gradient(space: SearchSpace, name: str, terms: tuple[Term, ...]) -> torch.Tensor:
    total = torch.zeros(SHAPES[name])
    space.add_terms_(name, total, terms)
    return total


def applied(space: SearchSpace, *steps: Step) -> dict[str, torch.Tensor]:
    centre = Centre(BASE, space)
    for step in steps:
        centre.apply(step)
    return centre.weights


def test_muon_keeps_the_directions_and_makes_singular_values_equal() -> None:
    matrix = torch.from_numpy(noise(3, "m", (20, 50))).double()
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalised(matrix, 5)
    # Muon's polynomial does not converge: it leaves singular values between about 0.7 and 1.2.
    along = torch.diag(u.T @ found @ vt.T)
    assert s.max() / s.min() > 3
    assert along.min() > 0.65 and along.max() < 1.25
    torch.testing.assert_close(u @ torch.diag(along) @ vt, found, atol=1e-5, rtol=0)
    torch.testing.assert_close(orthogonalised(matrix.T, 5), found.T, atol=0, rtol=0)


def test_a_square_matrix_has_the_bits_that_recorded_runs_have() -> None:
    found = orthogonalised(torch.from_numpy(noise(3, "m", (30, 30))), 5)
    # Pinned; of the transposed matrix other bits are rounded.
    assert (
        exact.fingerprint_of("m", found.float().contiguous(), Part.whole((30, 30)))
        == 12848399212213847567
    )


def test_muon_of_nothing_is_nothing_and_what_is_no_matrix_gains_the_plain_sum() -> None:
    assert not orthogonalised(torch.zeros(3, 4), 5).any()
    space = FullRank()([ParameterInfo("norm", (7,), "other")])
    centre = Centre({"norm": torch.ones(7)}, space)
    centre.apply(MUON)
    plain = Centre({"norm": torch.ones(7)}, space)
    plain.apply(Step(TERMS))
    assert torch.equal(centre.weights["norm"], plain.weights["norm"])


def test_offsets_set_the_centre_and_a_genome() -> None:
    space = SPACES[0]
    expected = {
        "a.weight": BASE["a.weight"] + torch.from_numpy(OFFSETS.array[:1200].copy()).view(40, 30),
        "b.weight": BASE["b.weight"] + torch.from_numpy(OFFSETS.array[1200:].copy()).view(25, 60),
    }
    weights = applied(space, STEPS[0], Step(rule=OffsetsRule(OFFSETS, 0.5)))
    centre = Centre(BASE, space)
    centre.apply(STEPS[0])
    for name in SHAPES:
        assert torch.equal(weights[name], expected[name])
        assert torch.equal(centre.perturbed(Genome(offsets=OFFSETS), name), expected[name])
    nothing = torch.zeros(0, 2)
    exact.set_to_offsets_(nothing, nothing, OFFSETS, 5, Part((0, 0), (0, 2), 4))
    with pytest.raises(ValueError, match="1 offsets do not reach element 1199"):
        centre.perturbed(Genome(offsets=Offsets.of(np.zeros(1))), "a.weight")


def test_known_steps() -> None:
    # Pinned: a recorded history must give these bits on every machine and in every version.
    assert tuple(Centre(BASE, space).restore(STEPS) for space in SPACES) == PINNED
    assert tuple(Centre(BASE, space).restore((*STEPS, MUON)) for space in SPACES) == PINNED_MUON


@pytest.mark.parametrize("space", SPACES)
def test_adam_has_the_bits_that_ieee_754_wants(space: SearchSpace) -> None:
    # MKL's square root of float32, which torch takes on Intel's and AMD's CPUs, is off by a bit now
    # and then, on each of them elsewhere: the same history gave other weights.
    weights = applied(space, Step(TERMS, rule=ADAM))
    for name in SHAPES:
        old, new = (gradient(space, name, terms).numpy() for terms in (TERMS[:2], TERMS[2:]))
        f = np.float32
        m = f(0.2) * old + f(0.5) * new
        v = f(0.1) * np.square(old) + f(0.7) * np.square(new)
        change = m / (np.sqrt(v) + f(1e-8)) * f(0.01)
        assert np.array_equal(weights[name].numpy(), BASE[name].numpy() + change)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("last", [Step(), Step(rule=OffsetsRule(OFFSETS, 0.5))])
def test_replays_threads_and_parts_give_the_same_bits(space: SearchSpace, last: Step) -> None:
    steps = (*STEPS, MUON, last)
    one = Centre(BASE, space, num_threads=1)
    fingerprints = [one.apply(step) for step in steps]
    assert Centre(BASE, space, num_threads=2).restore(steps) == fingerprints[-1]
    merged = merge_steps(steps)
    for name in SHAPES:
        alone = moved(name, BASE[name], space, merged)
        assert torch.equal(alone, one.weights[name])
    parts = {
        "a.weight": [Part((0, 11), (0, 30), 30), Part((11, 40), (0, 30), 30)],
        "b.weight": [Part((0, 25), (0, 13), 60), Part((0, 25), (13, 60), 60)],
    }

    def of(rank: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = {name: parts[name][rank] for name in SHAPES}
        return {n: weights[n][slice(*p.rows), slice(*p.columns)] for n, p in own.items()}

    ranks = [
        Centre(of(rank, BASE), space, 1, {name: parts[name][rank] for name in SHAPES})
        for rank in range(2)
    ]
    assert [sum(rank.apply(step) for rank in ranks) % 2**64 for step in steps] == fingerprints
    begun = Centre(BASE, space)
    begun.restore(steps[:2])
    for taken, start in ((steps, None), (steps[2:], begun.weights)):
        found = sum(rank.restore(taken, start) for rank in ranks)
        assert found % 2**64 == fingerprints[-1]
        for number, rank in enumerate(ranks):
            expected = of(number, one.weights)
            assert all(torch.equal(rank.weights[name], expected[name]) for name in SHAPES)


def test_merging_steps_keeps_rules_in_their_places() -> None:
    merged = merge_steps([Step(TERMS[:1]), Step(TERMS[1:2]), *STEPS[1:]])
    assert merged == [Step(TERMS[:2]), *STEPS[1:]]
    assert merge_steps([Step(), Step()]) == []
    assert merge_steps([Step(decay=0.5), Step(TERMS)]) == [Step(TERMS, decay=0.5)]
    assert merge_steps([*STEPS, Step(TERMS, decay=1.0)]) == [Step(TERMS, decay=1.0)]

"""The table of quantiles: what it holds, and why it is the same on every machine."""

import numpy as np
import pytest

from es_cookbook.evolution.noise import philox


def test_the_table_is_antisymmetric_ascending_and_of_unit_variance() -> None:
    table = philox.normal_table().astype(np.float64)
    assert table.shape == (65536,)
    np.testing.assert_array_equal(table, -table[::-1])
    assert np.all(np.diff(table) > 0)
    assert np.mean(table**2) == pytest.approx(1, abs=1e-8)
    assert table[-1] == pytest.approx(4.324963, abs=1e-6)


def test_the_table_is_the_normal_distributions_to_its_fourth_moment() -> None:
    # Sixteen bits cut the tails at 4.32, which costs the fourth moment (3) a little.
    assert np.mean(philox.normal_table().astype(np.float64) ** 4) == pytest.approx(3, abs=0.01)


def test_no_quantile_is_near_a_float32_rounding_boundary() -> None:
    # So a libm that is off by a few units in the last place of float64 gives the same table.
    exact = philox.normal_quantiles()
    rounded = exact.astype(np.float32)
    wide = rounded.astype(np.float64)
    above = (wide + np.nextafter(rounded, np.float32(np.inf)).astype(np.float64)) / 2
    below = (wide + np.nextafter(rounded, np.float32(0)).astype(np.float64)) / 2
    distance = np.minimum(abs(exact - above), abs(exact - below)) / np.spacing(exact)
    assert distance.min() > 5000


def test_a_machine_that_computes_another_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    off = philox.normal_quantiles()
    off[100] *= 1 + 1e-6
    monkeypatch.setattr(philox, "normal_quantiles", lambda: off)
    with pytest.raises(RuntimeError, match="checksum"):
        philox.normal_table.__wrapped__()


def test_the_table_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        philox.normal_table()[0] = 0

"""A part of a parameter: where its elements are in the whole."""

import pytest

from es_cookbook.evolution.noise.part import Part


def test_places_in_the_whole() -> None:
    part = Part((1, 3), (2, 4), width=5)
    assert (part.shape, part.num_elements) == ((2, 2), 4)
    assert [*part.spans()] == [range(7, 9), range(12, 14)]
    assert [*Part((1, 3), (0, 5), 5).spans()] == [range(5, 15)]
    assert Part.whole((4, 2, 3)) == Part((0, 4), (0, 6), 6)
    assert Part.whole(()).num_elements == 1


@pytest.mark.parametrize(
    ("rows", "columns"), [((2, 1), (0, 5)), ((-1, 1), (0, 5)), ((0, 1), (3, 2)), ((0, 1), (0, 6))]
)
def test_a_part_is_within_the_whole(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="part"):
        Part(rows, columns, width=5)

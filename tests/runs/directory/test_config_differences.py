"""What differs between two Configs is told by field, the outermost that explains it."""

import json

import pytest

from es_cookbook.runs.directory.opening import differences, flattened

OLD = {"$class": "a:Config", "sigma": 0.5, "engine": {"$class": "a:Torch", "n": 2}, "tags": ["x"]}


@pytest.mark.parametrize(
    ("now", "may_differ", "said"),
    [
        (OLD, [], []),
        ({**OLD, "sigma": 1.0}, [], ["sigma was 0.5, is 1.0"]),
        ({**OLD, "sigma": 1.0}, ["sigma"], []),
        ({**OLD, "sigma": 1.0}, ["sig"], ["sigma was 0.5, is 1.0"]),
        ({**OLD, "engine": {"$class": "a:Torch", "n": 3}}, ["engine"], []),
        (
            {**OLD, "engine": {"$class": "a:VLLM", "slots": 3}},
            [],
            ['engine was "a:Torch", is "a:VLLM"'],
        ),
        ({**OLD, "tags": []}, [], ["tags was not there, is []"]),
        ({**OLD, "tags": ["y" * 999]}, [], [f'tags[0] was "x", is "{"y" * 299} ...']),
        ({**OLD, "x\n": 1}, [], [r"x\n was not there, is 1"]),
        ({**OLD, "$class": "a:Other", "sigma": 2}, [], ['Config was "a:Config", is "a:Other"']),
    ],
)
def test_fields_that_differ_are_told(now: object, may_differ: list[str], said: list[str]) -> None:
    assert differences(json.dumps(OLD), json.dumps(now), may_differ) == said


def test_names_of_fields_are_measured_before_they_are_made() -> None:
    """A config of 0.7 MB, a long name above many values, took all memory."""
    with pytest.raises(ValueError, match="longer names of fields"):
        flattened({"k" * 100_000: [0] * 300_000})

"""Results of programs: parsing, limits and errors."""

import json
import tracemalloc

import pytest

from es_cookbook.common.errors import EnvError
from es_cookbook.plugins.program.results import MOST_BYTES, graded_result, read_result
from es_cookbook.rl.data.rows import Row

LINE_ENDS = "\u2028\u2029\x85\x1c\x1d\x1e\x0b\x0c\r"
"""At which `str.splitlines` ends a line, and a file of JSON lines does not."""
ROW = Row("rows.jsonl, line 1", {"answer": 3})


@pytest.mark.parametrize("end", LINE_ENDS)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_unusual_line_separators_do_not_end_a_result(end: str, is_ascii: bool) -> None:
    result = {"answer": f"first{end}second", f"a{end}b": [end]}
    line = json.dumps(result, ensure_ascii=is_ascii)
    assert read_result(f"working\n{line}\r\n".encode()) == result


@pytest.mark.parametrize("before", ["", "\r", "99 %\r", "1 %\r2 %\r\r", "{1}\r", "é\r \t"])
@pytest.mark.parametrize("after", ["", "\n", "\r", "\r\n", " \rdone\n"])
def test_a_carriage_return_ends_a_line(before: str, after: str) -> None:
    written = f'{before}{{"reward": 1}}{after}'
    assert read_result(written.encode()) == {"reward": 1}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"answer": "a"}\n{"answer": "b"}\n', "more than one result"),
        (' {"reward": 1} {"reward": 1}', "more than one result"),
        ('{"reward": 1} at last', "no result"),
        ('[{"reward": 1}]', "no result"),
        ("1", "no result"),
        ("", "no result"),
        ('{"a": ' * 999, "no result"),
    ],
)
def test_output_must_have_one_line_that_is_an_object(written: str, said: str) -> None:
    with pytest.raises(EnvError, match=f"printed {said}"):
        read_result(written.encode())


FLOODS = {
    "lists": ('{"reward": 1, "a": [' + "[]," * MOST_BYTES)[: MOST_BYTES - 4] + "0]}",
    "lines of objects": ("{}\n" * MOST_BYTES)[:MOST_BYTES],
    "lines of nearly objects": ("{\n" * MOST_BYTES)[:MOST_BYTES],
    "nearly objects after carriage returns": ("\r{" * MOST_BYTES)[:MOST_BYTES],
    "nested lists": ('{"a":' + "[" * MOST_BYTES)[:MOST_BYTES],
}


@pytest.mark.daily
@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_of_values_or_lines_takes_little_memory(flood: str) -> None:
    written = flood.encode()
    tracemalloc.start()
    try:
        with pytest.raises(EnvError):
            read_result(written)
        assert tracemalloc.get_traced_memory()[1] < 64 * MOST_BYTES
    finally:
        tracemalloc.stop()


NAMES = "a result may have 100 metrics, with names of 100 characters"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"reward": 1e999}', "must return a finite number"),
        ('{"reward": NaN}', "must return a finite number"),
        ('{"reward": 1%s}' % ("0" * 400), "must return a finite number"),
        ('{"reward": "1"}', "must return a finite number"),
        ('{"answer": 1}', "the result has no `reward`, and"),
        ('{"reward": 1, "metrics": {"x": "y"}}', "must return"),
        ('{"reward": 1, "metrics": {"x": Infinity}}', "must return"),
        ('{"reward": 1, "metrics": null}', "must return"),
        ('{"reward": 1, "metrics": {"%s": 0}}' % ("x" * 500_000), NAMES),
        (json.dumps({"reward": 1, "metrics": {str(n): n for n in range(50_000)}}), NAMES),
        ('{"reward": 1, "metrics": {"\\ud800": 0}}', "half a character"),
        ('{"reward": 1, "answer": "\\udc00"}', "half a character"),
    ],
    ids=lambda text: text[:40],
)
async def test_invalid_rewards_and_metrics_are_refused(written: str, said: str) -> None:
    with pytest.raises(EnvError, match=said) as refused:
        await graded_result(None, read_result(written.encode()), ROW)
    assert len(str(refused.value)) < 3000

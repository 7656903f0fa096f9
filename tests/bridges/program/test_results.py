"""The result of a program, whichever characters its texts hold."""

import json

import pytest

from es_cookbook.bridges.program.results import read_result
from es_cookbook.common.errors import EnvError

LINE_ENDS = "\u2028\u2029\x85\x1c\x1d\x1e\x0b\x0c\r"
"""At which `str.splitlines` ends a line, and a file of JSON lines does not."""


@pytest.mark.parametrize("end", LINE_ENDS)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_result_is_one_line_whatever_its_answer_holds(end: str, is_ascii: bool) -> None:
    result = {"answer": f"first{end}second", f"a{end}b": [end]}
    line = json.dumps(result, ensure_ascii=is_ascii)
    assert read_result(f"working\n{line}\r\n".encode(), b"", "json") == result


def test_two_lines_are_two_results() -> None:
    with pytest.raises(EnvError, match="printed 2 results"):
        read_result(b'{"answer": "a"}\n{"answer": "b"}\n', b"", "json")

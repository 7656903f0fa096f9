"""Of a traceback is shown what is of the user's own files, and not a thousand lines."""

import traceback

from es_cookbook.rl.problem_env import own_frames


def trace_of(code: str) -> str:
    try:
        exec(compile(code, "/home/me/reward.py", "exec"), {})
    except (RecursionError, ValueError):
        return traceback.format_exc()
    raise AssertionError


def test_endless_recursion_shows_its_beginning_and_its_end() -> None:
    trace = trace_of("def f(n): g(n)\ndef g(n): f(n)\nf(1)")
    assert trace.count("File") > 900
    lines = own_frames(trace).splitlines()
    (middle,) = (n for n, line in enumerate(lines) if line.strip() == "...")
    ends = "\n".join(lines[:middle]), "\n".join(lines[middle + 1 :])
    assert [end.count("/home/me/reward.py") for end in ends] == [6, 6]
    assert "in <module>" in ends[0] and "in <module>" not in ends[1]


def test_a_short_traceback_is_shown_whole() -> None:
    shown = own_frames(trace_of("def f(n): int('x') if n == 0 else f(n - 1)\nf(0)"))
    assert shown.count('File "/home/me/reward.py"') == 2 and "..." not in shown

"""What other processes print is kept from the user, and says why they failed."""

import os
import subprocess
import sys

import pytest

from es_cookbook.engines.vllm.output import Output

SEE_ABOVE = RuntimeError("EngineCore encountered an issue. See stack trace (above) for the cause.")
RANK_THEN_CORE = """(Worker_TP1 pid=7) ERROR 11-22 11:38:20 [executor.py:5] a rank has failed
(Worker_TP1 pid=7) ERROR 11-22 11:38:20 [executor.py:5] Traceback (most recent call last):
(Worker_TP1 pid=7) ERROR 11-22 11:38:20 [executor.py:5]   File "kernel.py", line 3, in launch
(Worker_TP1 pid=7) ERROR 11-22 11:38:20 [executor.py:5]     compute_type = tl.float32
(Worker_TP1 pid=7) ERROR 11-22 11:38:20 [executor.py:5]                    ^^^^^^^^^^
(Worker_TP1 pid=7) ERROR 11-22 11:38:20 [executor.py:5] AttributeError: no float32
(EngineCore pid=6) ERROR 11-22 11:38:21 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=6) ERROR 11-22 11:38:21 [core.py:1512] RuntimeError: a worker failed
"""


@pytest.fixture(autouse=True)
def no_level_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)


def start(program: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)


def printed(output: Output, text: str) -> None:
    with output.kept():
        assert start(f"print({text!r})").wait() == 0


def test_a_process_started_inside_prints_into_the_file_for_good_and_others_do_not(
    capfd: pytest.CaptureFixture[str],
) -> None:
    output = Output()
    with output.kept():
        process = start("input()")
        os.write(1, b"a library\n")
    process.communicate()  # Closes its input, at which it fails.
    print("the user's")
    failure = output.failure("vLLM failed", SEE_ABOVE)
    output.close()
    assert str(failure).startswith("vLLM failed: EOFError")
    (note,) = failure.__notes__
    assert "a library\n" in note and "Traceback" in note
    assert capfd.readouterr() == ("the user's\n", "")


def test_the_cause_is_the_last_line_of_the_first_traceback() -> None:
    output = Output()
    printed(output, RANK_THEN_CORE)
    failure = output.failure("vLLM failed", SEE_ABOVE)
    assert str(failure) == "vLLM failed: AttributeError: no float32"
    assert "\nAttributeError: no float32\nTraceback" in failure.__notes__[0], "without prefixes"


def test_output_of_a_successful_start_is_not_a_cause() -> None:
    output = Output()
    printed(output, RANK_THEN_CORE)
    output.started()
    failure = output.failure("vLLM failed", SEE_ABOVE)
    assert str(failure) == (
        "vLLM failed: its process ended without a word, perhaps killed for its memory"
    )
    assert str(output.failure("vLLM failed", KeyError("slot"))) == "vLLM failed: 'slot'"
    printed(output, RANK_THEN_CORE.replace("no float32", "no float64"))
    assert str(output.failure("vLLM failed", SEE_ABOVE)).endswith("AttributeError: no float64")

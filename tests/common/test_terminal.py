"""Nothing that a model writes can command a terminal or break a line-by-line protocol."""

import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.common.terminal import GIB, one_line, printable, show_bytes

TEXTS = st.text(st.characters(exclude_categories=()))  # Surrogates and control characters too.


def test_printable_keeps_words_of_every_language() -> None:
    assert printable("naïve 日本語 😀\nσ = ½") == "naïve 日本語 😀\nσ = ½"
    assert printable("\ud800\x00") == r"\ud800\x00"


def test_escape_sequences_overrides_and_line_ends_are_written_out() -> None:
    assert printable("\x1b]0;title\x07\x9b2J\r\u202e\u2028") == (
        r"\x1b]0;title\x07\x9b2J\r\u202e\u2028"
    )


@given(TEXTS)
def test_every_text_becomes_one_line_that_can_be_undone(text: str) -> None:
    line = one_line(text)
    assert line.splitlines() == ([line] if text else [])
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in line + printable(text) if c != "\n")
    assert line.encode("latin-1", "backslashreplace").decode("unicode_escape") == text


def test_a_size_has_the_largest_unit_that_leaves_a_whole_part() -> None:
    sizes = [0, 1023, 1536, 3 << 20, 5000 * GIB]
    assert [*map(show_bytes, sizes)] == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5,000.00 GiB"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_interrupted_while_it_is_imported_ends_at_once(number: int) -> None:
    program = (
        "import os, sys, time; from es_cookbook import cli\n"
        f"cli.command_of = lambda _: (os.kill(os.getpid(), {number}), time.sleep(20))\n"
        "sys.argv[1:] = ['show']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "interrupted; nothing has changed: run the same command again\n"

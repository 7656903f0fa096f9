"""Input and output of the terminal: what was typed, messages on stderr, and printable text.

Text from a model, an Env or a file could hold escape sequences that recolour a terminal or rewrite
earlier lines. So only printable characters are shown, and newlines where the reader expects them.

Imports nothing heavy, because `es-cookbook` without a command prints its list at once.

A thread inside a long call (a forward pass, a library that loads a model, a compiler) cannot be
interrupted, and Python waits for it before it exits. After an interruption its result is not needed
any more, and what it writes has a temporary name (`common.files`). So `leave` ends the process
without it.
"""

import contextlib
import functools
import os
import shlex
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Generator, Iterable, Sequence
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

BEGAN = time.monotonic()
"""When this process began, approximately: commands import this module early."""
GIB = 1 << 30
INTERRUPTED = 130
"""The exit code after Ctrl-C or SIGTERM."""
interrupted = threading.Event()
"""Set by the first signal to a command, until the next command begins."""


def program() -> str:
    """Return the command as typed, without options: `es-cookbook fork`, `script.py`.

    `es_cookbook.__main__` puts its command behind the script's name, with a space between them.
    """
    script, space, command = Path(sys.argv[0]).name.partition(" ")
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        script = f"python -m {spec.name.removesuffix('.__main__')}"
    return script + space + command


def command(name: str, **options: object) -> str:
    """Return the call of another command, for messages that say what to do next.

    >>> command("resume", log_path="my runs/a", num_generations=9).partition(" resume ")[2]
    "log_path='my runs/a' num_generations=9"
    """
    caller = program().partition(" ")[0]
    given = "".join(f" {name}={shlex.quote(str(value))}" for name, value in options.items())
    return f"{caller if caller == 'es-cookbook' else 'python -m es_cookbook'} {name}{given}"


_screen: TextIO | None = None


@contextlib.contextmanager
def as_program() -> Generator[None]:
    """Make `say` print inside: this process is a command that was started in a terminal."""
    global _screen
    before, _screen = _screen, screen()
    say_once.cache_clear()
    try:
        yield
    finally:
        _screen = before


def is_program() -> bool:
    """Return whether this is inside `as_program`; False in a script that uses the package."""
    return _screen is not None


def screen() -> TextIO:
    """Return stderr as the user sees it, also if it is redirected inside `as_program`."""
    return _screen or sys.stderr


def say(sentence: str) -> None:
    """Print a line on stderr, at once: what the command does now.

    Called before work that takes seconds. Does nothing outside `as_program`.
    """
    if is_program():
        with contextlib.suppress(OSError, ValueError):  # Closed; the command goes on.
            line = printable(sentence).replace("\n", r"\n")
            print(f"{line}\n", end="", file=screen(), flush=True)  # Whole, from any thread.


@functools.cache
def say_once(sentence: str) -> None:
    """Print a line as `say` does, but only once per command."""
    say(sentence)


@contextlib.contextmanager
def handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], Any]
) -> Generator[None]:
    """Handle these signals by this handler inside; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


def leave(code: int) -> None:
    """End this process without waiting for its threads; its output is flushed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def until_stdout_closes() -> Generator[None]:
    """End the program quietly if its stdout is closed inside, as by `... --help | head -1`.

    Raises:
        SystemExit: With the shell's code for a closed pipe, 141.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Not every terminal has all characters.
    try:
        yield
        with contextlib.suppress(AttributeError, ValueError):  # A reward, say, has closed it.
            sys.stdout.flush()
    except BrokenPipeError:
        # Pending output is discarded, so that Python can end without complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def is_utf8(text: str) -> bool:
    """Return whether a text has no surrogates, which stand for undecodable bytes of names."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def printable(text: str) -> str:
    r"""Escape control characters, so that a terminal shows and never obeys them.

    >>> printable("\x1b[31mred\n")
    '\\x1b[31mred\n'
    """
    return "".join(c if c == "\n" else _visible(c) for c in text)


def one_line(text: str) -> str:
    r"""Escape newlines and backslashes too, so that the text is one line and reversible.

    >>> one_line("a\\b\n")
    'a\\\\b\\n'
    >>> one_line("ä\n→").encode("latin-1", "backslashreplace").decode("unicode_escape")
    'ä\n→'
    """
    return "".join(r"\\" if c == "\\" else _visible(c) for c in text)


def _visible(character: str) -> str:
    is_visible = character.isprintable() or unicodedata.category(character) == "Zs"  # Spaces.
    return character if is_visible else character.encode("unicode_escape").decode()


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown.

    >>> print(markdown(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def cut(text: str, limit: int) -> str:
    """Return the beginning of a longer text, with the number of missing characters.

    >>> cut("abcdef", 4)
    'abcd [2 more characters]'
    """
    if len(text) <= limit:
        return text
    return f"{text[:limit]} [{len(text) - limit} more characters]"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "generation"), plural(0, "step"), plural(2, "GPU")
    ('1 generation', '0 steps', '2 GPUs')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def show_bytes(number: float) -> str:
    """Return a size in the largest unit that fits: 1.5 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.{0 if unit == 'B' else 1}f} {unit}"
        number /= 1024
    return f"{number:,.2f} GiB"

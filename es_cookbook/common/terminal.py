"""This process as the person at the terminal sees it: what they typed, read and answer.

Imports nothing heavy: `es-cookbook` alone lists its commands at once.
"""

import contextlib
import os
import select
import sys
from collections.abc import Generator, Sequence
from pathlib import Path


def program() -> str:
    """What was typed before the options: `es-cookbook fork`, `python -m some.module`, `script.py`.

    `es_cookbook.__main__` puts its command behind the script's name, with a space between them.
    """
    script, space, command = Path(sys.argv[0]).name.partition(" ")
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        script = f"python -m {spec.name.removesuffix('.__main__')}"
    return script + space + command


def command(name: str) -> str:
    """How another command is called, for sentences that say what to do next."""
    caller = program().partition(" ")[0]
    return f"{caller if caller == 'es-cookbook' else 'python -m es_cookbook'} {name}"


@contextlib.contextmanager
def until_stdout_closes() -> Generator[None]:
    """Inside, it is an ordinary end that nobody reads stdout any more: `... --help | head -1`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not poll.poll(0):  # Another pipe than stdout is broken.
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def choose(question: str, answers: Sequence[str], at_end: str) -> str:
    """Ask until the answer is one of these, of which the first letter is enough.

    Where the input ends, the answer is `at_end`.
    """
    print(question)
    prompt = ", ".join(f"[{word[0]}]{word[1:]}" for word in answers) + "? "
    by_letter = {word[0]: word for word in answers}
    while True:
        try:
            letter = input(prompt).strip().lower()[:1]
        except EOFError:
            return at_end
        if letter in by_letter:
            return by_letter[letter]

"""Commands in this process, and what one says on stderr, apart from what it does."""

import contextlib
import io
import re
import subprocess
from unittest import mock

from es_cookbook.__main__ import main as es_cookbook

SMALL_COUNTDOWN = (
    *("num_generations=2", "optimizer.population_size=4", "dataset.problems_per_generation=2"),
    *("dataset.num_train=8", "dataset.num_test=4"),
)
"""Options of a short run of the recipe countdown."""
SMALL_ROWS = (
    *("batch=2", "num_generations=2", "optimizer.population_size=4", "optimizer.sigma=0.01"),
    *("optimizer.learning_rate=0.02", "dataset.num_test=4"),
)
"""Options of a short run of `train`."""
_DOES = (
    r".*: comparing .* with the base that it began with",
    r".*: loading .* on \w+",
    r"starting vLLM, .*",
    r"checking [\d,]+ training problems",
    r"evaluating [\d,]+ held-out problems (before|after) .*",
    r"rebuilding the centre after \d+ generations",
    r".*: rebuilding its centre for .*",
    r"reading .*",
    r"evaluating .* on [\d,]+ problems?",
    r"pushing .* to .*",
)
_LASTS = (
    r"compiling the kernels for this processor, .*",
    r"a core of this processor multiplies .*",
    r"  … \d+ s",
    r"before generation \d+: .*",
)
"""What a slow machine, or one that runs it for the first time, says between them."""


def whole_lines(said: str) -> list[str]:
    """Return the lines of a text without those that report durations."""
    return [line for line in said.splitlines() if not re.fullmatch("|".join(_LASTS), line)]


def after_start(said: str) -> str:
    """Return what follows the lines with which a command starts."""
    lines = said.split("\n")
    while re.fullmatch("|".join((*_DOES, *_LASTS)), lines[0]):
        del lines[0]
    return "\n".join(lines)


def typed(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `es-cookbook` with these arguments and this text on stdin."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch("sys.argv", ["es-cookbook", *words]),
        mock.patch("sys.stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            es_cookbook()
        except SystemExit as stopped:
            code = int(str(stopped.code))
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def told(*words: str) -> str:
    """Return what a command prints on stdout and stderr."""
    done = typed(*words)
    return done.stdout + done.stderr


def refused(*words: str) -> str:
    """Return the one sentence in which a command refuses its arguments; it prints nothing else."""
    done = typed(*words)
    said = after_start(done.stderr)
    assert done.returncode in (1, 2) and not done.stdout and said.count("\n") == 1, done
    return said

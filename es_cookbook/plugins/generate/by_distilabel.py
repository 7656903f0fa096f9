"""Answers by way of a distilabel pipeline, which runs in processes of its own and reports to here.

distilabel takes the logging of its process over, and waits for ever for a process of its own that
died. So the pipeline (`distilabel_pipeline.py`) is a process in a session of its own, which is
killed as a whole as soon as every answer came, or this process leaves for any reason. Its step
sends each outcome over a socket when it is there, not when the batch is done; the socket's end says
that the step is gone.

What is asked, how, and how often are the plain way's (`generate.py`), so both ways keep the same
answers of the same replies.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from es_cookbook.common.errors import ServerError, WorkerError, not_installed
from es_cookbook.common.machine.scratch import scratch
from es_cookbook.common.terminal import one_line, plural
from es_cookbook.plugins.judges.chat import Completion

Asked: TypeAlias = tuple[str, str, int | None]
"""A question: the key of its answer, the prompt, and the seed; None is the server's own."""
Outcome: TypeAlias = Completion | str
"""What came of a question: an answer, or why there is none."""
_PIPELINE = "es_cookbook.plugins.generate.distilabel_pipeline"
_PATIENCE = 0.5
"""Seconds between two looks whether the pipeline is still there."""


def check_distilabel() -> None:
    """Refuse before anything is asked.

    Raises:
        ConfigError: distilabel is not installed.
    """
    if find_spec("distilabel") is None:
        raise not_installed("via=distilabel", "distilabel", "es-cookbook[distilabel]")


def ask(
    options: Mapping[str, object], asked: Sequence[Asked], collect: Callable[[str, Outcome], None]
) -> None:
    """Ask, and hand on what came of each question, by its key, in the order in which it came.

    Raises:
        ServerError: The server will answer nothing.
        WorkerError: The pipeline ended before its questions did.
    """
    with (
        scratch() as directory,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(str(directory / "outcomes"))
        listener.listen(1)
        what = {"options": options, "asked": asked, "directory": str(directory)}
        (directory / "what.json").write_text(json.dumps(what), encoding="utf-8")
        left = {key for key, _, _ in asked}
        with _running(directory) as process:
            for line in _lines(listener, process):
                key, answer, lost, refused = json.loads(line)
                if refused is not None:
                    raise ServerError(refused)
                left.discard(key)
                collect(key, lost or Completion(*answer))
                if not left:
                    return
        said = (directory / "stderr").read_text(encoding="utf-8", errors="replace").strip()
        raise WorkerError(
            f"distilabel's pipeline ended with {plural(len(left), 'question')} left; it said last: "
            f"{one_line(said.rpartition(chr(10))[2]) or 'nothing'}"
        )


@contextlib.contextmanager
def _running(directory: Path) -> Generator[subprocess.Popen[bytes]]:
    """The pipeline's process; it and all that it started are gone afterwards."""
    own = {"HF_DATASETS_CACHE": str(directory / "datasets"), "DISTILABEL_LOG_LEVEL": "WARNING"}
    with (directory / "stderr").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", _PIPELINE, str(directory / "what.json")],
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lines(listener: socket.socket, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """What the step sends, until it or the pipeline is gone."""
    source, rest = listener, b""
    with contextlib.ExitStack() as stack:
        while True:
            if not select.select([source], [], [], _PATIENCE)[0]:
                if process.poll() is not None:
                    return
            elif source is listener:
                source = stack.enter_context(listener.accept()[0])
            elif received := source.recv(1 << 16):
                *lines, rest = (rest + received).split(b"\n")
                yield from lines
            else:
                return

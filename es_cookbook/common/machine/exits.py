"""The end of a process that was interrupted while its threads are busy.

A thread inside a long call (a forward pass, a library that loads a model, a compiler) cannot be
interrupted, and Python waits for it before it exits. After an interruption its result is not needed
any more, and what it writes has a temporary name (`common.files`). So the process exits without it.
"""

import contextlib
import os
import sys
import threading

from es_cookbook.common.files import remove_unfinished

INTERRUPTED = 130
"""The exit code after Ctrl-C or SIGTERM."""
interrupted = threading.Event()
"""Set by the first signal to a command, until the next command begins."""


def leave(code: int) -> None:
    """End this process without waiting for its threads; what was printed is written out."""
    remove_unfinished()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)

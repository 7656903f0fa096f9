"""A worker process: it reads calls from standard input, makes them in turn, and answers.

Run as a program by its path. It imports nothing but the standard library and what the functions
that it calls need, so it starts in some 20 ms. `es_cookbook.rl.grading.workers` is the other end.

A message is its length in eight bytes and a pickle. A worker is sent the parent's `sys.path` and
main program once, then calls. It answers each with the byte `STARTED` once function and arguments
are there, imports done, and with a message when the call is over. It ends with its input.
"""

import contextlib
import io
import os
import pickle
import struct
import sys
import traceback
from typing import BinaryIO

STARTED = b"S"
LENGTH = struct.Struct(">Q")


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer calls until there are no more."""
    main: tuple[str, str] | None
    sys.path[:], main = pickle.loads(_read(requests))
    while request := _read(requests):
        try:
            function, args = _Unpickler(io.BytesIO(request), main).load()
        except BaseException as error:
            answer = _failed(f"cannot be loaded in a worker process: {_shown(error)}", error)
            answers.write(STARTED)
        else:
            answers.write(STARTED)
            answers.flush()
            answer = _answer(function, args)
            del function, args
        answers.write(LENGTH.pack(len(answer)))
        answers.write(answer)
        answers.flush()


def _read(requests: BinaryIO) -> bytes:
    """Read the next message; empty at the end."""
    length = requests.read(LENGTH.size)
    return requests.read(*LENGTH.unpack(length)) if length else b""


def _answer(function: object, args: tuple[object, ...]) -> bytes:
    """Pickle of the result, "" and ""; or None, the error or a sentence, and its traceback."""
    try:
        result = function(*args)  # type: ignore[operator]
    except BaseException as error:
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                answer = pickle.dumps((None, error, _trace(error)), pickle.HIGHEST_PROTOCOL)
                pickle.loads(answer)  # Some exceptions go out and do not come in.
                return answer
        return _failed(f"raised {_shown(error)}", error)
    try:
        return pickle.dumps((result, "", ""), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        kind = type(result).__name__
        return _failed(
            f"returned a {kind}, which cannot be sent from a worker process: {_shown(error)}", error
        )


def _failed(what: str, error: BaseException) -> bytes:
    return pickle.dumps((None, what, _trace(error)), pickle.HIGHEST_PROTOCOL)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class _Unpickler(pickle.Unpickler):
    """Loads the parent's main program lazily, when something of it is needed."""

    def __init__(self, stream: io.BytesIO, main: tuple[str, str] | None) -> None:
        super().__init__(stream)
        self._main = main

    def find_class(self, module: str, name: str) -> object:
        if module == "__main__" and "__mp_main__" not in sys.modules:
            _load_main(self._main)
        return super().find_class(module, name)


def _load_main(main: tuple[str, str] | None) -> None:
    """Import the parent's main program as `__mp_main__`, the name that multiprocessing uses."""
    if main is None:
        raise ImportError(
            "it is defined in an interactive session or a notebook: put it into a module"
        )
    path, module_name = main
    with open(path, "rb") as file:
        if b"__main__" not in file.read():
            raise ImportError(
                f"it is defined in {path}, which would run as a whole when it is imported: put "
                "what runs there under if __name__ == '__main__', or the function into a module"
            )
    from multiprocessing import spawn

    spawn.prepare(
        {"init_main_from_name": module_name} if module_name else {"init_main_from_path": path}
    )


if __name__ == "__main__":
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as answers:
        # Functions print to stderr, and have nothing to read.
        os.dup2(2, 1)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        with contextlib.suppress(BrokenPipeError):
            serve(requests, answers)

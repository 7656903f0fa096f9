"""A worker process: it reads calls from a socket, makes them one after the other, and answers.

Run as a program by its path, with the socket's file descriptor. It imports nothing but the standard
library and what the functions that it calls need, so it starts in some 20 ms.
`es_cookbook.rl.grading.workers` is the other end.

A message is its length in eight bytes and a pickle. A worker is sent the parent's `sys.path` and
main program once, then calls. It answers each with the byte `STARTED` once function and arguments
are there, imports done, and with a message when the call is over. It ends when the other end
closes, or when no call has come for `SECONDS_IDLE`.
"""

import contextlib
import io
import os
import pickle
import socket
import struct
import sys
import traceback

STARTED = b"S"
SECONDS_IDLE = 300.0
LENGTH = struct.Struct(">Q")


def serve(connection: socket.socket) -> None:
    """Answer calls until the other end closes or is silent for long."""
    connection.settimeout(SECONDS_IDLE)
    stream = connection.makefile("rwb")
    main: tuple[str, str] | None
    sys.path[:], main = pickle.loads(_read(stream))
    while request := _read(stream):
        try:
            function, args = _Unpickler(io.BytesIO(request), main).load()
        except BaseException as error:
            answer = _failed(f"cannot be loaded in a worker process: {_shown(error)}", error)
            stream.write(STARTED)
        else:
            stream.write(STARTED)
            stream.flush()
            answer = _answer(function, args)
            del function, args
        stream.write(LENGTH.pack(len(answer)))
        stream.write(answer)
        stream.flush()


def _read(stream: io.BufferedRWPair) -> bytes:
    """The next message; empty at the end."""
    length = stream.read(LENGTH.size)
    return stream.read(*LENGTH.unpack(length)) if length else b""


def _answer(function: object, args: tuple[object, ...]) -> bytes:
    """("returned", result), ("raised", exception, traceback) or ("failed", sentence, traceback)."""
    try:
        result = function(*args)  # type: ignore[operator]
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        try:
            answer = pickle.dumps(("raised", error, trace), pickle.HIGHEST_PROTOCOL)
            pickle.loads(answer)  # Some exceptions go out and do not come in.
        except Exception:
            return _failed(f"raised {_shown(error)}", error)
        return answer
    except SystemExit as error:
        return _failed(f"called sys.exit({error.code!r}) in a worker process", error)
    except BaseException as error:
        return _failed(f"raised {_shown(error)} in a worker process", error)
    try:
        return pickle.dumps(("returned", result), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        kind = type(result).__name__
        return _failed(
            f"returned a {kind}, which cannot be sent from a worker process: {_shown(error)}", error
        )


def _failed(what: str, error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(error))
    return pickle.dumps(("failed", what, trace), pickle.HIGHEST_PROTOCOL)


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
    """Import the parent's main program under another name, as multiprocessing does."""
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
    from multiprocessing import spawn  # Takes as long as the rest of a worker's start.

    spawn.prepare(
        {"init_main_from_name": module_name} if module_name else {"init_main_from_path": path}
    )


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with (
        socket.socket(fileno=descriptor) as own,
        contextlib.suppress(ConnectionError, TimeoutError),
    ):
        serve(own)

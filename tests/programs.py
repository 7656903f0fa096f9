"""Programs in processes of their own that start in a moment: forks of one that has imported torch.

    python -m tests.programs DESCRIPTOR

is that one, and listens on an open socket. Whoever connects sends a line of JSON, what to start,
and is told the process id, and at the program's end the exit code; meanwhile a byte is a signal for
the program, which is killed if the other side is gone. What a program needs of es_cookbook it
imports itself.
"""

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
_PYTHON = """#!{python} -IS
import os, sys
if sys.argv[1] != "-m" or sys.argv[3:4] == ["hub"]:  # Which reads where the Hub is as it starts.
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import json, signal, socket
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
files = [f"/proc/{{os.getpid()}}/fd/{{number}}" for number in range(3)]
request = sys.argv[1:], files, os.getcwd(), dict(os.environ)
server.sendall(json.dumps(request).encode() + b"\\n")
with server.makefile() as lines:
    _, code = map(int, lines)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Programs:
    """Starts programs, one at a time: arguments as Python has them, a script's path or -m NAME.

    Attributes:
        python: a file that stands in for `sys.executable`, for programs that the package starts.
    """

    def __init__(self, directory: Path) -> None:
        self._address = str(directory / "socket")
        self.python = directory / "python"
        self.python.write_text(_PYTHON.format(python=sys.executable, address=self._address))
        self.python.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self._address)
            listening.listen()
            self._forker = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listening.fileno())],
                cwd=ROOT,
                stdin=subprocess.PIPE,  # It ends with this process.
                pass_fds=[listening.fileno()],
            )
        self._connection: socket.socket | None = None

    def start(
        self,
        arguments: Sequence[object],
        files: Sequence[object],
        cwd: Path = ROOT,
        environment: Mapping[str, str] = {},
    ) -> int:
        """Start one with stdin, stdout and stderr at these paths, in a session of its own.

        Returns:
            The process id.
        """
        if self._connection:  # Of a test that failed.
            self._kill_children()
            self._connection.close()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(self._address)
        self._replies = self._connection.makefile()
        texts = [list(map(str, each)) for each in (arguments, files)]
        request = [*texts, str(cwd), {**os.environ, **environment}]
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        return int(self._replies.readline())

    def exit_code(self) -> int:
        """Wait for the program to end."""
        assert self._connection
        code = int(self._replies.readline())
        self._connection.close()
        self._connection = None
        return code

    def run(
        self, *arguments: object, cwd: Path, stdin: str = "", environment: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
        os.pwrite(files[0], stdin.encode(), 0)
        self.start(arguments, list(map(path_of, files)), cwd, environment)
        code = self.exit_code()
        said: list[str] = []
        for file in files[1:]:
            said.append(os.pread(file, os.fstat(file).st_size, 0).decode())
        for file in files:
            os.close(file)
        return subprocess.CompletedProcess(list(map(str, arguments)), code, *said)

    def close(self) -> None:
        self._kill_children()
        self._forker.kill()
        self._forker.communicate()

    def _kill_children(self) -> None:
        for child in psutil.Process(self._forker.pid).children(recursive=True):
            child.kill()


def num_recorded(log_path: Path) -> int:
    """Return the number of generations in a run's history, whose first line is a header."""
    recorded = log_path / "history.jsonl"
    return recorded.read_bytes().count(b"\n") - 1 if recorded.exists() else 0


def path_of(file: int) -> str:
    """Return the path under which another process can open a descriptor of this one."""
    return f"/proc/{os.getpid()}/fd/{file}"


def become(
    opened: int,
    arguments: Sequence[str],
    files: Sequence[str],
    cwd: str,
    environment: Mapping[str, str],
) -> None:
    """Run the program in a fork; closes `opened` once its files are open."""
    os.setsid()
    for number, path in enumerate(files):
        way = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
        os.dup2(os.open(path, way), number)
    os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    more = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path += [path for path in more if path and path not in sys.path]
    sys.stdin = open(0, encoding=encoding, closefd=False)  # noqa: SIM115
    lines = 1 if os.isatty(1) else -1
    sys.stdout = open(1, "w", lines, encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding, "backslashreplace", closefd=False)  # noqa: SIM115
    if arguments[0] == "-m":
        sys.path[0], sys.argv = cwd, list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        script = os.path.abspath(arguments[0])
        sys.path[0], sys.argv = os.path.dirname(script), list(arguments)
        runpy.run_path(script, run_name="__main__")


def attend(connection: socket.socket) -> None:
    """Fork the program that is asked for, and wait for its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(connection.makefile().readline())
    reading, opened = os.pipe()
    if not (pid := os.fork()):
        connection.close()
        become(opened, *request)
        sys.exit()
    os.close(opened)
    os.read(reading, 1)
    connection.sendall(f"{pid}\n".encode())
    ended = os.pidfd_open(pid)
    while ended not in select.select([ended, connection], [], [])[0]:
        number = connection.recv(1)
        os.kill(pid, number[0] if number else signal.SIGKILL)
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def serve(listening: socket.socket) -> None:
    """Fork the programs that are asked for, until the standard input ends."""
    import numba  # noqa: F401
    from peft import PeftModel  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for those who attend.
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        if not os.fork():
            listening.close()
            attend(connection)
        connection.close()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

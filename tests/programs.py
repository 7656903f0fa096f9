"""Programs in processes of their own that start in a moment: forks of one that has imported torch.

    python -m tests.programs

is that one. It forks a program for every line of JSON that it reads, prints the process id, and at
the program's end the exit code. What a program needs of es_cookbook it imports itself.
"""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


class Programs:
    """Starts programs, one at a time: arguments as Python has them, a script's path or -m NAME."""

    def __init__(self) -> None:
        self._forker = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._is_running = False

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
        assert self._forker.stdin and self._forker.stdout
        if self._is_running:  # By a test that failed.
            self._kill_children()
            self.exit_code()
        texts = [list(map(str, each)) for each in (arguments, files)]
        request = [*texts, str(cwd), {**os.environ, **environment}]
        self._forker.stdin.write(json.dumps(request) + "\n")
        self._forker.stdin.flush()
        self._is_running = True
        return int(self._forker.stdout.readline())

    def exit_code(self) -> int:
        """Wait for its end."""
        assert self._forker.stdout
        self._is_running = False
        return int(self._forker.stdout.readline())

    def run(
        self,
        *arguments: object,
        cwd: Path,
        stdin: str = "",
        environment: Mapping[str, str] = {},
    ) -> subprocess.CompletedProcess[str]:
        """Run one to its end."""
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


def path_of(file: int) -> str:
    """Under which another process opens what is open here."""
    return f"/proc/{os.getpid()}/fd/{file}"


def become(
    opened: int,
    arguments: Sequence[str],
    files: Sequence[str],
    cwd: str,
    environment: Mapping[str, str],
) -> None:
    """The program, in a fork; closes `opened` when it has its files."""
    os.setsid()
    for number, path in enumerate(files):
        way = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
        os.dup2(os.open(path, way), number)
    os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
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


def serve() -> None:
    """Fork the programs that are asked for."""
    import numba  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

    for line in sys.stdin:
        reading, opened = os.pipe()
        if not (pid := os.fork()):
            become(opened, *json.loads(line))
            sys.exit()
        os.close(opened)
        os.read(reading, 1)
        os.close(reading)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()

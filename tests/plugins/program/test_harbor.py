"""Trials of Harbor, with its own agent and verifier, as rollouts: recipes/harbor.sh."""

import json
import re
import shutil
from pathlib import Path

import pytest

from es_cookbook.plugins.program.env import ProgramProblem
from tests.plugins.program.test_env import only, problem, reason, run

NEEDED = "harbor", "jq", "tmux", "bwrap"
MISSING = [name for name in NEEDED if shutil.which(name) is None]
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.xdist_group("programs"),
    pytest.mark.skipif(bool(MISSING), reason=f"not on PATH: {', '.join(MISSING)}"),
]

RECIPE = Path(__file__).parents[3] / "recipes" / "harbor.sh"
WITHOUT_A_CONTAINER = '''
import asyncio, os, shutil, subprocess, tempfile
from pathlib import Path
from harbor.environments.base import BaseEnvironment, ExecResult

HERE = "--ro-bind /usr /usr --ro-bind /etc /etc --proc /proc --dev /dev --symlink usr/bin /bin"
HERE += " --symlink usr/lib /lib --symlink usr/lib64 /lib64"

class Here(BaseEnvironment):
    """This machine's programs and folders of its own, where a task's Dockerfile needs no more."""

    @staticmethod
    def type():
        return "here"

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        self.root = Path(tempfile.mkdtemp(prefix="harbor-"))
        for name in ("app", "logs", "root", "solution", "tests", "tmp"):
            (self.root / name).mkdir()
        await self.ensure_dirs(self._mount_targets())

    async def stop(self, delete):
        shutil.rmtree(self.root, ignore_errors=True)

    def _at(self, path):
        return self.root / str(path).lstrip("/")

    async def upload_file(self, source_path, target_path):
        shutil.copy(source_path, self._at(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._at(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self._at(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._at(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        own = [word for it in self.root.iterdir() for word in ("--bind", str(it), f"/{it.name}")]
        process = await asyncio.create_subprocess_exec(
            "bwrap", *HERE.split(), *own, "--chdir", cwd or "/app", "bash", "-c", command,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "HOME": "/root", **(self._merge_env(env) or {})},
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)
'''
TASK = {
    "task.toml": '[task]\nname = "tests/greeting"\n\n[verifier]\nenvironment_mode = "shared"\n',
    "instruction.md": "Write hello into /app/greeting.txt.",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
    "tests/test.sh": '[ "$(cat /app/greeting.txt)" = hello ]; '
    "echo $((1 - $?)) > /logs/verifier/reward.txt",
}


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProgramProblem:
    """A trial of a task in an environment without a container."""
    (tmp_path / "without_a_container.py").write_text(WITHOUT_A_CONTAINER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, text in TASK.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = ("sh", str(RECIPE), "--env", "without_a_container:Here")
    return problem(tmp_path, "", {"task": str(tmp_path / "task")}, words=command)


async def test_a_trial_is_a_rollout(trial: ProgramProblem) -> None:
    def say(genome: int, shown: str) -> str:
        asked = re.findall(r"user\n(.*?)<\|im_end", shown, re.DOTALL)
        assert "Write hello into /app/greeting.txt." in asked[0]
        typed = {"keystrokes": f"echo {'hello' if genome else 'bye'} > greeting.txt\n"}
        said = {"analysis": "", "plan": "", "commands": [{**typed, "duration": 0.2}]}
        return json.dumps({**said, "task_complete": len(asked) > 1})

    groups, _ = await run([trial], say, rollout_timeout=100.0, turn_timeout=60.0)
    assert [only(groups, g).reward for g in range(3)] == [0, 1, 1]
    metrics = only(groups).transitions[-1].metrics
    assert metrics["reward"] == 0 and metrics["turns"] >= 2


async def test_a_trial_that_fails_loses_its_rollout(trial: ProgramProblem, tmp_path: Path) -> None:
    (tmp_path / "without_a_container.py").write_text("raise ValueError('no such environment')")
    groups, _ = await run([trial], rollout_timeout=100.0, turn_timeout=60.0)
    assert "the program ended with exit code" in reason(groups)
    assert "no such environment" in reason(groups)

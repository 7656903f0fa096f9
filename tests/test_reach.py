"""Images, clusters, workflows, forms and the lock name only what is there, and agree with it."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


# --- the lock of uv ------------------------------------------------------------------------------


def normal(name: str) -> str:
    """Return a package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, Any]:
    (found,) = [each for each in LOCK["package"] if each["name"] == name]
    return found


def test_the_lock_is_of_this_pyproject() -> None:
    """`make uv.lock` writes it again."""
    required = locked("es-cookbook")["metadata"]["requires-dist"]
    groups = {"": PROJECT["dependencies"], **EXTRAS}
    written = {
        (normal(parts[1]), parts[2], normal(extra))
        for extra, requirements in groups.items()
        for each in requirements
        if (parts := re.match(r"([\w.-]+)(?:\[\w+\])?(>=[^;]+)", each))
    }
    extra_of = re.compile(r"extra == '([\w-]+)'")
    in_lock = {
        (each["name"], each["specifier"], "".join(extra_of.findall(each.get("marker", ""))))
        for each in required
    }
    of_others = {each for each in in_lock - written if each[2] == "dev"}  # of the extras in it
    assert in_lock - of_others == written
    (override,) = PYPROJECT["tool"]["uv"]["override-dependencies"]
    assert override.partition(";")[0] in EXTRAS["vllm"]
    assert LOCK["manifest"]["overrides"][0]["specifier"] in override


# --- images --------------------------------------------------------------------------------------


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of a Dockerfile, continued lines joined."""
    lines = re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE)
    joined = re.sub(r" *\\\n +", " ", lines)
    return [(a, b) for a, _, b in (line.partition(" ") for line in joined.splitlines()) if a]


DOCKERFILE = instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))


def is_ignored(path: str) -> bool:
    """Return whether .dockerignore excludes a path; the last matching pattern decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#") and fnmatch(path, line.removeprefix("!")):
            ignored = not line.startswith("!")
    return ignored


def test_what_the_dockerfile_copies_is_there_and_sent_to_it() -> None:
    copied = [shlex.split(value)[:-1] for name, value in DOCKERFILE if name == "COPY"]
    sources = {source for each in copied for source in each}
    assert {"pyproject.toml", "es_cookbook", "uv.lock", "constraints.txt"} <= sources
    assert [each for each in sources if not (ROOT / each).exists() or is_ignored(each)] == []
    assert [each for each in ("tests", "runs", ".git", ".venv") if not is_ignored(each)] == []
    # Without these two the package cannot be built.
    assert {
        PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"][0][
            "path"
        ],
        PROJECT["license-files"][0],
    } <= sources


def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    command = [Path(sys.executable).parent / "hadolint", "Dockerfile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_extras_that_the_images_install_exist() -> None:
    text = "\n".join(value for name, value in DOCKERFILE if name == "RUN")
    listed = ",".join(re.findall(r'"\.\[([\w,]+)\]"', text)).split(",")
    named = {*listed, *re.findall(r"--extra (\w+)", text)}
    assert named <= EXTRAS.keys()
    assert {"vllm", "gguf"} <= named


# --- workflows, forms, citation ------------------------------------------------------------------


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
        assert job["timeout-minutes"] <= 60
        yield from job["steps"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_is_there(workflow: Path) -> None:
    """Its actions have a version, and its write permissions belong to one job each."""
    read = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert read["permissions"] == {"contents": "read"}
    made = re.findall(r"^([\w.]+(?: [\w.]+)*):", MAKEFILE, flags=re.MULTILINE)
    targets = {target for line in made for target in line.split()}
    for step in steps(workflow):
        assert re.fullmatch(r"[\w/-]+@(v\d+|release/v1)", step.get("uses", "a/b@v1"))
        run = step.get("run", "")
        assert set(re.findall(r"\bmake ([\w.]+)", run)) <= targets
        assert all((ROOT / script).exists() for script in re.findall(r"^\.\S+", run))

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

from es_cookbook import __version__

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
MANY_GPUS = (ROOT / "docs/multi_gpu.md").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


# --- the lock of uv ------------------------------------------------------------------------------


def normal(name: str) -> str:
    """A package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, Any]:
    (found,) = [each for each in LOCK["package"] if each["name"] == name]
    return found


def test_the_lock_is_of_this_pyproject() -> None:
    """`make uv.lock` writes it again."""
    required = locked("es-cookbook")["metadata"]["requires-dist"]
    groups = {"": PROJECT["dependencies"], **EXTRAS}
    written = {
        (normal(parts[1]), parts[2], extra)
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


def test_the_lock_has_the_versions_of_the_tests() -> None:
    """For what pyproject.toml names; the rest differs with vLLM's build."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {normal(name): version for name, _, version in (each.partition("==") for each in lines)}
    required = {each["name"] for each in locked("es-cookbook")["metadata"]["requires-dist"]}
    assert len(required & pins.keys()) > 40
    assert {
        each["name"]: each["version"]
        for each in LOCK["package"]
        if each["name"] in required & pins.keys() and each["version"] != pins[each["name"]]
    } == {}


def test_the_lock_knows_no_index_but_the_public_one() -> None:
    sources = [each["source"] for each in LOCK["package"] if each["name"] != "es-cookbook"]
    assert all(source == {"registry": "https://pypi.org/simple"} for source in sources)


def test_vllm_for_gpus_can_be_installed_under_the_constraints() -> None:
    """0.32 wants a version of apache-tvm-ffi of its own, and a pin of another forbade it."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wanted = locked("apache-tvm-ffi")["version"]
    assert re.findall(r"^apache-tvm-ffi==(.*)$", constraints, flags=re.MULTILINE) in ([], [wanted])


# --- images --------------------------------------------------------------------------------------


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """(instruction, what follows it) of a Dockerfile, continued lines joined."""
    lines = re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE)
    joined = re.sub(r" *\\\n +", " ", lines)
    return [(a, b) for a, _, b in (line.partition(" ") for line in joined.splitlines()) if a]


DOCKERFILE = instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))
KNOWN = {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "ENTRYPOINT", "CMD"}


def test_the_dockerfile_has_a_stage_for_cpus_and_ends_with_that_for_gpus() -> None:
    assert {name for name, _ in DOCKERFILE} == KNOWN
    stages = [value.split(" AS ") for name, value in DOCKERFILE if name == "FROM"]
    names = [name for _, name in stages]
    assert names == ["base", "cpu", "cuda"]
    assert all(base in names[:i] for i, (base, _) in enumerate(stages) if i)
    assert {value for name, value in DOCKERFILE if name == "ENTRYPOINT"} == {'["es-cookbook"]'}
    assert "es-cookbook" in PROJECT["scripts"]


def is_ignored(path: str) -> bool:
    """What .dockerignore says of a path; the last pattern that fits decides."""
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


# --- clusters ------------------------------------------------------------------------------------


def block(kind: str, containing: str) -> str:
    """The block of docs/multi_gpu.md that contains something."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", MANY_GPUS, flags=re.DOTALL | re.MULTILINE)
    (found,) = [each for each in blocks if containing in each]
    return found


def kubernetes() -> tuple[int, int, str]:
    spec = yaml.safe_load(block("yaml", "kind: RayJob"))["spec"]
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    return (
        group["replicas"],
        int(container["resources"]["limits"]["nvidia.com/gpu"]),
        spec["entrypoint"],
    )


def slurm() -> tuple[int, int, str]:
    script = block("bash", "#SBATCH")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, flags=re.MULTILINE))
    gpus = int(options["gpus-per-node"])
    assert f"--num-gpus={gpus} --" in script
    return int(options["nodes"]), gpus, script


def skypilot() -> tuple[int, int, str]:
    task = yaml.safe_load(block("yaml", "num_nodes"))
    assert (ROOT / task["workdir"] / "pyproject.toml").exists()
    (extra,) = re.findall(r"uv sync --locked --extra (\w+)", task["setup"])
    assert extra in EXTRAS
    count = int(task["resources"]["accelerators"].partition(":")[2])
    return task["num_nodes"], count, task["run"]


CLUSTERS = pytest.mark.parametrize(
    "cluster", [kubernetes, slurm, skypilot], ids=lambda each: each.__name__
)


@CLUSTERS
def test_a_cluster_has_as_many_gpus_as_its_run_has_engines(cluster: Any) -> None:
    """That the run's options are accepted, test_docs_commands holds."""
    machines, gpus, command = cluster()
    (engines,) = re.findall(r" engine\.num_engines=(\d+)", command)
    (of_an_engine,) = re.findall(r" engine\.num_gpus=(\d+)", command)
    assert machines * gpus == int(engines) * int(of_an_engine)
    assert "behavior_if_log_dir_exists=resume" in command


@pytest.mark.parametrize("cluster", [slurm, skypilot])
def test_a_shell_can_read_the_script_of_a_cluster(cluster: Any) -> None:
    *_, script = cluster()
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


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


def test_every_workflow_is_known() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "release"]


def test_the_site_that_is_published_is_what_make_docs_builds() -> None:
    (path,) = [
        step["with"]["path"]
        for step in steps(ROOT / ".github/workflows/docs.yml")
        if "upload-pages" in step.get("uses", "")
    ]
    assert f". {path}\n" in MAKEFILE


def test_a_release_is_checked_before_it_is_published() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))["jobs"]
    text = "\n".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert all(each in text for each in ("__version__", "twine check --strict", "pip check"))
    assert jobs["publish"]["needs"] == "build"


@pytest.mark.parametrize("name", ["bug", "recipe"])
def test_a_form_asks_for_something_and_names_what_is_there(name: str) -> None:
    text = (ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text(encoding="utf-8")
    body = yaml.safe_load(text)["body"]
    ids = [each["id"] for each in body if each["type"] != "markdown"]
    assert len(ids) == len(set(ids)) >= 3
    assert any(each.get("validations", {}).get("required") for each in body)
    template = (ROOT / ".github/pull_request_template.md").read_text(encoding="utf-8")
    files = re.findall(r"\b[\w/]+\.md\b", text + template)
    assert files and all((ROOT / each).exists() for each in files)


def test_dependabot_looks_at_what_is_there() -> None:
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text("utf-8"))["updates"]
    read = {"uv": "uv.lock", "docker": "Dockerfile", "github-actions": ".github/workflows"}
    assert {each["package-ecosystem"] for each in updates} == read.keys()
    assert all((ROOT / each).exists() for each in read.values())


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] in PROJECT["license"]
    assert citation["keywords"][1:] == PROJECT["keywords"][1:]

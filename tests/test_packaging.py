"""What is said about installing the package is so."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
READ_BY_USERS = [
    *(
        path
        for folder in ("docs", "es_cookbook", "benchmarks")
        for path in (ROOT / folder).rglob("*")
    ),
    *(ROOT / "recipes").rglob("*"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")),
]


def lowest() -> dict[str, str]:
    """Return the versions that `make lowest` installs, by package."""
    command = [sys.executable, "requirements/lowest.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    pins = [line.partition(";")[0].partition("==") for line in done.stdout.splitlines()]
    assert len({name for name, _, _ in pins}) == len(pins), "a package has two lower bounds"
    return {name: version for name, _, version in pins}


def test_every_dependency_has_one_lower_bound_that_make_lowest_installs() -> None:
    pins = lowest()
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    written = {each for group in groups for each in group if not each.startswith("es-cookbook[")}
    names = {each: re.split(r"[\[>]", each)[0] for each in written}
    assert set(names.values()) == pins.keys()
    assert all(f">={pins[name]}" in each for each, name in names.items())


def test_every_extra_that_users_are_told_of_exists() -> None:
    texts = [
        path.read_text(encoding="utf-8")
        for path in READ_BY_USERS
        if path.suffix in (".md", ".py", ".ipynb", "")
        if path.is_file()
    ]
    hints = re.findall(r"(?:es-cookbook|\.\./\.\.|'\.)\[([a-z,_-]+)\]", "\n".join(texts))
    named = {extra for hint in hints for extra in hint.split(",")}
    assert named <= PROJECT["optional-dependencies"].keys()
    assert {"plots", "vllm", "sweep", "llama-cpp"} <= named
    assert not re.search(r"pip install [^\n&]*es-cookbook(?![\[\w])", "\n".join(texts))


def test_names_of_extras_are_those_of_the_metadata() -> None:
    """The pip that comes with Python 3.11 does not find `a_b`, which setuptools writes as `a-b`."""
    for name in PROJECT["optional-dependencies"]:
        assert name == re.sub(r"[-_.]+", "-", name).lower()


def test_files_of_others_have_their_licence_in_the_wheel() -> None:
    found = list((ROOT / "es_cookbook").rglob("LICENSE*"))
    assert {str(path.relative_to(ROOT)) for path in found} == {*PROJECT["license-files"]} - {
        "LICENSE"
    }
    assert PROJECT["license"] == "Apache-2.0 AND MIT"

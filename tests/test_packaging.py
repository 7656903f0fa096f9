"""What is said about installing the package is so."""

import json
import re
import struct
import subprocess
import sys
import tomllib
from math import prod
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
MODELS = sorted((ROOT / "es_cookbook/recipes").glob("*/model"))
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
    """Package -> the version that `make lowest` installs."""
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


def test_a_newer_torch_is_kept_and_ours_is_a_constraint() -> None:
    (torch,) = [each for each in PROJECT["dependencies"] if each.startswith("torch")]
    assert "<" not in torch
    assert "\ntorch==2.13.0\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_every_extra_that_users_are_told_of_exists() -> None:
    texts = [
        path.read_text(encoding="utf-8")
        for path in READ_BY_USERS
        if path.suffix in (".md", ".py", ".ipynb", "")
        if path.is_file()
    ]
    hints = re.findall(r"(?:es-cookbook|\.\./\.\.|'\.)\[([a-z,]+)\]", "\n".join(texts))
    named = {extra for hint in hints for extra in hint.split(",")}
    assert named <= PROJECT["optional-dependencies"].keys()
    assert {"plots", "vllm", "sweep"} <= named
    assert not re.search(r"pip install [^\n&]*es-cookbook(?![\[\w])", "\n".join(texts))


@pytest.mark.slow
def test_an_extra_of_the_installed_package_needs_no_index_that_knows_it() -> None:
    """`pip install 'es-cookbook[plots]'`, in any folder, takes the package that is there."""
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--dry-run", "es-cookbook[plots]"]
    done = subprocess.run(pip, cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout


def test_the_readme_of_an_index_page_has_no_link_that_leads_nowhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\]\((?!https?:)", text)
    for each in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        text = re.sub(each["pattern"], each["replacement"], text)
    assert not re.search(r"\]\((?!https?:)", text)
    assert "docs/tasks.md" in text


def test_files_of_others_have_their_licence_in_the_wheel() -> None:
    found = list((ROOT / "es_cookbook").rglob("LICENSE*"))
    assert {str(path.relative_to(ROOT)) for path in found} == {*PROJECT["license-files"]} - {
        "LICENSE"
    }
    assert PROJECT["license"] == "Apache-2.0 AND MIT"


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.parent.name)
def test_a_bundled_model_has_a_card(model: Path) -> None:
    card = (model / "README.md").read_text(encoding="utf-8")
    with (model / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        tensors = json.loads(file.read(size))
    tensors.pop("__metadata__", None)
    assert f"{sum(prod(each['shape']) for each in tensors.values()):,} parameters" in card
    assert card.startswith("---\nlicense: apache-2.0\n")


def test_bundled_data_has_its_licence_beside_it() -> None:
    files = sorted((ROOT / "es_cookbook/recipes").glob("*/*.jsonl"))
    assert files
    for file in files:
        page = (file.parent / "README.md").read_text(encoding="utf-8")
        assert re.search(rf"^`{file.name}` was made by .* Licence: ", page, flags=re.MULTILINE)


def test_notebooks_are_installed_from_their_checkout_and_run_what_they_tell_of() -> None:
    folder = ROOT / "recipes/notebooks"
    for path in folder.glob("*.ipynb"):
        text = path.read_text(encoding="utf-8")
        assert "%pip install" in text and "../..[" in text, path.name
    assert (folder / "../../pyproject.toml").exists()
    game = (folder / "custom_reward_and_env.ipynb").read_text(encoding="utf-8")
    (generations,) = re.findall(r'"num_generations = (\d+)', game)
    (factor,) = re.findall(r"num_generations=(\d+) \* num_generations", game)
    (told,) = re.findall(r"In (\d+) generations it doubles", game)
    assert int(told) == int(factor) * int(generations)

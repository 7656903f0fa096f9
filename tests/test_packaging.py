"""What is said about installing the package is so."""

import json
import re
import struct
import subprocess
import sys
import tomllib
from math import prod
from pathlib import Path
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
NOTEBOOKS = sorted((ROOT / "recipes/notebooks").glob("*.ipynb"))
MODELS = sorted((ROOT / "es_cookbook").glob("*/*/model"))
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
    files = sorted((ROOT / "es_cookbook").glob("*/*/*.jsonl"))
    assert files
    for file in files:
        page = (file.parent / "README.md").read_text(encoding="utf-8")
        assert re.search(rf"^`{file.name}` was made by .* Licence: ", page, flags=re.MULTILINE)


class Shell:
    """What an install cell sees of IPython."""

    def __init__(self) -> None:
        self.installed: list[str] = []
        self.names: dict[str, Any] = {"get_ipython": lambda: self}

    def run_line_magic(self, name: str, line: str) -> None:
        assert name == "pip"
        self.installed.append(line.format(**self.names))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("is_there", "wheel", "source"),
    [
        (True, "es_cookbook-1.0-py3-none-any.whl", None),
        (False, None, "../.."),
        (False, "es_cookbook-1.0-py3-none-any.whl", "es_cookbook-1.0-py3-none-any.whl"),
    ],
)
def test_a_notebook_installs_an_uploaded_wheel_or_its_checkout_where_it_must(
    path: Path,
    is_there: bool,
    wheel: str | None,
    source: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    title, cell, *_ = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert {"Colab", "Kaggle"} <= set(re.findall(r"\[(\w+)\]\(https://", "".join(title["source"])))
    if wheel:
        (tmp_path / wheel).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if is_there else None)
    shell = Shell()
    exec(TransformerManager().transform_cell("".join(cell["source"])), shell.names)
    if source is None:
        assert shell.installed == []
    else:
        (line,) = shell.installed
        found = re.fullmatch(r'install --quiet "(.*)\[([a-z,]+)\]"', line)
        assert found and found[1] == source
        assert set(found[2].split(",")) <= PROJECT["optional-dependencies"].keys()


def test_notebooks_run_what_they_tell_of() -> None:
    folder = ROOT / "recipes/notebooks"
    assert (folder / "../../pyproject.toml").exists()
    game = (folder / "custom_reward_and_env.ipynb").read_text(encoding="utf-8")
    (generations,) = re.findall(r'"num_generations = (\d+)', game)
    (factor,) = re.findall(r"num_generations=(\d+) \* num_generations", game)
    (told,) = re.findall(r"In (\d+) generations it doubles", game)
    assert int(told) == int(factor) * int(generations)

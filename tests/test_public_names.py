"""The names that `from es_cookbook import ...` promises."""

import ast
from pathlib import Path

import pytest

import es_cookbook
from docs.pages import filled
from tests.public_names import promises

ROOT = Path(__file__).parents[1]
PAGE = filled((ROOT / "docs/builders/python.md").read_text(encoding="utf-8"))


def test_a_signature_that_changes_is_a_promise_that_changes() -> None:
    kept = (ROOT / "tests/data/public_names.txt").read_text(encoding="utf-8")
    assert promises().strip() == kept.strip(), "python -m tests.public_names writes it anew"


def test_what_is_told_to_checkers_of_types_is_what_there_is() -> None:
    tree = ast.parse(Path(es_cookbook.__file__).read_text(encoding="utf-8"))
    told = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("es_cookbook.")
        for alias in node.names
    }
    assert told.keys() == set(es_cookbook.__all__)
    for name, path in told.items():
        module = __import__(path.rpartition(".")[0], fromlist=["*"])
        assert getattr(es_cookbook, name) is getattr(module, name)


@pytest.mark.parametrize("name", es_cookbook.__all__)
def test_the_page_of_python_has_every_public_name(name: str) -> None:
    assert f"\n## {name}\n" in PAGE and f"`from es_cookbook import {name}`" in PAGE


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        getattr(es_cookbook, "Trainer")  # noqa: B009
    assert set(es_cookbook.__all__) <= set(dir(es_cookbook))

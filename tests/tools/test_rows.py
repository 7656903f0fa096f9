"""The bundled rows are made again by their programs."""

import importlib
from pathlib import Path

import pytest

import es_cookbook.recipes
from es_cookbook.common.errors import ConfigError

RECIPES = Path(es_cookbook.recipes.__path__[0])


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("alignment", "pairs"),
        ("conciseness", "questions"),
        ("crossword", "clues"),
        ("pairwise", "additions"),
    ],
)
def test_bundled_rows_are_those_of_the_command(name: str, program: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"tools.rows.{program}")
    output = tmp_path / f"{program}.jsonl"
    module.main(module.Config(output=str(output)))
    assert output.read_bytes() == (RECIPES / name / output.name).read_bytes()
    with pytest.raises(ConfigError, match=r"cannot write output .*: File exists"):
        module.main(module.Config(output=str(output)))
    module.main(module.Config(output=str(tmp_path / "few"), count=3))
    with pytest.raises(ConfigError, match="count must be at least 1"):
        module.Config(output="x", count=0)
    few = (tmp_path / "few").read_bytes()
    assert few.count(b"\n") == 3 and output.read_bytes().startswith(few)

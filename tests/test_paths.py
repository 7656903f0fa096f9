"""What scripts import and documents show keeps its place, or somebody's script breaks."""

import re
from pathlib import Path

from es_cookbook.__main__ import COMMANDS, RECIPES
from es_cookbook.cli import command_of
from es_cookbook.common.registry import groups

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "lab_notes.md"),
    *sorted((ROOT / "recipes").glob("*.py")),
    *(path for path in (ROOT / "es_cookbook").rglob("*.py") if path.name != "references.py"),
]
"""The changelog and lab notes say what was there on their day, references.py where classes were."""


def test_every_module_of_the_commands_room_that_can_be_called_is_a_command() -> None:
    assert set(COMMANDS) == {
        *("train", "resume", "fork", "rewind", "play", "evaluate", "export", "plan", "hub"),
        *("compare", "generate", "quantise", "inspect", "policy_gradient", "grpo", "sft", "sigma"),
        *("compare-gradients", "reconsider", "sweep", "frames", "runs", "show", "plot"),
        "report",
        "serve",
        "plugins",
    }
    assert set(RECIPES) == {
        *("countdown", "arithmetic", "math", "logic", "rush_hour", "code", "crossword"),
        *("conciseness", "mixture", "tic_tac_toe", "alignment", "pairwise"),
        *("guess_number", "calculator", "search", "markovian", "chat", "merge", "knows"),
    }
    assert all(callable(command_of(name)) for name in (*COMMANDS, *RECIPES))


def shown(pattern: str) -> set[tuple[str, str]]:
    """Return (document, match) for everything that a user reads."""
    return {
        (path.name, match)
        for path in DOCUMENTS
        for match in re.findall(pattern, path.read_text(encoding="utf-8"))
    }


def test_every_path_into_the_package_that_a_document_shows_exists() -> None:
    paths = shown(r"\bes_cookbook(?:\.[a-zA-Z_]\w*)+")
    assert len(paths) > 20, "the search finds them"
    assert [f"{document}: {path}" for document, path in sorted(paths) if not exists(path)] == []


def exists(path: str) -> bool:
    """Return whether it is a module, a room, a name in one, or a group of entry points."""
    *parents, name = path.split(".")
    if parents == ["es_cookbook"] and name in {*groups(), "api"}:
        return True
    place = ROOT.joinpath(*parents)
    if (place / name).is_dir() or (place / f"{name}.py").exists():
        return True
    module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return module.exists() and re.search(rf"\b{name}\b", module.read_text("utf-8")) is not None

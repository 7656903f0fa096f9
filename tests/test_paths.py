"""What scripts import and documents show keeps its place, or somebody's script breaks."""

import importlib
import re
from pathlib import Path

import pytest

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

IMPORTED = {
    "es_cookbook.runs.config": "MAY_DIFFER recorded_config",
    "es_cookbook.plugins.sweep": (
        "Range SweepSettings Value Values refuse_unequal_rollouts run_all sweep"
    ),
    "es_cookbook.rl.types": (
        "Action Datasets Env EnvGroup EnvGroupBuilder GroupReward Logs LostRollout Metrics "
        "Observation Policy RLDataset RLDatasetBuilder SamplingParams StepResult Trajectory "
        "TrajectoryGroup Transition"
    ),
    "es_cookbook.rl.problem_env": "ProblemEnv",
    "es_cookbook.rl.prompts": "render_prompt",
    "es_cookbook.common.cli": "run_cli changed run_with_fields",
    "es_cookbook.common.names": "Names",
    "es_cookbook.common.configs": "config_from_json config_to_json load_config",
    "es_cookbook.common.errors": "ESCookbookError ConfigError DataError EnvError nearest",
    "es_cookbook.common.seeds": "derive_seed",
    "es_cookbook.evolution.optimizers.base": "OPTIMIZER_NAMES Optimizer OptimizerBuilder",
    "es_cookbook.evolution.optimizers.es": "ES",
    "es_cookbook.population.evaluate": "attempt evaluate",
    "es_cookbook.population.results": (
        "bootstrap_interval compare mcnemar paired_bootstrap results_of wilson_interval"
    ),
    "es_cookbook.recipes.countdown.dataset": (
        "CountdownDatasetBuilder CountdownEnv Problem generate_problems solve"
    ),
    "es_cookbook.recipes.countdown.train_cli": "BUNDLED_MODEL RECOMMENDED CLIConfig cli main",
    "tools.bundled.countdown": "Config main",
    "tools.bundled.countdown_demonstrations": "Config main",
    "es_cookbook.plugins.gradients.policy_gradient": "Config Expert Group Method PPO main",
    "es_cookbook.plugins.gradients.sft": "cli main",
    "es_cookbook.plugins.report.frames": "frames",
    "es_cookbook.runs.files": "replace_file",
    "es_cookbook.runs.tracking.curves": "grouped shared_points table",
    "es_cookbook.plugins.report.plots": "Line draw lines_of",
    "es_cookbook.runs.tracking.jsonl": "JsonlTrackerBuilder read_metrics",
}
"""Module -> the names in it that scripts use."""


@pytest.mark.parametrize("module", IMPORTED)
def test_what_scripts_import_is_there(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in IMPORTED[module].split() if not hasattr(found, name)] == []


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
        *("guess_number", "calculator", "search", "markovian", "chat"),
    }
    assert all(callable(command_of(name)) for name in (*COMMANDS, *RECIPES))


def shown(pattern: str) -> set[tuple[str, str]]:
    """(document, what matches) in everything that a user reads."""
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
    """Whether it is a module, a room, a name in one, or a group of entry points."""
    *parents, name = path.split(".")
    if parents == ["es_cookbook"] and name in {*groups(), "api"}:
        return True
    place = ROOT.joinpath(*parents)
    if (place / name).is_dir() or (place / f"{name}.py").exists():
        return True
    module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return module.exists() and re.search(rf"\b{name}\b", module.read_text("utf-8")) is not None

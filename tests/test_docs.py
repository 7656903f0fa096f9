"""The project's pages: their code runs, and what they say of the layout is so."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.causal_lms import CAUSAL_LM_CLASSES, UNBUILDABLE
from benchmarks.model_families import PAGE, counts, documented, said_of
from docs import figures
from docs.baselines import rows, studied
from es_cookbook.rl.messages.message_env import Script
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.runs.history.store import read_history
from tests.chat_templates import CHATML, tokenizer_with

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "es_cookbook"
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_readmes_example_trains_from_an_empty_folder(tmp_path: Path) -> None:
    """As it stands, but for its length and its model, which is on the Hub."""
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    lines = example.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "bundled:countdown")
    lines = lines.replace("num_generations=50", "num_generations=2")
    assert lines.count("es_cookbook") == 1, "one import"
    (tmp_path / "example.py").write_text(lines.replace("population_size=64", "population_size=4"))
    pairs = [(a, b) for a in range(2, 9) for b in range(2, 9)]
    rows = [{"question": f"{a},{b},{a + b}\n", "answer": f"{a}+{b}"} for a, b in pairs]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (run,) = (tmp_path / "runs").iterdir()
    assert done.stdout.endswith(f" runs/{run.name}\n") and run.name.startswith("rows-seed0-")
    assert len(list(read_history(run / "history.jsonl"))) == 2


@pytest.mark.skipif(
    f"\ntransformers=={version('transformers')}\n" not in CONSTRAINTS,
    reason="the table is of the version in constraints.txt",
)
def test_the_counts_of_models_are_those_of_the_table() -> None:
    """Which paths are the engine's, test_model_families holds, class by class."""
    page = PAGE.read_text(encoding="utf-8")
    paths = documented(page)
    assert set(paths) == {*CAUSAL_LM_CLASSES, *UNBUILDABLE}
    assert {name for name, path in paths.items() if path.startswith("not tried")} == {*UNBUILDABLE}
    assert all(paths[name] == f"not tried: {why}" for name, why in UNBUILDABLE.items())
    assert said_of(paths) in page
    right, refused, _ = counts(paths)
    assert right / (right + refused) >= 0.9
    results = json.loads((ROOT / "benchmarks/results/model_families.json").read_text())["rows"]
    measured = {row["name"]: row["value"] for row in results}
    assert (measured["right"], measured["refused with a sentence"]) == (right, refused)
    assert len(page.splitlines()) <= 200


async def test_the_page_of_tasks_has_tools_that_run() -> None:
    page = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
    chats = page.partition("## Chats of many turns")[2].partition("## Several data sets")[0]
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", chats, flags=re.DOTALL)), names)
    tokenizer = tokenizer_with(CHATML)
    script = Script(['<tool_call>{"name": "search"}</tool_call>', "nobody"], tokenizer)
    found = await run_rollout(names["question"](tokenizer), script)
    assert found.reward == 1.0
    assert found.transitions[-1].metrics["tool_errors"] == 1.0


def test_every_file_that_the_pages_link_to_exists() -> None:
    pages = {*figures.PAGES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")}
    missing = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert missing == []


def test_every_paper_that_is_cited_is_on_the_page_of_papers() -> None:
    pages = [*figures.PAGES, *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.py")]
    cited = r"(?:arXiv[: ]*|arxiv\.org/abs/)(\d{4}\.\d{4,5})"
    numbers = {number for page in pages for number in re.findall(cited, page.read_text("utf-8"))}
    page = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
    assert numbers - set(re.findall(r"abs/(\d{4}\.\d{4,5})", page)) == set()


def test_the_tests_that_pages_name_exist() -> None:
    named = r"`(tests/[\w/]+\.py)::(\w+)`"
    found = {pair for page in figures.PAGES for pair in re.findall(named, page.read_text("utf-8"))}
    missing = [f for f in found if f"def {f[1]}(" not in (ROOT / f[0]).read_text("utf-8")]
    assert len(found) >= 4 and missing == []


def test_figures_on_the_pages_are_those_of_the_results() -> None:
    assert figures.wrong() == []


def test_a_quote_that_differs_from_its_result_or_is_gone_is_named(tmp_path: Path) -> None:
    rows = [{"name": f"seed {seed}: gain", "value": 28.96 + seed} for seed in range(3)]
    results = tmp_path / "benchmarks/results"
    results.mkdir(parents=True)
    (results / "job.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "page.md").write_text("In 50 generations it gains 29.0, 30.0 and\n31.0 points.")

    def found(quote: str, *sources: str) -> list[str]:
        return list(figures.wrong_quotes({"page.md": {quote: sources}}, tmp_path))

    assert found("50 generations it gains 29.0, 30.0 and 31.0", "", "job | seed *: gain") == []
    assert found("gains 29.0", "job | seed 1: gain")[0].endswith("'job | seed 1: gain' is 29.96")
    assert found("gains 29.0", "job | seed 0: gain | 2")[0].endswith("| 2' is 57.92")
    assert found("gains 28.0", "job | seed 0: gain") == [
        "page.md does not say 'gains 28.0'",
        "page.md: 'gains 28.0' has 28.0 where 'job | seed 0: gain' is 28.96",
    ]
    assert found("gains 29.0", "job | seed *: gain")[0].endswith("1 numbers and 3 sources")


def test_a_section_with_a_figure_names_a_command_a_file_or_the_lab_notes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    cited = "5 times (`python -m benchmarks.x`)"
    page.write_text(f"# One\n5 times\n\n## Two\n{cited}\n## Three\n{cited}, not kept\n## Four\nx\n")
    assert [*figures.without_source([page], tmp_path)] == ["page.md: # One", "page.md: ## Two"]


def test_every_row_of_the_baselines_has_a_file_and_a_command() -> None:
    found = rows()
    assert len(found) >= 30
    assert all(row.source.exists() and row.command.startswith("python -m") for row in found)
    assert all(row.metrics is None or row.metrics.exists() for row in found)
    assert {row.learns.partition(" of")[0] for row in found} == {"rewards", "gold answers"}
    assert any("7.0 → 64.0 (63.0 … 66.0) %" in row.score for row in found), "the recipe chat"


def test_a_contestant_of_the_study_is_a_row_of_the_baselines(tmp_path: Path) -> None:
    machine = {"cpu": "AMD EPYC", "gpu": None, "threads": 2}
    ends = [
        {
            "machine": machine,
            "points": [{"score": 0.1}, {"score": x, "seconds": 9, "evaluations": 8}],
        }
        for x in (0.5, 0.7)
    ]
    found = {
        "command": "python -m benchmarks.study sums",
        "contestants": {"es": {"told": "gold answers", "runs": ends}},
    }
    (tmp_path / "sums.json").write_text(json.dumps(found))
    (row,) = studied(tmp_path)
    assert (row.task, row.learns, row.seconds) == ("chat: sums, fold 3", "gold answers", "9")
    assert (row.rollouts, row.score) == ("8 scores", "10.0 → 60.0 (50.0 … 70.0) %")


def folders_of_the_tree() -> set[str]:
    """Return the folders of the package in CONTRIBUTING's tree, by indentation."""
    (tree,) = re.findall(r"```text\nes_cookbook/\n(.*?)\n(?! )", CONTRIBUTING, flags=re.DOTALL)
    parents: list[str] = []
    folders: set[str] = set()
    for indentation, name in re.findall(r"^( +)([\w.]+)/ ", tree, flags=re.MULTILINE):
        parents = [*parents[: len(indentation) // 2 - 1], name]
        folders.add("/".join(parents))
    return folders


def test_the_tree_names_every_folder_and_no_other() -> None:
    files = [path for path in PACKAGE.rglob("*.*") if "__pycache__" not in path.parts]
    existing = {path.parent.relative_to(PACKAGE).as_posix() for path in files if path.is_file()}
    assert folders_of_the_tree() == existing - {"."}


def test_the_floors_are_those_of_the_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["id"] == "floors"]
    contract = {
        str(floor): set(re.findall(r"\w+", layer))
        for floor, layer in enumerate(reversed(layers), start=1)
    }
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", CONTRIBUTING, flags=re.MULTILINE)
    assert {floor: set(re.findall(r"`(\w+)`", rooms)) for floor, rooms in rows} == contract
    planned = set(re.findall(r"`(\w+)` \(planned\)", CONTRIBUTING))
    rooms = set[str]().union(*contract.values())
    assert planned == {room for room in rooms - {"__main__"} if not (PACKAGE / room).is_dir()}

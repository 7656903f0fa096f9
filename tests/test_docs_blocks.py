"""Every block of code on the pages is run, parsed or a command that is: none can go stale unseen.

A block says what it is. Behind ```` ```python ```` stands what is run here; ```` ```text ```` is
shown and never typed; a block without a name, `sh` or the prompts of `console` are command lines,
which `test_docs_commands` runs or parses; `bash` is a batch script, which `test_reach` reads.
"""

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import yaml
from markdown_it import MarkdownIt

from es_cookbook.common.configs import config_to_json
from es_cookbook.runs import program
from es_cookbook.runs.config import Config
from es_cookbook.runs.program import run as run_config
from tests.test_docs_commands import PAGES, ROOT, lines
from tests.tiny_run import tiny


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code: where it begins, what it says it is, and what it holds."""

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """Return all blocks of code, fenced and indented."""
    return [
        Block(
            str(page.relative_to(ROOT)),
            token.map[0] + 1,
            token.info.strip() if token.type == "fence" else "indented",
            token.content,
        )
        for page in PAGES
        for token in MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8"))
        if token.type in ("fence", "code_block") and token.map
    ]


BLOCKS = blocks()
START = "docs/index.md", "python"
PYTHON_PAGES = sorted({block.page for block in BLOCKS if block.kind == "python"})
COMMANDS = r"es-cookbook|python -m (es_cookbook|benchmarks|tools)|make"
RUN = {(page, line) for page, line in lines(COMMANDS)}
OF_OTHERS = re.compile(
    r"pip install .*|(RAY_AUTH_MODE=token )?ray (start|status|get-auth-token)\b.*|inspect view .*"
    r"|python rows\.py"
)
"""Commands of other programs; `test_guide` runs what a page writes."""
SET_UP = {
    "CONTRIBUTING.md": "import chz\n"
    "from es_cookbook.common.cli import run_cli\n"
    "from es_cookbook.common.names import Names\n"
    "from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES, OptimizerBuilder\n"
}
"""Page -> imports that its blocks leave out, because all they show is a shape."""


def command_lines(block: Block) -> list[str]:
    """Return the command lines of a block; continued lines are joined."""
    found = re.sub(r" *\\\n +", " ", block.text).splitlines()
    if block.kind == "console":
        return [line[2:] for line in found if line.startswith("$ ")]
    return [line for line in found if line.strip()]


def is_run(block: Block, line: str) -> bool:
    """Return whether `test_docs_commands` covers the command, or it is another program's."""
    return bool(OF_OTHERS.match(line)) or any(
        page == block.page and command in line for page, command in RUN
    )


def why_not_run(block: Block) -> str:
    """Return what in a block is not run although it should be; "" for most."""
    if block.kind in ("python", "json", "yaml", "toml", "text", "{toctree}"):
        return ""
    if block.kind == "bash" and "#SBATCH" in block.text:
        return ""
    if block.kind not in ("", "sh", "console", "indented"):
        return f"nothing runs blocks of kind {block.kind}"
    typed = command_lines(block)
    if block.kind == "indented" and not is_run(block, typed[0]):
        return ""
    missed = [line for line in typed if not is_run(block, line)]
    return f"nothing runs {missed[0]!r}; write ```text for what is not typed" if missed else ""


def test_no_page_has_a_block_that_nothing_runs() -> None:
    assert {str(block): why for block in BLOCKS if (why := why_not_run(block))} == {}


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.kind in ("json", "yaml")], ids=str
)
def test_a_block_of_data_can_be_read(block: Block) -> None:
    if block.kind == "yaml":
        assert yaml.safe_load(block.text)
    else:
        assert all(json.loads(line) for line in block.text.splitlines())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the runs that pages read."""
    path = tmp_path_factory.mktemp("runs")
    for name in ("mine", "es"):
        run_config(tiny(path / "runs" / name, num_generations=2))
    return path


def execute(page: str, namespace: dict[str, Any]) -> None:
    """Run a page's blocks one after the other; a traceback shows the page's own lines."""
    for block in BLOCKS:
        if (block.page, block.kind) == (page, "python"):
            code = "\n" * block.line + block.text
            exec(compile(code, page, "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_the_python_of_a_page_runs(page: str, runs: Path) -> None:
    """From top to bottom; what would train for minutes gives its Config, which is a valid one."""
    module = ModuleType("__main__")
    exec(SET_UP.get(page, ""), module.__dict__)
    given: list[Config] = []

    def run(config: Config) -> mock.Mock:
        given.append(config)
        return mock.Mock()

    with (
        contextlib.chdir(runs),
        mock.patch.dict(sys.modules, {"__main__": module}),
        mock.patch.object(program, "run", run),
        mock.patch.object(program, "main", given.append),
    ):
        execute(page, module.__dict__)
        made: Mapping[str, Any] = module.__dict__
        configs = [each for each in made.values() if isinstance(each, Config)]
        assert all(config_to_json(config) for config in [*given, *configs])


@pytest.mark.slow
def test_the_first_example_in_python_learns_as_it_is_written(tmp_path: Path) -> None:
    """From an empty folder, as a script."""
    (script,) = [block.text for block in BLOCKS if (block.page, block.kind) == START]
    (tmp_path / "first.py").write_text(script)
    given = [sys.executable, "first.py"]
    done = subprocess.run(given, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    key, first, _, last, _ = done.stdout.splitlines()[-1].split()
    assert key == "test/reward/mean" and float(last) > float(first) + 0.2

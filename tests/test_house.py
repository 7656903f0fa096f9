"""The house rules: what the tools and the tree can check, checked."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard

import chz
import pytest

from es_cookbook.rl.regularisers import REGULARISER_NAMES
from es_cookbook.rl.rewards.base import REWARD_NAMES
from es_cookbook.runs.config import Config

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "es_cookbook"
MODULES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def dotted(path: Path) -> str:
    """Return the name under which a file is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def loaded_by(*programs: str) -> list[set[str]]:
    """Return the modules that a fresh interpreter has loaded after each program."""
    say = "import sys\nprint(*sys.modules)"
    command = [sys.executable, "-c", "\n".join(f"{program}\n{say}" for program in programs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "datasets", "numpy", "chz", "rich", "vllm", "ray", "wandb"}
    (loaded,) = loaded_by("import es_cookbook")
    assert loaded & heavy == set()


MAIN_JOB = """
import sys, tempfile
from es_cookbook.recipes.countdown.train_cli import cli
options = ("num_generations=1", "optimizer.population_size=4", "dataset.num_train=64",
    "dataset.num_test=2", "dataset.problems_per_generation=2", "sampling.max_tokens=2")
sys.argv = ["countdown", *options, f"log_path={tempfile.mkdtemp()}/run"]
sys.stdout = sys.stderr
cli()
sys.stdout = sys.__stdout__
"""


IN_VLLM = {f"es_cookbook.engines.vllm.{name}" for name in ("worker", "cpu")}
"""Imported by vLLM's own workers, and by whoever has just started vLLM."""
MOST_OF_THE_MAIN_JOB = 100
"""Modules of the package that the main job imports, without those of its engine: a run imports what
it uses. Lower this whenever there are fewer."""
ABOUT_OTHERS = {
    "es_cookbook.plugins.generate.by_distilabel",
    "es_cookbook.plugins.inspect.models",
    "es_cookbook.plugins.gradients.grpo.training",
    *(f"es_cookbook.plugins.verifiers.{name}" for name in ("env", "library", "tools")),
}
"""Made of another library's classes, and imported when that is used."""


@pytest.mark.slow
def test_neither_the_main_job_nor_any_module_imports_what_only_others_need() -> None:
    names = [dotted(path) for path in MODULES]
    their_own = IN_VLLM | ABOUT_OTHERS
    assert set(names) >= their_own
    main_job, everything = loaded_by(
        MAIN_JOB, "\n".join(f"import {name}" for name in names if name not in their_own)
    )
    assert "torch" in main_job
    assert main_job & {"datasets", "wandb", "pyarrow", "pandas"} == set()
    engine = {name for name in names if name.startswith("es_cookbook.engines.torch")}
    assert len(main_job & set(names) - engine) <= MOST_OF_THE_MAIN_JOB
    optional = {"vllm", "ray", "wandb", "trl", "peft", "matplotlib", "openai", "compressed_tensors"}
    optional |= {"distilabel", "verifiers", "inspect_ai", "textarena", "tensorboard", "trackio"}
    optional |= {"optuna", "pandas", "pyarrow", "playwright"}
    assert everything & optional == set()


def test_the_floors_hold() -> None:
    run(Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache")


def test_the_code_is_formatted_and_linted() -> None:
    run(sys.executable, "-m", "ruff", "format", "--check", ".")
    run(sys.executable, "-m", "ruff", "check", ".")


@pytest.mark.skipif(
    find_spec("vllm") is None or find_spec("ray") is None,
    reason="types of optional packages: vLLM or Ray is not installed, and could not be",
)
@pytest.mark.slow
def test_the_types_hold() -> None:
    run(
        *(sys.executable, "-m", "pyright"),
        *("--project", "pyproject.toml", "--pythonpath", sys.executable),
        # Objects of many modules live long: collecting garbage would copy them often.
        env={**os.environ, "NODE_OPTIONS": "--max-semi-space-size=64"},
    )


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Return all names that a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_modules_import_each_other() -> None:
    # In functions and for type checking neither, which import-linter does not look at.
    trees = {dotted(path): tree for path, tree in TREES.items()}
    graph = {
        name: {found if found in trees else found.rpartition(".")[0] for found in imports_of(tree)}
        & trees.keys()
        for name, tree in trees.items()
    }
    assert sum(map(len, graph.values())) > len(graph), "the search finds imports"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")


def test_the_core_names_no_plug_in() -> None:
    named = re.compile(r"plugins[./]\w")
    core = [path for path in MODULES if not {"plugins", "recipes"} & {*path.parts}]
    found = [dotted(path) for path in core if named.search(path.read_text(encoding="utf-8"))]
    assert found == [] and len(core) > 100


STARTS = re.compile(
    r"^\s*(import|from) (subprocess|multiprocessing)\b"
    r"|\bos\.(fork|forkpty|killpg|popen|posix_spawnp?|spawn\w+|system)\("
    r"|\b(subprocess_(exec|shell)|(open|run|to)_process|ProcessPoolExecutor)\b",
    re.MULTILINE,
)
MAY_START = {
    "es_cookbook.common.machine.processes",
    "es_cookbook.recipes.code.asserts_inside",  # Runs in the sandbox.
    "es_cookbook.rl.grading.worker",  # Loads a main program as multiprocessing does.
}


def test_one_module_starts_processes() -> None:
    found = {dotted(path) for path in MODULES if STARTS.search(path.read_text(encoding="utf-8"))}
    assert found == MAY_START


def test_no_folder_has_more_than_13_modules() -> None:
    counts = Counter(path.parent for path in MODULES)
    assert {str(folder): count for folder, count in counts.items() if count > 13} == {}


def test_no_module_is_longer_than_600_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n")
        for path in MODULES
    }
    assert {name: length for name, length in lengths.items() if length > 600} == {}


def decorated(node: ast.ClassDef | ast.FunctionDef, decorator: str) -> bool:
    return any(ast.unparse(found).partition("(")[0] == decorator for found in node.decorator_list)


def is_of_class(statement: ast.AnnAssign) -> bool:
    return ast.unparse(statement.annotation).startswith("ClassVar")


def config_fields() -> Iterator[tuple[str, ast.AnnAssign, str]]:
    """Yield (Class.field, its definition, its name) for every chz class in the package."""
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and decorated(node, "chz.chz"):
                for statement in node.body:
                    if isinstance(statement, ast.AnnAssign) and not is_of_class(statement):
                        name = ast.unparse(statement.target)
                        yield f"{node.name}.{name}", statement, name


class Reads(ast.NodeVisitor):
    """Names of attributes that are read, except by a config that only checks itself."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not decorated(node, "chz.validate"):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.names.add(node.attr)
        self.generic_visit(node)


def test_every_field_of_every_config_is_read_somewhere() -> None:
    reads = Reads()
    for tree in TREES.values():
        reads.visit(tree)
    fields = list(config_fields())
    assert len(fields) > 10, "the search finds the configs"
    # `WeightedSum` and `Config` read parts by their names.
    read = reads.names | REWARD_NAMES.keys() | REGULARISER_NAMES.keys()
    assert [field for field, _, name in fields if name not in read] == []


def test_every_field_of_every_config_is_documented_for_help() -> None:
    undocumented = {
        field for field, statement, _ in config_fields() if not is_documented(statement.value)
    }
    redefined = {f"CLIConfig.{name}" for name in chz.chz_fields(Config)}
    assert undocumented - redefined == set(), "recipes have the docs of what they inherit"


def is_documented(value: ast.expr | None) -> bool:
    """Return whether it is a call with a `doc`, or to a function that returns only such calls.

    `Names.field` has it as its only argument, `built_field` as its second.
    """
    if not isinstance(value, ast.Call):
        return False
    name = getattr(value.func, "attr", getattr(value.func, "id", ""))
    place = {"field": 1, "built_field": 2}.get(name, len(value.args) + 1)
    if len(value.args) >= place or any(keyword.arg == "doc" for keyword in value.keywords):
        return True
    makers = [
        node
        for node in ast.walk(TREES[PACKAGE / "evolution" / "schedules.py"])
        if isinstance(node, ast.FunctionDef) and node.name == getattr(value.func, "id", None)
    ]
    returned = [node for maker in makers for node in ast.walk(maker) if type(node) is ast.Return]
    return bool(returned) and all(is_documented(node.value) for node in returned)


SEEDS = {"torch.manual_seed", "np.random.seed", "random.seed"}


class GlobalRandomness(ast.NodeVisitor):
    """Uses of global random state, except where it is put back afterwards."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def visit_With(self, node: ast.With) -> None:
        if not any("fork_rng" in ast.unparse(item) for item in node.items):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr.endswith("seed") and ast.unparse(node) in SEEDS:
            self.lines.append(node.lineno)
        self.generic_visit(node)


def test_no_module_changes_global_random_state() -> None:
    changed: dict[str, list[int]] = {}
    for path, tree in TREES.items():
        uses = GlobalRandomness()
        uses.visit(tree)
        if uses.lines:
            changed[str(path.relative_to(ROOT))] = uses.lines
    assert changed == {}


RUNS_WHAT_IT_READS = {
    # What is read comes from processes that the run itself has started, and from no file.
    "es_cookbook.engines.wire": {"pickle.load", "pickle.loads"},
    "es_cookbook.engines.ray.cluster": {"pickle.loads"},
    "es_cookbook.engines.vllm.worker": {"pickle.loads"},
    "es_cookbook.rl.grading.worker": {"pickle.loads", "spawn.prepare"},
    "es_cookbook.rl.grading.workers": {"pickle.loads"},
    # Runs in the sandbox.
    "es_cookbook.recipes.code.asserts_inside": {"compile", "exec", "importlib.import_module"},
    # What a set on the Hub says of itself: plain values only.
    "es_cookbook.plugins.hub.sets": {"yaml.safe_load"},
    # Names from a config, after they were checked; names that are written in the package.
    "es_cookbook.common.trust": {"importlib.import_module"},
    "es_cookbook.plugins.play.play": {"importlib.import_module"},
    "es_cookbook.cli": {"importlib.import_module"},
    "es_cookbook": {"importlib.import_module"},
    # Machine code that numba made here and keeps beside the package, as numba itself reads it.
    "es_cookbook.evolution.noise.compiled": {"pickle.loads"},
}
"""Module -> calls in it that run what they are given."""
CAN_RUN = re.compile(
    r"(pickle|dill|cloudpickle|marshal|joblib|shelve|yaml)\.\w*(load|open)\w*"
    r"|(pickle\.)?Unpickler|eval|exec|compile|__import__|os\.system|os\.popen"
    r"|(importlib\.)?import_module|runpy\.\w+|spawn\.prepare|(torch|np|numpy)\.load|torch\.hub\.\w+"
)
SAFE = {("weights_only", True), ("allow_pickle", False)}


def calls_that_run_what_they_read(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and CAN_RUN.fullmatch(called := ast.unparse(node.func)):
            values = {(k.arg, k.value.value) for k in node.keywords if is_constant(k.value)}
            if not values & SAFE:
                yield called
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "marshal", "importlib"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            given = ast.unparse(node.value)
            yield from [f"trust_remote_code={given}"] * (given != "False")


def is_constant(node: ast.expr) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant)


def test_nothing_that_is_read_is_run_but_by_those_who_are_named() -> None:
    found = {dotted(path): set(calls_that_run_what_they_read(TREES[path])) for path in TREES}
    assert {module: calls for module, calls in found.items() if calls} == RUNS_WHAT_IT_READS


AUTO = re.compile(r"Auto\w+\.from_(pretrained|config)")


def test_no_model_or_tokenizer_is_read_with_code_of_its_own() -> None:
    unsure = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and AUTO.fullmatch(ast.unparse(node.func))
        if "trust_remote_code" not in {keyword.arg for keyword in node.keywords}
    ]
    assert unsure == []


PRIVATE = re.compile(r"(.*\.)?_[A-Za-z]\w*")
NOT_THE_PACKAGES = {"os._exit", "torch._dynamo", "server._stop"}
"""Private names of others: a child that was forked leaves by one, compiles nothing by another, and
a server that forks is stopped by the last.
"""


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return the uses of private names that are not the test's own: (line, name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            private = [alias.name for alias in node.names if PRIVATE.fullmatch(alias.name)]
            yield from ((node.lineno, f"{node.module}.{name}") for name in private)
        elif isinstance(node, ast.Call):  # of setattr, getattr, mock.patch
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            private = [t for t in texts if isinstance(t, str) and PRIVATE.fullmatch(t)]
            yield from ((node.lineno, ast.unparse(node)) for _ in private)


def test_no_test_reaches_into_what_is_private() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, what in private_uses(ast.parse(path.read_text(encoding="utf-8")))
        if what not in NOT_THE_PACKAGES
    ]
    assert found == []

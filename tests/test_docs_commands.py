"""Every command line and option that the pages show is accepted: its Config is built, not run.

That the commands do what they say is tested beside them, in tests/cli, tests/plugins and
tests/recipes.
"""

import contextlib
import importlib
import io
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import chz
import pytest

from docs.pages import config_of
from es_cookbook.__main__ import COMMANDS, RECIPES
from es_cookbook.cli.evaluate.evaluate import EvaluateConfig
from es_cookbook.cli.options import recipe_config
from es_cookbook.cli.resume import Resume
from es_cookbook.cli.train import TrainConfig, built_for, with_sizes
from es_cookbook.common.cli import run_cli, run_with_fields, split_options, typed_options
from es_cookbook.common.names import Names
from es_cookbook.common.options import built
from es_cookbook.engines.base import ENGINE_NAMES
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES
from es_cookbook.evolution.spaces.base import SEARCH_SPACE_NAMES
from es_cookbook.plugins.branches.fork import Fork
from es_cookbook.plugins.generate.reconsider import ReconsiderConfig
from es_cookbook.plugins.gradients import policy_gradient
from es_cookbook.plugins.gradients.commands.compare_gradients import CompareGradients, contestants
from es_cookbook.plugins.gradients.commands.policy_gradient import of_recipe, recipe_in
from es_cookbook.plugins.gradients.grpo import config as grpo
from es_cookbook.plugins.gradients.sft import SFTConfig
from es_cookbook.plugins.plan.sigma import Sigma
from es_cookbook.plugins.report.commands.compare import Compare, runs
from es_cookbook.plugins.sweep.command import Sweep, maker
from es_cookbook.plugins.sweep.search import ends, grid
from es_cookbook.recipes.countdown.train_cli import CLIConfig
from es_cookbook.rl.objectives import OBJECTIVE_NAMES
from es_cookbook.rl.types import RLDatasetBuilder
from tests.families import sampled

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "es_cookbook").rglob("README.md")),
]
LAB_NOTES = "lab_notes.md"
"""Dated: its options are those of its day."""
_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def code_and_text(page: Path) -> tuple[str, str]:
    """Return the code blocks of a page, continued lines joined, and the page without them."""
    text = page.read_text(encoding="utf-8")
    blocks = _FENCED.findall(text)
    rest = _FENCED.sub("", text)
    indented = "\n".join(re.findall(r"^ {4}(.*)", rest, flags=re.MULTILINE))
    return re.sub(r" *\\\n +", " ", "\n".join([*blocks, indented])), rest


def inline(page: Path) -> Iterator[str]:
    """Return the inline code of sentences and tables."""
    _, rest = code_and_text(page)
    yield from (" ".join(found.split()) for found in re.findall(r"`([^`]+)`", rest))


def lines(start: str) -> list[tuple[str, str]]:
    """Return (page, line) of the lines that begin so, after variables, a prompt or a command."""
    found: dict[tuple[str, str], None] = {}
    behind = r".*(?:\$|&&|\||--|uv run) |[A-Z_]+=\S+ "
    begins = re.compile(rf"^(?:{behind})?((?:{start})\b.*?)(?: +# .*)?$")
    for page in PAGES:
        code, _ = code_and_text(page)
        folded = re.findall(r"entrypoint: >-\n((?: {4}.*\n)+)", page.read_text(encoding="utf-8"))
        for text in (*code.splitlines(), *inline(page), *(" ".join(it.split()) for it in folded)):
            if match := begins.match(text):
                found[str(page.relative_to(ROOT)), match[1]] = None
    return list(found)


PLACEHOLDERS = {
    "generation=t": "generation=3",
    "optimizers=es,NAME": "optimizers=es,momentum",
    "surrogate.attempts=K": "surrogate.attempts=4",
}
"""What a page leaves open, and what a reader may put there."""


def filled(line: str) -> list[str]:
    """Return the words of a line without options whose values are placeholders."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line)]
    return [word for word in words if not re.search("[…<]", word)]


REQUIRED = {"study": "log_path=x", "d_prime": "log_path=x", "logic_errors": "after=x"}
"""Program of a recipe -> what it needs, if not an output."""
RECIPE_PROGRAMS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): REQUIRED.get(path.stem, "output=x")
    for folder in ("es_cookbook/recipes", "es_cookbook/plugins", "tools")
    for path in (ROOT / folder).rglob("*.py")
    if path.stem != "train_cli" and "run_cli(main, Config)" in path.read_text(encoding="utf-8")
}

NOT_LINES = re.compile(
    r"es-cookbook(\[\w+\]|:latest| <name>)|(es-cookbook|python -m es_cookbook) COMMAND( --help)?"
)
"""Beginnings of lines, and what is none."""


def commands() -> list[tuple[str, list[str]]]:
    """Return (command or module, options) of every line, each once."""
    found: dict[tuple[str, ...], None] = {}
    for _, line in lines(r"es-cookbook|python -m es_cookbook|python -m tools"):
        if NOT_LINES.fullmatch(line):
            continue
        words = filled(line)
        if words[:2] == ["python", "-m"]:
            words = words[3:] if words[2] == "es_cookbook" else words[2:]
        else:
            words = words[1:]
        found[tuple(words)] = None
    return [(name, options) for name, *options in found]


def test_the_search_finds_the_lines() -> None:
    names = [name for name, _ in commands()]
    assert set(names) >= {*COMMANDS, *RECIPES}
    assert len(names) > 30


def fields_of(main: Callable[..., object], own: type, *needed: str) -> Callable[..., None]:
    """Return the parser of a command that also takes options of a run's Config."""
    return lambda options: run_with_fields(main, own, "", [*needed, *options])


def make_trials(config: Sweep, fields: Mapping[str, str]) -> None:
    """Make every trial of a sweep that varies options."""
    make, space = maker(config, fields)
    if space:
        for trial in grid(space) if config.sampler == "grid" else ends(space):
            make(trial.options)


def parse_evaluate(options: Sequence[str], config_class: type = EvaluateConfig) -> None:
    """Parse the options of `evaluate`, and those of a recipe or of rows."""
    given = typed_options(options, config_class)
    own, others = split_options({"log_path": "x", **given}, config_class)
    run_cli(lambda _: None, config_class, [f"{name}={value}" for name, value in own.items()])
    is_plain = own["log_path"] == "runs/plain"
    recipe = own.get("recipe") or ("markovian" if is_plain else "countdown")
    parse = PARSERS["train" if others.keys() & {"data", "environment"} else recipe]
    parse([f"{name}={value}" for name, value in others.items()])


def plain(own: type, *needed: str) -> Callable[[Sequence[str]], None]:
    """Return the parser of a command that only builds its Config."""

    def build(_: object) -> None:
        pass

    return lambda options: run_cli(build, own, [*needed, *options])


@chz.chz
class InstalledConfig(TrainConfig):
    """Trains on a taskset, that of the reader's package."""

    dataset: RLDatasetBuilder = chz.field(
        meta_factory=Names(
            {"verifiers": "es_cookbook.plugins.verifiers.dataset:TasksetProblems"},
            default="verifiers",
            settings={"verifiers": {"taskset": object}},
        ),
        doc="problems",
    )


def parse_train(options: Sequence[str]) -> None:
    """Parse the options of `train` with an existing function or package for the reader's."""
    own = ("environment=", "dataset.chat.", "dataset.options=")
    has_tools = any(option.startswith("tools=") for option in options)
    if not has_tools and any(option.startswith(own) for option in options):
        others = [option for option in options if not option.startswith("environment=")]
        run_cli(lambda _: None, InstalledConfig, ["model_name=x", *others])
        return
    function = "es_cookbook.plugins.judges.task:unscored"
    given = [re.sub(r"reward=\S+:score$", f"reward={function}", option) for option in options]
    needed = ["dataset.source=x", f"dataset.reward={function}", "model_name=x"]
    if "dataset=mixture" in options:
        needed = needed[2:]
    run_cli(lambda _: None, TrainConfig, with_sizes([*needed, *given]))


def parse_policy_gradient(options: Sequence[str]) -> None:
    """Parse the options of a policy gradient: a recipe's, or those of rows."""
    recipe, others = recipe_in(options)
    given = [re.sub(r"reward=\S+:score$", "reward=exact", option) for option in others]
    if any(option.startswith("data=") for option in given):
        run_cli(lambda _: None, policy_gradient.Config, given)
    else:
        run_cli(lambda _: None, of_recipe(policy_gradient.Config, recipe or "countdown"), given)


def parse_grpo(options: Sequence[str]) -> None:
    """Parse the options of GRPO, with a recipe's."""
    recipe, others = recipe_in([each for each in options if not each.startswith("config=")])
    run_cli(lambda _: None, of_recipe(grpo.Config, recipe or "countdown"), others)


def parse_sft(options: Sequence[str]) -> None:
    needed = ["dataset.source=x", "model_name=x", "output=x"]
    run_cli(lambda _: None, SFTConfig, [*needed, *options])


NEEDED = {
    **dict.fromkeys(("frames", "play", "plot", "serve", "show", "report"), "log_path=x"),
    "runs": "",
    "rewind": "log_path=x generation=1",
    "export": "log_path=x output=y",
    "inspect": "log_path=x task=x",
    "plan": "model_name=x",
    "generate": "source=x output=x.jsonl model=x",
    "quantise": "model_name=x output=y",
    "hub": "path=x repo_id=me/x",
}
"""Command that takes no options but its own -> those that must be given."""
PARSERS: dict[str, Callable[[Sequence[str]], None]] = {
    **{
        n: plain(config_of(n, COMMANDS[n].partition(":")[0]), *needed.split())
        for n, needed in NEEDED.items()
    },
    **{name: plain(recipe_config(name)) for name in RECIPES},
    **{
        name: plain(import_module(name).Config, required)
        for name, required in RECIPE_PROGRAMS.items()
    },
    "es_cookbook.recipes.countdown.train_cli": plain(CLIConfig),
    "train": parse_train,
    "policy_gradient": parse_policy_gradient,
    "grpo": parse_grpo,
    "sft": parse_sft,
    "es_cookbook.plugins.gradients.sft": parse_sft,
    "compare": fields_of(runs, Compare, "recipe=countdown", "optimizers=es,momentum"),
    "compare-gradients": fields_of(contestants, CompareGradients),
    "sweep": fields_of(make_trials, Sweep),
    "resume": fields_of(lambda _, fields: built(CLIConfig(), fields), Resume, "log_path=x"),
    "fork": fields_of(lambda _, fields: built(CLIConfig(), fields), Fork, "log_path=x", "output=y"),
    "sigma": fields_of(lambda own, fields: built_for(own.recipe, fields), Sigma),
    "evaluate": parse_evaluate,
    "reconsider": lambda options: parse_evaluate(options, ReconsiderConfig),
}
"""Command -> builds its Config from options; what must be given has a value already."""


def refusal(parser: Callable[[Sequence[str]], None], options: Sequence[str]) -> str:
    """Return the message that refuses these options; empty if they are accepted."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser(options)
    except SystemExit:
        return said.getvalue().strip()
    return ""


@pytest.mark.parametrize(("name", "options"), sampled(commands(), 120))
def test_a_line_is_accepted_as_it_stands(
    name: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/builders/config.md").read_text(encoding="utf-8")
    (tmp_path / "run.yaml").write_text(page.split("```yaml\n")[1].partition("```")[0])
    (tmp_path / "es_cookbook").symlink_to(ROOT / "es_cookbook")
    monkeypatch.chdir(tmp_path)
    if options and name != "--help":
        assert refusal(PARSERS[name], options) == ""


OPTIONS = re.compile(r"'?[a-z_]+(\.[a-z_]+)*=\S.*")
NOT_OPTIONS = {
    "dtype='auto'": "an argument of vLLM",
    "engine=my_package.engines:Fast": "a package of the reader's",
    "profile.json": "a file of a run",
}


CONTEXT = {
    "docs/multi_gpu.md": ["engine=ray", "engine.engine=vllm"],
    "docs/runs.md": ["trackers.hub.repo_id=me/run"],
    "docs/trust.md": ["engine=ray"],
    "docs/objectives.md": ["objective=length_penalty", "attempts=4", "sampling.temperature=1"],
}
"""Page -> options that its lines have already where it says what else they may have."""


def quoted_options() -> list[tuple[str, str]]:
    """Return (page, options) of inline code that consists of options with values."""
    found: dict[tuple[str, str], None] = {}
    for page in PAGES:
        for text in inline(page):
            if page.name != LAB_NOTES and OPTIONS.fullmatch(text) and text not in NOT_OPTIONS:
                found[str(page.relative_to(ROOT)), text] = None
    return list(found)


@pytest.mark.parametrize(("page", "text"), sampled(quoted_options(), 120))
def test_options_in_a_sentence_are_accepted_as_they_stand(page: str, text: str) -> None:
    options = filled(text)
    # The page's own recipe, the one most pages are about, and commands: they accept nearly all.
    first = (*page.split("/"), "countdown", *COMMANDS)
    names = sorted(PARSERS, key=lambda name: first.index(name) if name in first else len(first))
    attempts = [(PARSERS[name], options) for name in names]
    if page in CONTEXT:
        attempts.append((PARSERS["countdown"], [*CONTEXT[page], *options]))
        attempts.append((PARSERS["plan"], ["engine=vllm", *options]))
    accepted = any(refusal(*attempt) == "" for attempt in attempts)
    assert accepted, f"{page}: {text}: {refusal(*attempts[0])}"


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("engine", ENGINE_NAMES),
        ("search_space", SEARCH_SPACE_NAMES),
        ("optimizer", OPTIMIZER_NAMES),
        ("objective", OBJECTIVE_NAMES),
    ],
)
def test_the_readme_lists_the_names_of_a_part(field: str, names: Mapping[str, str]) -> None:
    (row,) = re.findall(rf"^\|.*`{field}=.*$", PAGES[0].read_text(encoding="utf-8"), re.MULTILINE)
    options = row.split("|")[2]
    listed = re.findall(rf"(?:\b{field}=|`)(\w+)(?=[ `])", options)
    assert set(listed) == set(names)


def test_pages_name_every_extra_recipe_and_search_space() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [f"[{extra}]" for extra in project["optional-dependencies"]]
    recipes = [f"\n| [`{name}`](" for name in RECIPES]
    spaces = [f"`{target.partition(':')[2]}`" for target in SEARCH_SPACE_NAMES.values()]
    for page, names in (("README.md", extras + recipes), ("docs/history_format.md", spaces)):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [name for name in names if name not in text] == []


@pytest.mark.parametrize("target", [line.split()[1] for _, line in lines(r"make") if " " in line])
def test_a_target_of_make_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "line", sorted({line for page, line in lines(r"python -m benchmarks") if LAB_NOTES not in page})
)
def test_a_benchmark_can_be_imported(line: str) -> None:
    module = line.split()[2]
    if module != "benchmarks.NAME":
        importlib.import_module(module)

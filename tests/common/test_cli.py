"""The command line: what is wrong is said in one sentence, without a traceback."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

import chz
import pytest

from es_cookbook import ES, RayPoolBuilder
from es_cookbook.common.cli import UNNAMED, arguments, run_cli, run_with_fields
from es_cookbook.common.errors import EngineError
from es_cookbook.common.names import Names
from es_cookbook.common.options import built
from es_cookbook.evolution.fitness import FITNESS_NAMES, Fitness, Raw, ZScore
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES, OptimizerBuilder
from es_cookbook.evolution.schedules import Constant, Cosine
from es_cookbook.plugins.regularisers.kl import KLToBase

_OPTIMIZERS = Names(OPTIMIZER_NAMES, default="es", settings={"es": {"sigma": 0.005}})
_FITNESS = Names({**FITNESS_NAMES, "remote": "no_such_package:Fitness"}, default="zscore")


@chz.chz
class Config:
    """Train a thing.

    This paragraph is for readers of the source.
    """

    optimizer: OptimizerBuilder = _OPTIMIZERS.field("how it moves")
    fitness: Fitness = _FITNESS.field("rewards to fitness")
    num_generations: int = chz.field(default=10, doc="how long")
    log_path: str | None = chz.field(default=None, doc="where to write")
    if_exists: Literal["ask", "resume"] = chz.field(default="ask", doc="what to do")
    tags: tuple[str, ...] = chz.field(default=("a", "b"), doc="labels")
    kl: KLToBase | None = chz.field(default=None, doc="or none")
    pool: RayPoolBuilder | None = chz.field(default=None, doc="or none")


@chz.chz
class NeedsModel:
    """A config with an option that must be given."""

    model: str = chz.field(doc="which model")
    fitness: Fitness | None = chz.field(default=None, doc="or none")


def run(*argv: str) -> Config:
    seen: list[Config] = []
    run_cli(seen.append, Config, argv)
    (config,) = seen
    return config


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as caught:
        run(*argv)
    said = capsys.readouterr().err
    assert said.count("\n") == 1, "one sentence on one line"
    return caught.value.code, said


def test_options_reach_the_parts_of_the_config() -> None:
    config = run("optimizer.learning_rate=5e-3", "fitness=raw", "--num_generations=3", "tags=x,y,z")
    assert config.optimizer == ES(sigma=0.005, learning_rate=5e-3)
    assert config.fitness == Raw()
    assert (config.num_generations, config.tags) == (3, ("x", "y", "z"))


def change(config: Config, **given: str) -> Config:
    """As a command that takes options of a config it has just read."""
    seen: list[Config] = []
    fields = {name.replace("__", "."): value for name, value in given.items()}
    run_cli(lambda _: seen.append(built(config, fields)), Config, [])
    return seen[0]


def test_options_change_only_their_fields_of_a_config() -> None:
    read = Config(
        optimizer=ES(sigma=0.5, sigma_schedule=Cosine(final=0.2)), fitness=Raw(), tags=("c",)
    )
    assert change(read) == read
    assert change(read, tags="x,y", fitness="zscore") == chz.replace(
        read, tags=("x", "y"), fitness=ZScore()
    )
    optimizer = read.optimizer
    assert change(read, optimizer__learning_rate="2.0") == chz.replace(
        read, optimizer=chz.replace(optimizer, learning_rate=2.0)
    )
    assert change(read, optimizer__sigma_schedule__final="0.3").optimizer == chz.replace(
        optimizer, sigma_schedule=Cosine(final=0.3)
    ), "a schedule that is not the default's stays what it is"
    afresh = change(read, optimizer="es", optimizer__learning_rate="2.0").optimizer
    assert afresh == ES(sigma=0.005, learning_rate=2.0), "a class that is named begins afresh"
    assert change(read, optimizer__sigma_schedule="none").optimizer == chz.replace(
        optimizer, sigma_schedule=Constant()
    )


def test_options_are_split_between_a_command_and_a_run() -> None:
    seen: list[tuple[NeedsModel, dict[str, str]]] = []
    argv = ["model=m", "--tags=a=b", "optimizer.sigma=1"]
    run_with_fields(lambda own, fields: seen.append((own, fields)), NeedsModel, "", argv)
    assert seen == [(NeedsModel(model="m"), {"tags": "a=b", "optimizer.sigma": "1"})]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("optimiser=es", "unknown option 'optimiser'; did you mean 'optimizer'?"),
        ("optimizer=ess", "optimizer=ess: unknown name 'ess': did you mean 'es'? Accepted: "),
        (
            "optimizer.sigme=3",
            "unknown option 'optimizer.sigme'; did you mean 'optimizer.sigma'? --help all lists",
        ),
        ("learning_rate=1", "option 'learning_rate'; did you mean 'optimizer.learning_rate'?"),
        ("nothing_like_it=1", "unknown option 'nothing_like_it'; --help all lists all"),
        ("fitness=remote", "fitness=remote: no_such_package:Fitness cannot be imported"),
        ("num_generations=many", "num_generations=many: it must be int"),
        ("if_exists=resme", "if_exists=resme: did you mean 'resume'? Accepted: ask, resume"),
        ("...sigma=1", "unknown option '...sigma'; did you mean 'optimizer.sigma'?"),
        ("--seed", "an option is written name=value, found '--seed'"),
        ("pool=yes", "pool=yes: it must be RayPoolBuilder | None"),
        ("pool.num_engines=many", "pool.num_engines=many: it must be int"),
    ],
)
def test_a_mistyped_option_gets_one_sentence_with_the_nearest_and_code_2(
    capsys: pytest.CaptureFixture[str], argument: str, said: str
) -> None:
    code, sentence = refused(capsys, argument)
    assert code == 2
    assert said in sentence


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["--seed", "1", "--sampling.max-tokens", "8"], ["seed=1", "sampling.max_tokens=8"]),
        (["runs/mine", "--help", "all"], ["runs/mine", "--help", "all"]),
        (
            ["--seed=1", "--prompt", "Q: {q} =", "--x", "y=2"],
            ["--seed=1", "prompt=Q: {q} =", "--x", "y=2"],
        ),
    ],
)
def test_a_name_and_its_value_may_be_two_words(typed: list[str], read: list[str]) -> None:
    assert arguments(typed) == read


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("optimizer.sigma=-1", "optimizer.sigma must be above 0, found -1.0"),
        (
            "optimizer.sigma_schedule=cosine optimizer.sigma_schedule.final=-1",
            "optimizer.sigma_schedule.final must be 0 or more, found -1.0",
        ),
        (
            "optimizer=genetic optimizer.species_by=behaviour",
            "optimizer.species_by=behaviour needs species_distance=...: how much a",
        ),
        ("pool.engine=vllm pool.engine.max_genomes=0", "pool.engine.max_genomes must be above 0"),
    ],
)
def test_an_error_of_a_part_names_the_option_as_typed(
    capsys: pytest.CaptureFixture[str], arguments: str, sentence: str
) -> None:
    code, said = refused(capsys, *arguments.split())
    assert code == 1
    assert said.startswith(sentence)


def test_a_missing_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_cli(print, NeedsModel, [])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "missing model=...; --help lists all options\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (EngineError("the engine hung"), 1, "the engine hung\n"),
        (ExceptionGroup("a", [ExceptionGroup("b", [EngineError("lost")])]), 1, "lost\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("stopped after generation 3"), 130, "stopped after generation 3\n"),
        (BaseExceptionGroup("a", [KeyboardInterrupt(), EngineError("x")]), 130, "interrupted\n"),
    ],
)
def test_an_error_on_purpose_is_one_sentence_also_out_of_a_task_group(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        run_cli(raising(error), Config, [])
    assert (caught.value.code, capsys.readouterr().err) == (code, said)


def raising(error: BaseException) -> Callable[[Config], None]:
    def main(config: Config) -> None:
        del config
        raise error

    return main


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("a bug"), ExceptionGroup("tasks", [EngineError("x"), KeyError("y")])],
)
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_cli(raising(error), Config, [])


@chz.chz
class OfRuns:
    """A command of one run, or of several."""

    log_path: str = chz.field(doc="a run", metadata=UNNAMED)
    depth: int = chz.field(default=1, doc="how deep")


@chz.chz
class OfSeveralRuns:
    """A command of several runs."""

    log_path: tuple[str, ...] = chz.field(doc="runs", metadata=UNNAMED)


def test_a_run_needs_no_option_name_and_keeps_the_order_in_which_it_is_typed() -> None:
    one: list[OfRuns] = []
    run_cli(one.append, OfRuns, ["runs/sweep/optimizer.sigma=0.01-seed0", "depth=2"])
    assert one == [OfRuns(log_path="runs/sweep/optimizer.sigma=0.01-seed0", depth=2)]
    several: list[OfSeveralRuns] = []
    run_cli(several.append, OfSeveralRuns, ["b", "log_path=a,c", "d"])
    assert several == [OfSeveralRuns(log_path=("b", "a", "c", "d"))]


def test_two_paths_for_a_command_of_one_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_cli(print, OfRuns, ["a", "b"])
    assert capsys.readouterr().err == "log_path is one path here, found a and b\n"


@chz.chz
class OfManyOptions(Config):
    """A command with options that people set often, and others."""

    common_options: ClassVar[tuple[str, ...]] = ("seed", "optimizer.sigma")
    num_generations: int = 20
    seed: int = 7


def test_help_shows_what_is_set_often_and_help_all_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_cli(print, OfManyOptions, ["tags=z", "--help"])
    page = capsys.readouterr().out
    assert re.findall(r"^  (\S+)", page, re.MULTILINE) == [
        "optimizer.sigma=0.005",
        "tags=z",
        "seed=7",
    ]
    assert re.search(r"--help all lists the other \d+ options, too", page)
    run_cli(print, OfManyOptions, ["--help", "all"])
    page = capsys.readouterr().out
    assert "  num_generations=20" in page and "how long [int]" in page
    assert "  optimizer.sigma_schedule=none" in page


def test_typed_options_override_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "num_generations: 7  # how long\nlog_path: 007\ntags: [x, y]\n"
        "optimizer.sigma: 1e-3\noptimizer:\n  learning_rate: 2\nfitness: raw\n"
    )
    config = run("fitness=zscore", f"config={file}")
    assert config == Config(
        optimizer=ES(sigma=1e-3, learning_rate=2.0),
        num_generations=7,
        log_path="007",
        tags=("x", "y"),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("seed", "it must hold options"),
        ("a: [[1], x]", "'a.0'"),
        ("a: &a [*a]", "cannot be read: found unconstructable recursive node"),
        ("tags: !!python/object/apply:os.system [ls]", None),
    ],
)
def test_a_file_without_options_gets_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, said: str | None
) -> None:
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    if said is None:  # Tags are text.
        assert run(f"config={file}").tags == ("ls",)
    else:
        assert said in refused(capsys, f"config={file}")[1]

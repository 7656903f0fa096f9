"""Measure a run's centre or a model on held-out problems, alone or against another.

    python -m es_cookbook evaluate runs/mine
    python -m es_cookbook evaluate runs/mine against=base answers=10
    python -m es_cookbook evaluate runs/mine generation=20 attempts=8 temperature=1
    python -m es_cookbook evaluate runs/mine voters=16 against=base
    python -m es_cookbook evaluate model_name=Qwen/Qwen2.5-0.5B-Instruct recipe=rush_hour
    python -m es_cookbook evaluate model_name=exported data=rows.jsonl reward=my_rewards:score

The problems are the run's own held-out ones, a recipe's, or rows as in `train`. Options of the data
set and of the engine are those of a run: `dataset.num_test=1000`, `sampling.max_tokens=64`,
`engine=vllm`. Without options a run is measured as it measures itself, so the numbers are those in
its `metrics.jsonl`, bit for bit.

With `voters=16` the best 16 genomes of a generation answer once each in place of its centre, and
the answer that most of them give counts.

`against=` names another run or model, or another generation. Both attempt the same problems with
the same sampling seeds.

The run directory is only read; the run may be in progress.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path

import chz

from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.cli import RECIPES
from es_cookbook.cli.evaluate.measuring import Evaluation, Setting, Subject, measure, of_model
from es_cookbook.cli.evaluate.report import answers_text, measured, report, to_json
from es_cookbook.cli.options import RunOrModel, new_output, recipe_config
from es_cookbook.cli.train import TrainConfig
from es_cookbook.common.checks import check_range, in_range
from es_cookbook.common.cli import run_with_fields
from es_cookbook.common.errors import ConfigError, ModelError, RunDirectoryError, did_you_mean
from es_cookbook.common.options import built
from es_cookbook.population.evaluate import check_evaluation
from es_cookbook.population.results import VOTE
from es_cookbook.rl.data.problem_dataset import one_by_one
from es_cookbook.rl.objectives import REWARD
from es_cookbook.rl.types import ANSWER
from es_cookbook.runs.config import Config, RunConfig
from es_cookbook.runs.directory.directory import CONFIG, check_is_run
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.presets import SHORT
from es_cookbook.runs.recorded import RecordedRun, Split, open_run
from es_cookbook.runs.signals import result_until_signal

_TIMEOUTS = ("rollout_timeout", "turn_timeout", "max_failed_fraction")
_PARTS = ("dataset", "sampling", "engine", *_TIMEOUTS)
"""Options of a run that an evaluation accepts."""


@chz.chz
class OnProblems(RunOrModel):
    """What is measured, on which problems, and how."""

    recipe: str = chz.field(default="", doc="recipe whose problems are attempted; empty: the run's")
    split: Split = chz.field(default="test", doc="test: held-out problems; train: training ones")
    temperature: float | None = chz.field(default=None, doc="0 is greedy; None: eval_temperature")
    seed: int | None = chz.field(default=None, doc="sampling seed; None: the run's own")
    metric: str = chz.field(
        default="",
        doc="metric to show by tag, to compare in words and to count by pass@k; empty: correct or "
        "solved, whichever is reported, else reward",
    )

    _seed = in_range("seed", at_least=0)


@chz.chz
class EvaluateConfig(OnProblems):
    """Measure a run's centre or a model on held-out problems, alone or against another."""

    against: str = chz.field(
        default="",
        doc="compare with base, @GENERATION (of this run), RUN, RUN@GENERATION or a model",
    )
    attempts: int | None = chz.field(
        default=None,
        doc="attempts per problem; more than one also measures pass@k; None: the run's "
        "eval_attempts",
    )
    voters: int = chz.field(
        default=0,
        doc="number of genomes of the generation, the best by fitness, that answer once each in "
        "place of the centre; the answer that most of them give is the vote",
    )
    answers: int = chz.field(default=0, doc="problems whose answers are printed, to read")
    output: str = chz.field(default="", doc=".json file to write, with every problem; empty: none")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "answers", "voters", at_least=0)
        if self.voters and not self.log_path:
            raise ConfigError("voters are genomes of a run: give log_path=RUN")
        if self.voters and (self.attempts or 1) > 1:
            raise ConfigError(f"voters answer once each: leave attempts={self.attempts} out")


def resolve(
    config: OnProblems, fields: Mapping[str, str], attempts: int | None = None
) -> tuple[Setting, Subject]:
    """Return the setting and the subject of a measurement; call it inside `run_cli`.

    Args:
        config: config of the command.
        fields: options of a run as the user typed them.
        attempts: attempts at each problem; None: the run's `eval_attempts`.

    Raises:
        ESCookbookError: The run or the model is not there, or cannot be measured like that.
    """
    _check_fields(config, fields)
    if not config.log_path:
        task = _task(config, None, fields)
        subject = of_model(task.model_name, task.engine)
        if any(_first(path) == "search_space" for path in fields):  # An adapter to begin from, say.
            subject = dataclasses.replace(subject, search_space=task.space)
    else:
        run = _run(config, fields)
        task = _task(config, run.config, fields, run.model_name)
        subject = _of_run(config.log_path, run, config.generation, fields)
    return _setting(config, task, fields, attempts), subject


def _voting(config: EvaluateConfig, setting: Setting, subject: Subject) -> tuple[Setting, Subject]:
    """Return a subject for the best genomes of a run, one attempt each, instead of its centre."""
    run = subject.run
    if run is None:
        raise ConfigError("voters are genomes, and a run of gradients has none: leave voters out")
    generation = len(run.records) - 1 if config.generation is None else config.generation
    run.best(generation, config.voters)
    if run.centre_of(generation) != generation:
        raise ConfigError(
            f"the genomes of generation {generation} stand around an earlier centre "
            "(max_staleness=1), so they cannot vote in an evaluation"
        )
    once = dataclasses.replace(setting, config=chz.replace(setting.config, eval_attempts=1))
    return once, dataclasses.replace(subject, voters=config.voters, generations=(generation,))


def _check_fields(config: OnProblems, fields: Mapping[str, str]) -> None:
    """Refuse options that have no effect here."""
    known = _PARTS if config.log_path else (*_PARTS, "search_space")
    for path in fields:
        if path == "sampling.temperature":
            raise ConfigError("sampling.temperature is temperature=... in an evaluation")
        if _first(path) not in known:
            hint = did_you_mean(path, [*chz.chz_fields(config), *known])
            raise ConfigError(
                f"unknown option {path!r}{hint}; of the options of a run an evaluation takes "
                f"{', '.join(known)}"
            )


_open = functools.partial(open_run, or_of_gradients=True)


def _run(config: OnProblems, fields: Mapping[str, str]) -> RecordedRun:
    try:
        return _open(Path(config.log_path), config.model_name, config.trust, fields)
    except RunDirectoryError as error:
        if not (Path(config.log_path) / CONFIG).is_file():
            raise
        hint = f"a model is evaluated by model_name={config.log_path} recipe=..."
        raise RunDirectoryError(f"{error}; {hint}") from error


def _task(
    config: OnProblems,
    run: RunConfig | None,
    fields: Mapping[str, str],
    model_name: str | None = None,
) -> RunConfig:
    """Return the Config that gives the problems, the sampling options and a model's engine."""
    if run is not None and not config.recipe:
        apart = getattr(run.dataset, "test_source", None) if config.split == "test" else None
        if apart and "dataset.source" in fields and "dataset.test_source" not in fields:
            raise ConfigError(
                f"data={fields['dataset.source']} has no effect, since held-out problems of this "
                f"run are those of test_data={apart}: give test_data in place of data"
            )
        return built(run, fields)
    if not config.recipe and not fields.keys() & {"dataset", "dataset.source"}:
        raise ConfigError(
            f"recipe=... says which problems are attempted ({', '.join(RECIPES)}); or give "
            "rows by data=... prompt=... reward=..., a package by environment=..., or a run by "
            "log_path=..."
        )
    config_class = recipe_config(config.recipe) if config.recipe else TrainConfig
    given = dict(fields)
    if run is not None:  # On its own engine, whose options need not be the recipe's.
        given = {path: text for path, text in fields.items() if _first(path) != "engine"}
    if model_name := model_name or config.model_name:
        given["model_name"] = model_name
    task: RunConfig = built(config_class, given)
    return chz.replace(task, dataset=one_by_one(task.dataset))  # There may be a few problems only.


def _setting(
    config: OnProblems, task: RunConfig, fields: Mapping[str, str], attempts: int | None
) -> Setting:
    attempts = task.eval_attempts if attempts is None else attempts
    temperature = task.eval_temperature if config.temperature is None else config.temperature
    check_evaluation(attempts, temperature, prefix="")
    seed = task.seed if config.seed is None else config.seed
    how = {"eval_attempts": attempts, "eval_temperature": temperature, "seed": seed}
    given = "" if config.log_path else fields.get("dataset.source", task.dataset.label)
    return Setting(config.recipe or given, chz.replace(task, **how), config.split)


def _of_run(
    name: str, run: RecordedRun, generation: int | None, fields: Mapping[str, str]
) -> Subject:
    """Return a run at a generation; of a gradient run, its last checkpoint or its base."""
    config = run.config
    given = {path: text for path, text in fields.items() if _first(path) == "engine"}
    engine, trained = built(config, given).engine, Path(name)
    if isinstance(config, Config):
        at = (run.resolved(generation, "centre"),)
        return Subject(name, run.model_name, engine, config.space, run, at, trained)
    if generation == 0:
        title = f"{name} before its first generation"
        return Subject(title, config.model_name, engine, config.space)
    model = name if generation is None else f"{name}@{generation}"
    return Subject(name, model, engine, config.space, trained=trained)


def _against(config: EvaluateConfig, first: Subject, fields: Mapping[str, str]) -> list[Subject]:
    """Return the first subject and the subject that it is compared with."""
    is_base = config.against == "base"
    if is_base and first.run is not None and not first.search_space.starts_at_base:
        return [first, of_model(first.model_name, first.engine)]
    against = "@0" if is_base else config.against
    matched = re.fullmatch(r"(.*)@(\d+)", against)
    name, generation = (matched[1], int(matched[2])) if matched else (against, None)
    is_own = name in ("", config.log_path)
    if is_own and not config.log_path:
        raise ConfigError(
            f"against={config.against} is a generation of the run that is evaluated, and "
            "there is none: give log_path=RUN, or another run or model to compare with"
        )
    if is_own and first.run is not None:
        other = _of_run(first.name, first.run, generation, fields)
        if first.voters:
            return [first, other]
        if other.generations == first.generations:
            raise ConfigError(
                f"against={config.against} is what is evaluated itself; give another one"
            )
        return [dataclasses.replace(first, generations=(*first.generations, *other.generations))]
    if not is_own and generation is None and not _is_run(Path(name)):
        return [first, of_model(name, first.engine)]
    name = name or config.log_path
    run = _open(Path(name), config.model_name if is_own else None, config.trust, fields)
    return [first, _of_run(name, run, generation, fields)]


def _is_run(path: Path) -> bool:
    with contextlib.suppress(RunDirectoryError):
        check_is_run(path, or_of_gradients=True)
        return True
    return False


def _first(path: str) -> str:
    return path.partition(".")[0]


def main(config: EvaluateConfig, fields: Mapping[str, str]) -> None:
    """Evaluate, write the file, and print the table; call it inside `run_cli`.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
        KeyboardInterrupt: It was stopped.
    """
    if config.output and Path(config.output).suffix != ".json":
        raise ConfigError(f"output must be a .json file, found {config.output!r}")
    output = new_output(config.output, config.log_path) if config.output else None
    fields = RunConfig.whole_options(fields)
    setting, first = resolve(config, fields, config.attempts)
    if config.voters:
        setting, first = _voting(config, setting, first)
    subjects = _against(config, first, fields) if config.against else [first]
    setting.config.dataset.check()
    for subject in subjects:
        _check_model(config, subject)
    evaluation, *others = result_until_signal(
        functools.partial(measure, subjects, setting), "interrupted; nothing was written"
    )
    against = others[0] if others else None
    results = evaluation.results
    metric = results.solved_metric or REWARD
    wanted = config.metric or metric
    metric = wanted if wanted in results.metrics else metric
    if config.voters:
        evaluation = _voted(evaluation, metric)
        against = against and _voted(against, metric)
    found = measured(setting, evaluation, against, metric)
    if output is not None:
        replace_file(output, [to_json(found).encode()])
    answers = answers_text([*filter(None, [against]), evaluation], config.answers)
    said = f"written to {output}" if output is not None else ""
    shown = report(found, VOTE if config.voters else metric)
    print("\n\n".join(filter(None, [shown, answers, said])))
    results.values(wanted)  # Refused last, unless an Env reported it: measuring may take long.


def _voted(evaluation: Evaluation, metric: str) -> Evaluation:
    """Add the metric `vote`, also to the attempts of one policy."""
    results = evaluation.results
    if not results.can_vote:
        raise ConfigError(
            f"{evaluation.name}: votes need answers that can be compared, and the Envs of these "
            f"problems report none (the log {ANSWER!r} of a StepResult, or `read` of a Reward)"
        )
    return dataclasses.replace(evaluation, results=results.voted(metric))


def _check_model(config: EvaluateConfig, subject: Subject) -> None:
    """Fetch a model before another one is measured, because measuring may take long."""
    try:
        model_directory(subject.model_name)
    except ModelError as error:
        if subject.run is None and subject.name == config.against:
            raise ModelError(
                f"against={subject.name} is no run directory and no model; as a model: {error}"
            ) from error
        raise


def cli() -> None:
    short = "\n  ".join(f"{name}: {option}" for name, option in SHORT.items())
    more_help = (
        "\n\nOptions of a run or a recipe (RECIPE --help lists them) that also apply here: "
        "dataset.*, sampling.*,\nengine.*, rollout_timeout, turn_timeout, max_failed_fraction, "
        "and for a model "
        f"search_space.*\nShort forms:\n  {short}"
    )
    run_with_fields(main, EvaluateConfig, more_help)

"""What a run's centre or a model is worth on held-out problems, and whether another is better.

    python -m es_cookbook evaluate runs/mine
    python -m es_cookbook evaluate runs/mine against=base
    python -m es_cookbook evaluate runs/mine generation=20 attempts=8 temperature=1
    python -m es_cookbook evaluate model_name=Qwen/Qwen2.5-0.5B-Instruct recipe=rush_hour
    python -m es_cookbook evaluate model_name=exported data=rows.jsonl reward=my_rewards:score

The problems are the run's own held-out ones, or a recipe's, or rows as `train` takes them; options
of them and of the engine follow as in any run: `dataset.num_test=1000`, `sampling.max_tokens=64`,
`engine=vllm`. Without other options a run is measured as it measures itself, so the numbers are
those in its `metrics.jsonl`, to the bit.

`against=` names another run or model, another generation, or the file of an earlier evaluation.
Both attempt the same problems with the same sampling seeds.

The run directory is only read; the run may be going on.
"""

import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.commands.evaluate.measuring import Evaluation, Subject, measure
from es_cookbook.commands.evaluate.options import Asked, EvaluateConfig, asked
from es_cookbook.commands.evaluate.report import compared, estimates_of, print_text, report
from es_cookbook.commands.evaluate.saved import to_json
from es_cookbook.commands.options import new_output
from es_cookbook.commands.train import SHORT, whole_names
from es_cookbook.common.cli import run_with_fields
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.rl.objectives import REWARD
from es_cookbook.runs.config_differences import differences
from es_cookbook.runs.files import replace_file
from es_cookbook.train.stopping.signals import result_until_signal


def evaluated(config: EvaluateConfig, fields: Mapping[str, str]) -> str:
    """Evaluate, write the file, and return the table; only inside `run_cli`.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
        KeyboardInterrupt: It was stopped.
    """
    output = _checked_output(config)
    todo = asked(config, fields)
    setting, saved = todo.setting, todo.saved
    setting.config.dataset.check()
    for subject in todo.subjects:
        _check_model(config, subject)
    names_P = saved and saved.evaluation.results.names_P
    evaluation, *others = result_until_signal(
        functools.partial(measure, todo.subjects, setting, names_P),
        "interrupted; nothing was written",
    )
    against = others[0] if others else saved and saved.evaluation
    results, seed = evaluation.results, setting.config.seed
    solved = config.metric if config.metric in results.metrics else results.solved_metric
    estimates = estimates_of(results, seed, solved)
    comparisons = [] if against is None else compared(results, against.results, seed)
    if output is not None:
        text = to_json(setting, evaluation, estimates, against, comparisons)
        replace_file(output, [text.encode()])
    metric = _metric(config, evaluation)  # After the file, which has them all.
    parts = [report(setting, evaluation, estimates, metric, against, comparisons)]
    parts += _dataset_notes(config.against, todo)
    parts += [f"written to {output}"] if output is not None else []
    return "\n\n".join(parts)


def _checked_output(config: EvaluateConfig) -> Path | None:
    """Where the file goes; refused now rather than when everything has been measured."""
    if not config.output:
        return None
    if Path(config.output).suffix != ".json":
        raise ConfigError(f"output must be a .json file, found {config.output!r}")
    return new_output(config.output, config.log_path)


def _check_model(config: EvaluateConfig, subject: Subject) -> None:
    """Fetch a model, or say that there is none, before another is measured for an hour."""
    try:
        model_directory(subject.model_name)
    except ModelError as error:
        if subject.run is None and subject.name == config.against:
            raise ModelError(
                f"against={subject.name} is no run directory, no .json file and no model; as a "
                f"model: {error}"
            ) from error
        raise


def _metric(config: EvaluateConfig, evaluation: Evaluation) -> str:
    results = evaluation.results
    metric = config.metric or results.solved_metric or REWARD
    results.values(metric)  # Refused if nobody reported it; if all are lost, nobody could.
    return metric if metric in results.metrics else REWARD


def _dataset_notes(name: str, todo: Asked) -> list[str]:
    """What is to be known of an earlier evaluation whose dataset had other options."""
    if todo.saved is None:
        return []
    then = json.dumps(todo.saved.settings.get("dataset"))
    found = differences(then, config_to_json(todo.setting.config.dataset), ())
    return [f"{name}: other options of the dataset: {'; '.join(found)}"] if found else []


def main(config: EvaluateConfig, fields: Mapping[str, str]) -> None:
    """Evaluate, and print the table."""
    print_text(evaluated(config, fields))


def cli() -> None:
    """The console entry point."""
    short = "\n  ".join(f"{name}: {option}" for name, option in SHORT.items())
    more_help = (
        "\n\nOptions of a run or a recipe (RECIPE --help lists them) that also hold here: "
        "dataset.*, sampling.*,\nengine.*, rollout_timeout, turn_timeout, max_failed_fraction, "
        "and of a model "
        f"search_space.*\nShort:\n  {short}"
    )
    run_with_fields(main, EvaluateConfig, more_help, whole_names(sys.argv[1:]))

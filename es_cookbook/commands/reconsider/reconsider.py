r"""Does a second answer help, and where: answers, a cue to reconsider, answers again.

    es-cookbook reconsider runs/mine
    es-cookbook reconsider model_name=Qwen/Qwen2.5-0.5B-Instruct recipe=math output=second
    es-cookbook reconsider recipe=countdown cue='\n'

Every held-out problem is answered once, as `es-cookbook evaluate` has it answered. Then the model
sees the prompt, its answer and the cue, and answers again; the second answer is graded alone, by
the problem's own reward. Both are compared problem by problem, and also by how sure the model was
of the first: by the entropy of its distribution over all tokens, at each token that it sampled.

`output=` is a new directory with `rollouts.jsonl` (both answers, grades and entropies of every
problem), and a plot as PNG and SVG. A run is only read, and may be going on.
"""

import functools
import math
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Literal

import chz

from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.commands.evaluate.evaluate import new_output
from es_cookbook.commands.evaluate.options import EvaluateConfig, asked
from es_cookbook.commands.reconsider.report import buckets_of, mean, table, write
from es_cookbook.commands.reconsider.study import Passes, both_passes, entropies
from es_cookbook.commands.train import whole_names
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import UNNAMED, run_cli, split_options
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import whole_directory
from es_cookbook.rl.objectives import REWARD
from es_cookbook.runs.report.naming import task_of_dataset
from es_cookbook.runs.report.plots import require_matplotlib
from es_cookbook.train.recorded import Split
from es_cookbook.train.stopping.signals import run_until_signal


@chz.chz
class ReconsiderConfig:
    """Have a run's centre or a model answer held-out problems twice, then after a cue."""

    log_path: str = chz.field(default="", doc="run directory; it is only read", metadata=UNNAMED)
    generation: int | None = chz.field(
        default=None, doc="the centre after so many generations; 0 is the base, None the latest"
    )
    model_name: str | None = chz.field(
        default=None,
        doc="a model in place of a run: directory or Hub name; with log_path where the run's base "
        "is now",
    )
    recipe: str = chz.field(
        default="", doc="a recipe whose problems are answered; the run's own if empty"
    )
    split: Split = chz.field(
        default="test", doc="test: the held-out problems; train: those that are trained on"
    )
    cue: str = chz.field(
        default=r"\n\nWait, let me reconsider.",
        doc=r"what follows the first answer; \n is a new line",
    )
    chat: bool | None = chz.field(
        default=None,
        doc="the cue is a user's turn of the chat template, or follows as text; if None a turn "
        "where the prompt ends as the template ends it",
    )
    temperature: float = chz.field(default=0.0, doc="of both answers; 0 is greedy")
    seed: int | None = chz.field(default=None, doc="of the sampling; the run's own if None")
    metric: str = chz.field(
        default="", doc="what is compared; if empty correct or solved if reported, else reward"
    )
    buckets: int = chz.field(default=4, doc="quantiles of the first answers' entropies")
    by: Literal["mean", "max"] = chz.field(
        default="mean", doc="an answer's entropy is the mean or the maximum over its tokens"
    )
    output: str = chz.field(default="", doc="new directory to write to; none if empty")
    trust: tuple[str, ...] = chz.field(
        default=(), doc="packages beside es_cookbook whose code config.json may name"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "buckets", at_least=1)
        if not self.cue:
            raise ConfigError("cue must have at least one character")

    @property
    def evaluation(self) -> EvaluateConfig:
        """Of the first answers."""
        return EvaluateConfig(
            log_path=self.log_path,
            generation=self.generation,
            model_name=self.model_name,
            recipe=self.recipe,
            split=self.split,
            attempts=1,
            temperature=self.temperature,
            seed=self.seed,
            trust=self.trust,
        )


def reconsidered(config: ReconsiderConfig, fields: Mapping[str, str]) -> str:
    """Ask twice, write the output, and return the table; only inside `run_cli`.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
        KeyboardInterrupt: It was stopped.
    """
    output = _checked_output(config)
    todo = asked(config.evaluation, fields)
    setting, (subject,) = todo.setting, todo.subjects
    setting.dataset.check()
    model_directory(subject.model_name)
    cue = config.cue.replace(r"\n", "\n")
    found: list[Passes] = []

    async def ask() -> None:
        found.append(await both_passes(subject, setting, cue, config.chat))

    if run_until_signal(ask):
        raise KeyboardInterrupt("interrupted; nothing was written")
    (passes,) = found
    entropies_P = entropies(subject, passes.first_P, config.trust)
    of_answer = mean if config.by == "mean" else max
    entropy_P = [math.nan if each is None else of_answer(each) for each in entropies_P]
    metric = config.metric or passes.first.solved_metric or REWARD
    for results in (passes.first, passes.second):
        results.values(metric)
    buckets = buckets_of(passes, entropy_P, metric, config.buckets, setting.seed)
    text = table(subject, setting, passes, buckets, metric=metric, cue=cue, by=config.by)
    if output is None:
        return text
    with whole_directory(output) as directory:
        task = task_of_dataset(setting.dataset)
        write(directory, passes, entropies_P, buckets, metric, config.by, task)
    return f"{text}\n\nwritten to {output}"


def _checked_output(config: ReconsiderConfig) -> Path | None:
    """Where the files go; refused now rather than when everything has been measured."""
    if not config.output:
        return None
    require_matplotlib()
    return new_output(config.output, config.log_path)


def main(config: ReconsiderConfig, fields: Mapping[str, str]) -> None:
    """Ask twice, and print the table."""
    if isinstance(sys.stdout, TextIOWrapper):  # An answer may have letters that a terminal has not.
        sys.stdout.reconfigure(errors="backslashreplace")
    print(reconsidered(config, fields))


def cli() -> None:
    """The console entry point."""
    own, fields = split_options(ReconsiderConfig, whole_names(sys.argv[1:]))
    more_help = (
        "\n\nOptions of a run or a recipe (RECIPE --help lists them) that also hold here are those "
        "of evaluate:\ndataset.*, sampling.*, engine.*, data=, prompt=, reward=, ..."
    )
    run_cli(functools.partial(main, fields=fields), ReconsiderConfig, own, more_help)

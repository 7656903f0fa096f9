r"""Ask a model for second answers after a cue: does it help, and on which problems?

    es-cookbook reconsider runs/mine
    es-cookbook reconsider model_name=Qwen/Qwen2.5-0.5B-Instruct recipe=math output=second
    es-cookbook reconsider recipe=countdown cue='\n'

Every held-out problem is answered once, as in `es-cookbook evaluate`. Then the model sees the
prompt, its answer and the cue, and answers again; a fresh Env of the problem grades the second
answer alone. In a chat the cue is the user's next turn; after a plain prompt it follows the answer.

Both answers are compared problem by problem, over all problems and by quantiles of how uncertain
the model was of its first answer: the mean over its tokens of minus their log-probability. Answers
of equal uncertainty are in one quantile.

`output=` is a new directory for `rollouts.jsonl`, which has both answers of each problem, their
grades and the uncertainty. A run is only read, and may be in progress. Left out: problems of
several turns, in which a cue would be one more turn and not a second try.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TypeAlias

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook import EnvGroupBuilder, Observation, ProblemEnv
from es_cookbook.cli.evaluate import measuring, report
from es_cookbook.cli.evaluate.evaluate import OnProblems, resolve
from es_cookbook.cli.evaluate.measuring import Evaluation, Setting, Subject
from es_cookbook.cli.options import new_output
from es_cookbook.common.cli import run_with_fields
from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.common.files import whole_directory
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import plural, say
from es_cookbook.population.evaluate import attempt
from es_cookbook.population.results import Results, compare, results_of
from es_cookbook.rl.data.problem_dataset import ChangedProblem
from es_cookbook.rl.messages.chat import Renderer
from es_cookbook.rl.messages.encoder import Controls, inside
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.template import SENTINEL
from es_cookbook.rl.messages.thoughts import opened_thought, whole_turn
from es_cookbook.rl.objectives import REWARD
from es_cookbook.rl.types import EnvGroup, LostRollout, Tokenizer, TrajectoryGroup, Transition
from es_cookbook.runs.config import RunConfig
from es_cookbook.runs.signals import result_until_signal
from es_cookbook.runs.tracking.jsonl import finite

BUCKETS = 4
"""Number of quantiles."""
Answers: TypeAlias = tuple[Sequence[Transition | None], Results]
"""An answer to each problem, None if it was lost; and their results."""


@chz.chz
class ReconsiderConfig(OnProblems):
    """Have a run's centre or a model answer held-out problems, then again after a cue."""

    cue: str = chz.field(
        default=r"\n\nWait, let me reconsider.",
        doc=r"what follows the first answer; \n is a new line",
    )
    output: str = chz.field(default="", doc="new directory for both answers; empty: none")


def main(config: ReconsiderConfig, fields: Mapping[str, str]) -> None:
    """Ask twice, write the output, and print the table.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
        KeyboardInterrupt: It was stopped.
    """
    output = new_output(config.output, config.log_path) if config.output else None
    setting, subject = resolve(config, RunConfig.whole_options(fields), attempts=1)
    setting.config.dataset.check()
    cue, seed = config.cue.replace(r"\n", "\n"), setting.config.seed
    (first_P, first), (second_P, second), tokenizer, trained_on = result_until_signal(
        partial(ask_twice, subject, setting, cue), "interrupted; nothing was written"
    )
    usual = first.solved_metric or REWARD
    metric = config.metric if {config.metric} <= {*first.metrics} & {*second.metrics} else usual
    mean_P = np.array([uncertainty(turn) for turn in first_P])
    buckets = buckets_of(np.where([turn is not None for turn in second_P], mean_P, math.nan))
    number = None if subject.run is None else subject.generations[0]
    evaluation = Evaluation(subject.name, number, {}, {}, second, trained_on)
    before = Evaluation("the first answers", None, {}, {}, first, trained_on=0)
    measured = report.measured(setting, evaluation, before, metric)
    print(f"Second answers, after the cue {cue!r}:\n")
    print(report.report(measured, metric))
    print(f"\n{metric}, by uncertainty of the first answer, in nats per token (problems):")
    for bucket in buckets:
        of_bucket = [mean_P[p] for p in bucket]
        label = f"{min(of_bucket):.2g}..{max(of_bucket):.2g} ({len(bucket)})"
        found = compare(second, first, metric, seed, bucket)
        print(report.compared_line(dataclasses.replace(found, metric=label)))
    if output is not None:
        bucket_of = {p: b for b, bucket in enumerate(buckets) for p in bucket}
        lines = [
            {
                "problem": first.names_P[p],
                "first": _described(first_P[p], tokenizer),
                "second": _described(second_P[p], tokenizer),
                "uncertainty": mean_P[p],
                "bucket": bucket_of.get(p),
            }
            for p in range(len(first_P))
        ]
        text = "".join(json.dumps(finite(line), allow_nan=False) + "\n" for line in lines)
        with whole_directory(output) as directory:
            (directory / "rollouts.jsonl").write_text(text, encoding="utf-8")
        print(f"\nwritten to {output}")
    first.values(config.metric or usual)  # Refused last, unless an Env reported it.


def _described(turn: Transition | None, tokenizer: Tokenizer) -> dict[str, object] | None:
    if turn is None:
        return None
    return {
        "prompt": str(tokenizer.decode(list(turn.observation.tokens_T))),
        "text": turn.action.text,
        "reward": turn.reward,
        "metrics": dict(turn.metrics),
    }


async def ask_twice(
    subject: Subject, setting: Setting, cue: str
) -> tuple[Answers, Answers, Tokenizer, int | None]:
    """Return both answers to each problem, the tokenizer, and `Evaluation.trained_on`.

    Raises:
        ESCookbookError: There are no problems, they have several turns, the tokenizer does not know
            the cue, or anything else that the user can put right.
    """
    config, generation = setting.config, subject.generations[0]
    async with measuring.opened(subject) as (engine, rebuilt):
        after = second_prompt(engine.tokenizer, cue)
        problems_P = await measuring.problems_of(setting, engine)
        if rebuilt is not None:
            await rebuilt.go_to(generation)

        async def ask(asked_P: Sequence[EnvGroupBuilder], seed: int | None = None) -> Answers:
            sampling = chz.replace(config.sampling, logprobs=True)
            sampler = config.sampler(engine, sampling=sampling, seed=seed)
            groups_P = await attempt(sampler, asked_P, temperature=config.eval_temperature)
            return [*map(_turn, groups_P)], results_of(problems_P, groups_P)

        say(f"asking {plural(len(problems_P), 'problem')}, twice each")
        first = await ask(problems_P)
        again_P = [
            _Again(problem, None if turn is None else after(turn))
            for problem, turn in zip(problems_P, first[0], strict=True)
        ]
        second = await ask(again_P, derive_seed(config.seed, "second pass"))
        trained_on = measuring.trained_on(subject, generation, problems_P)
        return first, second, engine.tokenizer, trained_on


def _turn(group: TrajectoryGroup) -> Transition | None:
    """Return the last turn of an attempt; None if it was lost."""
    ((attempted,),) = group.trajectories_G_K
    return None if isinstance(attempted, LostRollout) else attempted.transitions[-1]


def second_prompt(tokenizer: Tokenizer, cue: str) -> Callable[[Transition], Observation]:
    """Return a function from a first answer to a second prompt.

    Raises:
        ConfigError: The tokenizer does not know the cue.
        ModelError: The chat template cannot be used.
    """
    cue_T = inside(tokenizer, cue)
    back = str(tokenizer.decode(list(cue_T)))
    # Tokenizers may change blanks and capitals.
    given, known = ("".join(each.split()).casefold() for each in (cue, back))
    if not cue_T or tokenizer.unk_token_id in cue_T or given != known:
        raise ConfigError(
            f"cue={cue!r}: the model's tokenizer knows {back!r} of it; give a cue of characters "
            r"that the model has tokens for, such as cue='\n' (a new line)"
        )
    renderer = Renderer(tokenizer) if tokenizer.chat_template else None
    asked_T = renderer.prompt([Message("user", SENTINEL)]) if renderer else ()
    opening = str(tokenizer.decode(list(asked_T))).partition(SENTINEL)[2]
    special = Controls.of(tokenizer).ids

    def after(turn: Transition) -> Observation:
        seen, said_T, begun = turn.observation, turn.action.tokens_T, ""
        is_chat = opening and str(tokenizer.decode(list(seen.tokens_T))).endswith(opening)
        if renderer is not None and is_chat:
            added_T = renderer.added(turn.action, [Message("user", cue.strip() or cue)])
        else:
            if said_T and said_T[-1] in special | set(seen.stop_token_ids):
                said_T = said_T[:-1]
            added_T, begun = cue_T, whole_turn(turn.action.text, seen.opened) + cue
        tokens_T = (*seen.tokens_T, *said_T, *added_T)
        opened = opened_thought(tokenizer, tokens_T, begun)
        return dataclasses.replace(seen, tokens_T=tokens_T, opened=opened)

    return after


@dataclasses.dataclass(frozen=True, slots=True)
class _Again(ChangedProblem):
    """A problem whose Envs begin with another prompt; None if there is no first answer."""

    prompt: Observation | None

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        if self.prompt is None:
            raise EnvError("the first answer was lost, so there is none to reconsider")
        group = await self.problem.make_envs(num_envs)
        for env in group.envs:
            if not isinstance(env, ProblemEnv):
                raise EnvError(
                    f"{type(env).__name__}: only problems of one turn (a ProblemEnv) can be "
                    "reconsidered"
                )
            env.observation = self.prompt
        return group


def uncertainty(turn: Transition | None) -> float:
    """Return the mean over an answer's tokens of minus their log-probability; NaN without any."""
    logprobs_T = turn.action.logprobs_T if turn is not None else None
    return -fmean(logprobs_T) if logprobs_T else math.nan


def buckets_of(uncertainty_P: NDArray[np.float64]) -> list[list[int]]:
    """Group problems by quantiles of uncertainty, without those whose uncertainty is NaN.

    >>> buckets_of(np.array([3, 1, 2, 4, 5, 6, 7, math.nan, 8]))
    [[1, 2], [0, 3], [4, 5], [6, 8]]
    >>> buckets_of(np.array([0, 0, 0, 1, 2])), buckets_of(np.array([math.nan]))
    ([[0, 1, 2], [3], [4]], [])
    """
    known = uncertainty_P[~np.isnan(uncertainty_P)]
    if not len(known):
        return []
    edges = np.quantile(known, np.linspace(0, 1, BUCKETS + 1)[1:-1], method="inverted_cdf")
    bucket_P = np.where(np.isnan(uncertainty_P), -1, np.digitize(uncertainty_P, edges, right=True))
    return [np.flatnonzero(bucket_P == b).tolist() for b in np.unique(bucket_P) if b >= 0]


def cli() -> None:
    more_help = "\n\nOptions of a run or a recipe also apply, those that evaluate --help lists."
    run_with_fields(main, ReconsiderConfig, more_help)

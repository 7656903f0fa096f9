r"""Ask for second answers: does one help, and where? Ask, give a cue to reconsider, ask again.

    es-cookbook reconsider runs/mine
    es-cookbook reconsider model_name=Qwen/Qwen2.5-0.5B-Instruct recipe=math output=second
    es-cookbook reconsider recipe=countdown cue='\n'

Every held-out problem is answered once, as in `es-cookbook evaluate`. Then the model
sees the prompt, its answer and the cue, and answers again; the second answer is graded alone, by a
fresh Env of the problem. In a chat the cue is the user's next turn; after a plain prompt it follows
the answer. Both answers are compared problem by problem, and also by how sure the model was of the
first: by the entropy of its distribution over all tokens, at each token that it sampled.

`output=` is a new directory with `rollouts.jsonl` (both answers, grades and entropies of every
problem), and a plot as PNG and SVG. A run is only read, and may be in progress.

Problems are put into buckets by quantiles of the entropies, so that each has about as many. Answers
of equal entropy are in one bucket: where many are quite sure of every token, that one is larger.

An engine tells the log-probability of a sampled token and not the whole distribution. So entropies
are computed once the engine is closed, by a forward pass of transformers in float32. Left out:
problems of several turns, in which a cue would be one more turn and not a second try.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import chz
import numpy as np
from typing_extensions import override

from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.cli.evaluate.evaluate import OnProblems, resolve
from es_cookbook.cli.evaluate.measuring import (
    Evaluation,
    Setting,
    Subject,
    opened,
    problems_of,
    trained_on,
)
from es_cookbook.cli.evaluate.report import (
    compared,
    compared_line,
    comparison_text,
    heading,
    lost_text,
    notes_on,
    print_text,
)
from es_cookbook.cli.options import new_output
from es_cookbook.cli.train import whole_names
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import arguments, run_with_fields
from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.common.files import whole_directory
from es_cookbook.common.machine.scratch import scratch
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import plural, printable, say
from es_cookbook.plugins.report.plots import Line, draw, require_matplotlib
from es_cookbook.population.evaluate import attempt
from es_cookbook.population.results import Comparison, Results, compare, results_of
from es_cookbook.population.statistics import FEW
from es_cookbook.rl.data.problem_dataset import ChangedProblem
from es_cookbook.rl.messages.encoder import Controls, inside
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.renderer import SENTINEL, Renderer
from es_cookbook.rl.messages.thoughts import opened_thought, whole_turn
from es_cookbook.rl.objectives import REWARD
from es_cookbook.rl.problem_env import ProblemEnv
from es_cookbook.rl.types import (
    Action,
    Env,
    EnvGroup,
    LostRollout,
    Observation,
    StepResult,
    Tokenizer,
    TrajectoryGroup,
    Transition,
)
from es_cookbook.runs.signals import result_until_signal
from es_cookbook.runs.tracking.jsonl import finite
from es_cookbook.runs.tracking.naming import task_of_dataset

_ONE_TURN = "problems of one turn alone can be reconsidered"


@chz.chz
class ReconsiderConfig(OnProblems):
    """Have a run's centre or a model answer held-out problems, then again after a cue."""

    cue: str = chz.field(
        default=r"\n\nWait, let me reconsider.",
        doc=r"what follows the first answer; \n is a new line",
    )
    chat: bool | None = chz.field(
        default=None,
        doc="True: the cue is a user's turn of the chat template; False: it follows as text; None: "
        "a turn if the prompt ends as the template ends it",
    )
    temperature: float | None = chz.field(
        default=0.0, doc="temperature of both answers; 0 is greedy"
    )
    buckets: int = chz.field(default=4, doc="number of quantiles of the first answers' entropies")
    by: Literal["mean", "max"] = chz.field(
        default="mean", doc="entropy of an answer: the mean or the maximum over its tokens"
    )
    output: str = chz.field(default="", doc="new directory to write to; empty: none")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "buckets", at_least=1)
        if not self.cue:
            raise ConfigError("cue must have at least one character")


class Pass(NamedTuple):
    """One answer to each problem; None where it was lost."""

    turns_P: Sequence[Transition | None]
    results: Results


class _Bucket(NamedTuple):
    """Problems whose first answers had similar entropies; the second answers against the first."""

    problems: Sequence[int]
    entropies: Sequence[float]
    compared: Comparison


def main(config: ReconsiderConfig, fields: Mapping[str, str]) -> None:
    """Ask twice, write the output, and print the table.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
        KeyboardInterrupt: It was stopped.
    """
    output = new_output(config.output, config.log_path) if config.output else None
    if output is not None:
        require_matplotlib()
    setting, subject = resolve(config, fields)
    setting.config.dataset.check()
    model_directory(subject.model_name)
    cue = config.cue.replace(r"\n", "\n")
    first, second, evaluation, tokenizer = result_until_signal(
        partial(both_passes, subject, setting, cue, config.chat),
        "interrupted; nothing was written",
    )
    entropies_P = entropies(subject, first.turns_P, config.trust)
    of_answer = fmean if config.by == "mean" else max
    entropy_P = [math.nan if each is None else of_answer(each) for each in entropies_P]
    metric = config.metric or first.results.solved_metric or REWARD
    for each in (first, second):
        each.results.values(metric)
    buckets = buckets_of(first, second, entropy_P, metric, config.buckets, setting.config.seed)
    text = _table(setting, evaluation, second.results, metric, cue)
    if buckets:
        title = f"{metric}, by {config.by} entropy of the first answer's tokens, in nats (problems)"
        text += "\n\n" + "\n".join([f"{title}:", *_bucket_lines(buckets)])
    if output is not None:
        with whole_directory(output) as directory:
            write(directory, first, second, tokenizer, entropies_P, buckets)
            if buckets:
                task = task_of_dataset(setting.config.dataset)
                _draw(directory / "entropy.png", buckets, task, metric, config.by)
        text += f"\n\nwritten to {output}"
    print_text(text)


async def both_passes(
    subject: Subject, setting: Setting, cue: str, chat: bool | None = None
) -> tuple[Pass, Pass, Evaluation, Tokenizer]:
    """Ask every problem, and ask again; the first answers are those of an evaluation.

    Raises:
        ConfigError: There are no problems, one had several turns, prompt, answer and cue leave no
            room for a second answer, or the tokenizer does not know the cue.
        ESCookbookError: Anything else that the user can put right, in one sentence.
    """
    config, generation = setting.config, subject.generations[0]
    async with opened(subject) as (engine, rebuilt):
        after = second_prompt(engine.tokenizer, cue, chat)

        def asked_again(turn: Transition) -> tuple[Observation, str]:
            second = after(turn)
            return second, thought_before(engine.tokenizer, turn, second, cue)

        problems_P = await problems_of(setting, engine)
        if rebuilt is not None:
            await rebuilt.go_to(generation)
        say(f"asking {plural(len(problems_P), 'problem')}")
        ask = partial(attempt, attempts=1, temperature=config.eval_temperature)
        first_P = await ask(config.sampler(engine), problems_P)
        first = Pass([*map(first_of_one_turn, first_P)], results_of(problems_P, first_P))
        again_P = [
            _SecondPass(problem, *(asked_again(turn) if turn else (None, "")))
            for problem, turn in zip(problems_P, first.turns_P, strict=True)
        ]
        _check_room(first.results.names_P, again_P, engine.traits.context_length)
        say("asking again")
        seed = derive_seed(config.seed, "second pass")
        second_P = await ask(config.sampler(engine, seed=seed), again_P)
        second = Pass([*map(first_of_one_turn, second_P)], results_of(problems_P, second_P))
        known = await trained_on(subject, generation, engine, problems_P)
        number = None if subject.run is None else generation
        evaluation = Evaluation(subject.name, number, {}, {}, first.results, known)
        return first, second, evaluation, engine.tokenizer


def first_of_one_turn(group: TrajectoryGroup) -> Transition | None:
    """The only turn of the first attempt at a problem; None if it was lost.

    Raises:
        ConfigError: It had several.
    """
    ((first,),) = group.trajectories_G_K
    if isinstance(first, LostRollout):
        return None
    if len(first.transitions) != 1:
        raise ConfigError(f"a problem took {len(first.transitions)} turns; {_ONE_TURN}")
    return first.transitions[0]


def second_prompt(
    tokenizer: Tokenizer, cue: str, chat: bool | None = None
) -> Callable[[Transition], Observation]:
    """What makes the prompt of a second answer from the first one.

    `chat` says whether the cue is a user's turn; if None, it is where the prompt ends as a chat's.

    Raises:
        ConfigError: The tokenizer does not know the cue.
        ModelError: It is to be a user's turn, and the chat template cannot be used.
    """
    plain_T = _known(tokenizer, cue)
    opening, renderer = "", None
    if chat or (chat is None and tokenizer.chat_template):
        renderer = Renderer(tokenizer, keep_history=True)
        asked_T = renderer.prompt([Message("user", SENTINEL)])
        opening = str(tokenizer.decode(list(asked_T))).partition(SENTINEL)[2]
    special = Controls.of(tokenizer).ids

    def after(turn: Transition) -> Observation:
        seen, said_T = turn.observation, turn.action.tokens_T
        text = str(tokenizer.decode(list(seen.tokens_T)))
        if renderer is not None and (chat or (opening and text.endswith(opening))):
            added_T = renderer.added(turn.action, [Message("user", cue.strip() or cue)])
            return dataclasses.replace(seen, tokens_T=(*seen.tokens_T, *said_T, *added_T))
        ended = said_T and said_T[-1] in special | set(seen.stop_token_ids)
        kept_T = said_T[:-1] if ended else said_T
        return dataclasses.replace(seen, tokens_T=(*seen.tokens_T, *kept_T, *plain_T))

    return after


def thought_before(tokenizer: Tokenizer, first: Transition, second: Observation, cue: str) -> str:
    """The tag of a thought that a second prompt has opened, or the first answer in it, or nothing.

    A cue that is a user's turn ends what was open.
    """
    cue_T, begun = inside(tokenizer, cue), ""
    if second.tokens_T[-len(cue_T) :] == cue_T:
        opened = opened_thought(tokenizer, first.observation.tokens_T)
        begun = whole_turn(first.action.text, opened) + cue
    return opened_thought(tokenizer, second.tokens_T, begun)


def _known(tokenizer: Tokenizer, cue: str) -> tuple[int, ...]:
    """The cue's tokens, of which none is unknown; tokenizers may change blanks and capitals."""
    tokens_T = inside(tokenizer, cue)
    back = str(tokenizer.decode(list(tokens_T)))
    given, known = ("".join(each.split()).casefold() for each in (cue, back))
    if not tokens_T or tokenizer.unk_token_id in tokens_T or given != known:
        raise ConfigError(
            f"cue={cue!r}: the model's tokenizer knows {back!r} of it; give a cue of characters "
            r"that the model has tokens for, such as cue='\n' (a new line)"
        )
    return tokens_T


def _check_room(names_P: Sequence[str], again_P: "Sequence[_SecondPass]", context: int) -> None:
    for name, each in zip(names_P, again_P, strict=True):
        length = len(each.observation.tokens_T) if each.observation else 0
        if length >= context:
            raise ConfigError(
                f"{name}: prompt, first answer and cue have {length} tokens, which leaves no room "
                f"for a second answer in {context} tokens; lower sampling.max_tokens, give a "
                "shorter cue, or raise engine.max_model_len"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class _SecondPass(ChangedProblem):
    """A problem whose Envs begin with another observation; without one, they lose the rollout.

    `opened` is the tag of a thought that the observation has opened.
    """

    observation: Observation | None
    opened: str

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        group = await self.problem.make_envs(num_envs)
        for env in group.envs:
            if isinstance(env, ProblemEnv):
                env.opened = self.opened
        group.envs = [_SecondPassEnv(env, self.observation) for env in group.envs]
        return group


class _SecondPassEnv(Env):
    def __init__(self, env: Env, observation: Observation | None) -> None:
        self._env, self._observation = env, observation

    @override
    async def initial_observation(self) -> Observation:
        if self._observation is None:
            raise EnvError("the first answer was lost, so there is none to reconsider")
        self._env.policy = self.policy
        await self._env.initial_observation()  # An Env may prepare there what it grades with.
        return self._observation

    @override
    async def act(self, observation: Observation) -> Action:
        return await self._env.act(observation)

    @override
    async def step(self, action: Action) -> StepResult:
        result = await self._env.step(action)
        if not result.done:
            raise EnvError(f"the second answer asked for another turn; {_ONE_TURN}")
        return result


def entropies(
    subject: Subject, turns_P: Sequence[Transition | None], trust: Sequence[str] = ()
) -> list[tuple[float, ...] | None]:
    """Of the distribution over all tokens at each token of an answer, in nats; None if lost.

    At temperature 1 and without top-p, however the tokens were sampled. The centre of a run is
    written as a model directory for as long as that takes.

    Raises:
        ModelError: transformers cannot load the model.
        HistoryError: The run's centre cannot be rebuilt.
    """
    say("measuring entropies")
    turns = [turn for turn in turns_P if turn is not None]
    if subject.run is None:
        found = iter(_entropies(subject.model_name, turns))
    else:
        from es_cookbook.runs.centre.replay import open_replay
        from es_cookbook.runs.export.export import write_export

        log_path, name = subject.run.history.parent, subject.run.model_name
        replay = open_replay(log_path, subject.generations[0], model_name=name, trust=trust)
        with scratch() as directory:
            model = directory / "model"
            write_export(replay, model, merge=True)
            found = iter(_entropies(str(model), turns))
    return [None if turn is None else next(found) for turn in turns_P]


def _entropies(model_name: str, turns: Sequence[Transition]) -> list[tuple[float, ...]]:
    # torch, which the options do without.
    import torch

    from es_cookbook.checkpoints.models import load_causal_lm, load_tokenizer
    from es_cookbook.engines.vocabulary import learn_tokens_alone
    from es_cookbook.plugins.gradients.learner import Learner
    from es_cookbook.plugins.gradients.supervised import joined

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_causal_lm(model_name, "float32", device)
    learn_tokens_alone(model, load_tokenizer(model_name))
    return Learner(model, ()).entropies(
        [joined([(t.observation.tokens_T, False), (t.action.tokens_T, True)]) for t in turns]
    )


def buckets_of(
    first: Pass,
    second: Pass,
    entropy_P: Sequence[float],
    metric: str,
    count: int,
    seed: int,
) -> list[_Bucket]:
    """Both passes compared, by quantiles of entropy, over problems that have both answers."""
    both_P = [
        math.nan if None in turns else entropy
        for *turns, entropy in zip(first.turns_P, second.turns_P, entropy_P, strict=True)
    ]
    present = [value for value in both_P if not math.isnan(value)]
    if not present:
        return []
    edges = np.quantile(present, np.linspace(0, 1, count + 1)[1:-1], method="inverted_cdf")
    bucket_P = np.where(np.isnan(both_P), -1, np.digitize(both_P, edges, right=True))
    found: list[_Bucket] = []
    for bucket in sorted({*bucket_P.tolist()} - {-1}):
        problems: list[int] = np.flatnonzero(bucket_P == bucket).tolist()
        before, after = (each.results.of(problems) for each in (first, second))
        entropies = sorted(both_P[p] for p in problems)
        found.append(_Bucket(problems, entropies, compare(after, before, metric, seed)))
    return found


def _table(setting: Setting, evaluation: Evaluation, second: Results, metric: str, cue: str) -> str:
    """Both passes as text of 80 columns."""
    first, seed = evaluation.results, setting.config.seed
    both = compared(second, first, seed)
    title, columns = f"After the cue {cue!r}:", ("second", "first")
    parts = [heading(setting, evaluation), comparison_text(title, both, metric, 1, columns)]
    for which, results in (("first", first), ("second", second)):
        if results.lost:
            parts.append(f"{which} answers {lost_text(results.lost, len(first.names_P))}")
    parts.append(notes_on({metric: first.estimate(metric, seed)}, both))
    return printable("\n\n".join(filter(None, parts)))


def _bucket_lines(buckets: Sequence[_Bucket]) -> list[str]:
    lines: list[str] = []
    for each in buckets:
        label = f"{each.entropies[0]:.2g}..{each.entropies[-1]:.2g} ({len(each.problems)})"
        lines.append(compared_line(dataclasses.replace(each.compared, metric=label)))
    if few := sum(len(bucket.problems) < FEW for bucket in buckets):
        lines.append(f"{plural(few, 'bucket')} of fewer than {FEW} problems: too sure.")
    return lines


def write(
    directory: Path,
    first: Pass,
    second: Pass,
    tokenizer: Tokenizer,
    entropies_P: Sequence[Sequence[float] | None],
    buckets: Sequence[_Bucket],
) -> None:
    """Write `rollouts.jsonl` to a directory."""
    bucket_of = {p: b for b, bucket in enumerate(buckets) for p in bucket.problems}
    with (directory / "rollouts.jsonl").open("w", encoding="utf-8") as file:
        for p, entropies in enumerate(entropies_P):
            plain = {
                "problem": first.results.names_P[p],
                "tags": list(first.results.tags_P[p]),
                "first": _described(first, p, tokenizer),
                "second": _described(second, p, tokenizer),
                "entropies": entropies and list(entropies),
                "mean_entropy": entropies and fmean(entropies),
                "max_entropy": entropies and max(entropies),
                "bucket": bucket_of.get(p),
            }
            file.write(json.dumps(plain, allow_nan=False) + "\n")


def _described(answers: Pass, p: int, tokenizer: Tokenizer) -> dict[str, object]:
    """An answer and its grade; of a lost one, why it was lost."""
    turn, outcomes = answers.turns_P[p], answers.results.outcomes
    if turn is None:
        return {"lost": " ".join(answers.results.lost_P[p])}
    prompt_T = list(turn.observation.tokens_T)
    return {
        "prompt": str(tokenizer.decode(prompt_T)),
        "text": turn.action.text,
        "prompt_tokens": prompt_T,
        "tokens": list(turn.action.tokens_T),
        "reward": finite(outcomes.rewards_P_G_K[p, 0, 0]),
        "metrics": {name: finite(v[p, 0, 0]) for name, v in outcomes.metrics.items()},
    }


def _draw(path: Path, buckets: Sequence[_Bucket], task: str, metric: str, by: str) -> None:
    in_percent = all(bucket.compared.is_share for bucket in buckets)
    scale = 100 if in_percent else 1
    x_M = [float(np.median(bucket.entropies)) for bucket in buckets]
    draw(
        path,
        {
            "first answer": Line(x_M, [[scale * each.compared.second for each in buckets]]),
            "second answer": Line(x_M, [[scale * each.compared.first for each in buckets]]),
        },
        title=f"{task}, {metric} by entropy of the first answer",
        x_label=f"{by} entropy of its tokens, nats (median of a bucket)",
        y_label=f"{metric}, %" if in_percent else metric,
    )


def cli() -> None:
    more_help = (
        "\n\nOptions of a run or a recipe (RECIPE --help lists them) that also apply here are "
        "those of evaluate:\ndataset.*, sampling.*, engine.*, data=, prompt=, reward=, ..."
    )
    run_with_fields(main, ReconsiderConfig, more_help, whole_names(arguments()))

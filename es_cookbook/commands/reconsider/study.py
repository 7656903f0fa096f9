"""Both passes on one engine, and how sure the model was of each token of its first answers.

An engine tells the log-probability of a sampled token and not the whole distribution. So entropies
are computed apart, once the engine is closed: by a forward pass of transformers in float32, over
the tokens that were sampled, with the weights that sampled them. Of a run these are written as a
model directory for as long as that takes.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from es_cookbook.commands.evaluate.measuring import (
    Setting,
    Subject,
    opened,
    problems_of,
    sampler_of,
    trained_on,
)
from es_cookbook.commands.reconsider.second_pass import Cue, SecondPass, first_of_one_turn
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import plural, say
from es_cookbook.population.evaluate import attempt
from es_cookbook.population.results import Results, problem_names, results_of
from es_cookbook.rl.types import Tokenizer, TrajectoryGroup, Transition

_LOGITS_PER_PASS = 1 << 27
"""Half a GiB of them in float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One answer as it was given.

    Attributes:
        prompt: all that the model saw before it, as text.
        tokens_T: its tokens, the end of sequence included.
    """

    prompt: str
    text: str
    prompt_T: tuple[int, ...]
    tokens_T: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Passes:
    """One answer to each problem, and another after the cue; None where one was lost.

    `trained_on` is how many of the problems a run may have trained on; None if that is not known.
    """

    first_P: Sequence[Answer | None]
    second_P: Sequence[Answer | None]
    first: Results
    second: Results
    trained_on: int | None = None


async def both_passes(
    subject: Subject, setting: Setting, cue: str, chat: bool | None = None
) -> Passes:
    """Ask every problem, and ask again.

    The first answers are those of an evaluation, with the same sampling seeds.

    Raises:
        ConfigError: There are no problems, one had several turns, prompt, answer and cue leave no
            room for a second answer, or the tokenizer does not know the cue.
        ESCookbookError: Anything else that the user can put right, in one sentence.
    """
    say(f"{subject.name}: loading {subject.model_name} on {subject.engine.name}")
    temperature = setting.sampling.temperature
    async with opened(subject) as (engine, rebuilt):
        asked = Cue(engine.tokenizer, cue, chat)
        problems_P = await problems_of(setting, engine)
        names_P = problem_names(problems_P)
        if rebuilt is not None:
            await rebuilt.go_to(subject.generations[0])
        say(f"asking {plural(len(problems_P), 'problem')}")
        first_P = await attempt(sampler_of(setting, engine), problems_P, 1, temperature)
        again_P: list[SecondPass] = []
        for name, problem, group in zip(names_P, problems_P, first_P, strict=True):
            turn = first_of_one_turn(name, group)
            seen = None if turn is None else asked.after(turn.observation, turn.action)
            if seen is not None and len(seen.tokens_T) >= engine.traits.context_length:
                raise ConfigError(
                    f"{name}: prompt, first answer and cue have {len(seen.tokens_T)} tokens, which "
                    f"leaves no room for a second answer in {engine.traits.context_length} tokens; "
                    "lower sampling.max_tokens, give a shorter cue, or raise engine.max_model_len"
                )
            again_P.append(SecondPass(problem, name, seen))
        say("asking again")
        sampler = sampler_of(setting, engine, derive_seed(setting.seed, "second pass"))
        second_P = await attempt(sampler, again_P, 1, temperature)
        return Passes(
            [_answer(engine.tokenizer, each) for each in first_P],
            [_answer(engine.tokenizer, each) for each in second_P],
            results_of(problems_P, first_P),
            results_of(again_P, second_P),
            await trained_on(subject, subject.generations[0], engine, problems_P),
        )


def _answer(tokenizer: Tokenizer, group: TrajectoryGroup) -> Answer | None:
    turn: Transition | None = first_of_one_turn("", group)
    if turn is None:
        return None
    prompt_T, action = turn.observation.tokens_T, turn.action
    return Answer(str(tokenizer.decode(list(prompt_T))), action.text, prompt_T, action.tokens_T)


def entropies(
    subject: Subject, answers_P: Sequence[Answer | None], trust: Sequence[str] = ()
) -> list[tuple[float, ...] | None]:
    """Of the distribution over all tokens at each token of an answer, in nats; None if lost.

    At temperature 1 and without top-p, however the tokens were sampled.

    Raises:
        ModelError: transformers cannot load the model.
        HistoryError: The run's centre cannot be rebuilt.
    """
    say("measuring entropies")
    if subject.run is None:
        found = iter(_entropies(subject.model_name, [each for each in answers_P if each]))
        return [None if each is None else next(found) for each in answers_P]
    from es_cookbook.runs.export.export import write_export
    from es_cookbook.runs.replay import open_replay

    replay = open_replay(
        subject.run.history.parent,
        subject.generations[0],
        model_name=subject.run.model_name,
        trust=trust,
    )
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_export(replay, model, merge=True)
        found = iter(_entropies(str(model), [each for each in answers_P if each]))
        return [None if each is None else next(found) for each in answers_P]


def _entropies(model_name: str, answers: Sequence[Answer]) -> list[tuple[float, ...]]:
    # torch, which the options do without.
    import torch

    from es_cookbook.baselines.learner import Learner
    from es_cookbook.baselines.supervised import joined
    from es_cookbook.checkpoints.models import load_causal_lm

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_causal_lm(model_name, "float32", device)
    size = int(model.config.get_text_config().vocab_size)
    learner = Learner(model, (), tokens_per_pass=max(1, _LOGITS_PER_PASS // size))
    examples = [joined([(each.prompt_T, False), (each.tokens_T, True)]) for each in answers]
    return learner.entropies(examples)

"""What a thought is worth, measured where it is read: Envs of the study, which train nobody.

`StudiedEnv` has the policy think about a problem and measures the thought, by metrics:

    correct, correct/<extraction>   the answer behind it is right, wherever it stands in the text
    logprob                         mean log-probability of the answer's tokens behind it
    leaks                           the thought has the answer in it
    fragility/<damage>/<percent>    how much of `logprob` is lost where the thought is damaged
    fragility                       the mean of these over all damages above 0 %
    written, unrelated              `logprob` of the hand-written thought, and of another problem's
    useful                          whether the first is higher

`ScoredEnv` reads a thought that somebody else wrote, and samples nothing: `logprob` behind it, and
`informs`, how much of that is lost without any thought.
"""

import functools
import random
import statistics
import string
from collections.abc import Sequence
from typing import Literal, TypeAlias, assert_never, get_args

from typing_extensions import override

from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.markovian.answers import Extraction, given_answer, is_right, leaks
from es_cookbook.recipes.markovian.env import Asked, MarkovianProblem
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import (
    Action,
    Env,
    Observation,
    StepResult,
)

Damage: TypeAlias = Literal["delete", "truncate_front", "truncate_back", "digits", "alphanumerics"]

DAMAGES: tuple[Damage, ...] = get_args(Damage)
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

_ALPHANUMERICS = string.ascii_letters + string.digits


def damaged(thought: str, damage: Damage, share: float, seed: int) -> str:
    """The thought with a share of its characters, or of those that the damage is about, damaged.

        delete           characters, anywhere, are left out
        truncate_front   characters from the start are left out
        truncate_back    characters from the end are left out
        digits           digits are replaced by other digits
        alphanumerics    letters and digits are replaced by others of both

    as in Viteri et al. (arXiv:2404.18988). A share of 0 changes nothing. What is damaged is a
    function of the seed, and a larger share damages all that a smaller one does, and more.

    >>> damaged("8,17,19", "truncate_front", 0.4, 0), damaged("8,17,19", "truncate_back", 0.4, 0)
    ('7,19', '8,17')
    >>> damaged("8,17,19", "delete", 1.0, 0), damaged("8,17,19", "digits", 0.0, 0)
    ('', '8,17,19')
    """
    count = round(share * len(thought))
    if damage == "truncate_front":
        return thought[count:]
    if damage == "truncate_back":
        return thought[: len(thought) - count]
    rng = random.Random(seed)
    if damage == "delete":
        gone = set(rng.sample(range(len(thought)), len(thought))[:count])
        return "".join(each for i, each in enumerate(thought) if i not in gone)
    if damage == "digits":
        return _replaced(thought, string.digits, share, rng)
    if damage == "alphanumerics":
        return _replaced(thought, _ALPHANUMERICS, share, rng)
    assert_never(damage)


def _replaced(thought: str, alphabet: str, share: float, rng: random.Random) -> str:
    """A share of the characters that are in the alphabet, each by another one of it."""
    places = [i for i, each in enumerate(thought) if each in alphabet]
    others = [rng.choice(alphabet.replace(thought[i], "")) for i in places]
    order = rng.sample(range(len(places)), len(places))
    found = list(thought)
    for i in order[: round(share * len(places))]:
        found[places[i]] = others[i]
    return "".join(found)


FRAGILITY = "fragility"
EXTRACTIONS: tuple[Extraction, ...] = get_args(Extraction)


def fragility_metric(damage: str, share: float) -> str:
    """Its name: `fragility/delete/20`."""
    return f"{FRAGILITY}/{damage}/{100 * share:.0f}"


class StudiedEnv(Env):
    """A problem about which the policy is to think.

    Args:
        asked: the problem.
        unrelated: the hand-written thought about a problem with another answer, if there is one.
        seed: of what is damaged.
    """

    def __init__(self, asked: Asked, unrelated: str | None, seed: int) -> None:
        self._asked, self._unrelated, self._seed = asked, unrelated, seed

    @override
    async def initial_observation(self) -> Observation:
        return self._asked.observation

    @override
    async def step(self, action: Action) -> StepResult:
        asked, thought = self._asked, action.text
        whole = await asked.logprob(thought, self.policy)
        answer = await asked.answer(thought, self.policy)
        metrics = {
            "correct": float(asked.is_right(answer)),
            "logprob": whole,
            "leaks": float(leaks(thought, asked.gold)),
        }
        for extraction in EXTRACTIONS:
            found = given_answer(answer, asked.gold, extraction)
            metrics[f"correct/{extraction}"] = float(is_right(found, asked.gold))
        metrics |= await self._fragility(thought, whole)
        if asked.thought is not None and self._unrelated is not None:
            metrics["written"] = await asked.logprob(asked.thought, self.policy)
            metrics["unrelated"] = await asked.logprob(self._unrelated, self.policy)
            metrics["useful"] = float(metrics["written"] > metrics["unrelated"])
        logs = {"thought": thought, "answer": answer}
        return StepResult(whole, done=True, metrics=metrics, logs=logs)

    async def _fragility(self, thought: str, whole: float) -> dict[str, float]:
        lost: dict[str, float] = {}
        known = {thought: whole}
        for damage in DAMAGES:
            for share in SHARES:
                left = damaged(thought, damage, share, self._seed)
                if left not in known:
                    known[left] = await self._asked.logprob(left, self.policy)
                lost[fragility_metric(damage, share)] = whole - known[left]
        above = [lost[fragility_metric(damage, s)] for damage in DAMAGES for s in SHARES if s > 0]
        return {**lost, FRAGILITY: statistics.fmean(above)}


class ScoredEnv(Env):
    """A problem with a thought about it, which the policy reads."""

    def __init__(self, asked: Asked, thought: str) -> None:
        self._asked, self._thought = asked, thought

    @override
    async def initial_observation(self) -> Observation:
        return self._asked.observation

    @override
    async def act(self, observation: Observation) -> Action:
        return Action((), self._thought, "stop")

    @override
    async def step(self, action: Action) -> StepResult:
        asked = self._asked
        logprob = await asked.logprob(action.text, self.policy)
        informs = logprob - await asked.logprob("", self.policy)
        return StepResult(logprob, done=True, metrics={"logprob": logprob, "informs": informs})


def studied(problems_P: Sequence[MarkovianProblem], seed: int) -> list[ProblemGroupBuilder]:
    """The problems, each with the thought of the next one that has another answer."""
    found: list[ProblemGroupBuilder] = []
    for p, problem in enumerate(problems_P):
        others = (other.asked for other in (*problems_P[p + 1 :], *problems_P[:p]))
        thoughts = (o.thought for o in others if o.thought and o.gold != problem.asked.gold)
        purpose = derive_seed(seed, "study", p)
        env = functools.partial(StudiedEnv, problem.asked, next(thoughts, None), purpose)
        found.append(ProblemGroupBuilder(env, problem.name))
    return found

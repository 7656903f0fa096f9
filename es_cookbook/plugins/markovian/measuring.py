"""Envs of the study, which measure what thoughts are worth and train nothing.

`_StudiedEnv` has the policy think about a problem and measures the thought:

    correct, correct/<extraction>   the answer after it is correct, by where it stands in the text
    logprob                         mean log-probability of the answer's tokens after it
    leaks                           the thought contains the answer
    fragility/<damage>/<percent>    how much of `logprob` is lost if the thought is damaged
    fragility                       the mean of these over all damages above 0 %
    written, unrelated              `logprob` after the hand-written thought, and another problem's
    useful                          whether the first is higher

`ScoredEnv` reads a given thought and samples nothing: `logprob` after it, and `informs`, how much
of that is lost without any thought.
"""

import functools
import itertools
import random
import statistics
import string
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from typing_extensions import override

from es_cookbook.common.seeds import derive_seed
from es_cookbook.plugins.markovian.env import (
    Extraction,
    MarkovianEnv,
    MarkovianProblem,
    TokenizedProblem,
    given_answer,
    is_right,
)
from es_cookbook.rl.problem_env import Grade, ProblemGroupBuilder
from es_cookbook.rl.types import Action, Observation

Damage: TypeAlias = Literal["delete", "truncate_front", "truncate_back", "digits", "alphanumerics"]

DAMAGES: tuple[Damage, ...] = get_args(Damage)
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def damaged(thought: str, damage: Damage, share: float, seed: int) -> str:
    """Damage a share of a thought's characters, as Viteri et al. do (arXiv:2404.18988).

        delete           characters anywhere are removed
        truncate_front   characters from the start are removed
        truncate_back    characters from the end are removed
        digits           digits are replaced by other digits
        alphanumerics    letters and digits are replaced by other letters or digits

    For one seed, a larger share damages all that a smaller one does, and more.

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
    alphabet = string.digits if damage == "digits" else string.ascii_letters + string.digits
    return _replaced(thought, alphabet, share, rng)


def _replaced(thought: str, alphabet: str, share: float, rng: random.Random) -> str:
    """Replace a share of the characters in the alphabet, each by another one of it."""
    places = [i for i, each in enumerate(thought) if each in alphabet]
    others = [rng.choice(alphabet.replace(thought[i], "")) for i in places]
    order = rng.sample(range(len(places)), len(places))
    found = list(thought)
    for i in order[: round(share * len(places))]:
        found[places[i]] = others[i]
    return "".join(found)


FRAGILITY = "fragility"
EXTRACTIONS: tuple[Extraction, ...] = get_args(Extraction)


class _StudiedEnv(MarkovianEnv):
    """A problem for the policy to think about.

    Args:
        problem: the problem.
        unrelated: the hand-written thought about a problem with another answer, if there is one.
        seed: seed of the damage.
    """

    def __init__(self, problem: TokenizedProblem, unrelated: str | None, seed: int) -> None:
        super().__init__(problem)
        self._unrelated, self._seed = unrelated, seed

    @override
    async def graded(self, text: str) -> Grade:
        found = await super().graded(text)
        problem, policy, answer = self.tokenized, self.policy, found.logs["answer"]
        metrics = {**found.metrics, **await self._fragility(text, found.reward)}
        for extraction in EXTRACTIONS:
            given = given_answer(answer, problem.gold, extraction)
            metrics[f"correct/{extraction}"] = float(is_right(given, problem.gold))
        if problem.thought is not None and self._unrelated is not None:
            metrics["written"] = await problem.logprob(problem.thought, policy)
            metrics["unrelated"] = await problem.logprob(self._unrelated, policy)
            metrics["useful"] = float(metrics["written"] > metrics["unrelated"])
        return Grade(found.reward, metrics, {"thought": text, "answer": answer})

    async def _fragility(self, thought: str, whole: float) -> dict[str, float]:
        lost: dict[str, float] = {}
        known = {thought: whole}
        for damage, share in itertools.product(DAMAGES, SHARES):
            left = damaged(thought, damage, share, self._seed)
            if left not in known:
                known[left] = await self.tokenized.logprob(left, self.policy)
            lost[f"{FRAGILITY}/{damage}/{100 * share:.0f}"] = whole - known[left]
        above = [value for name, value in lost.items() if not name.endswith("/0")]
        return {**lost, FRAGILITY: statistics.fmean(above)}


class ScoredEnv(MarkovianEnv):
    """A problem with a given thought, which the policy reads."""

    def __init__(self, problem: TokenizedProblem, thought: str) -> None:
        super().__init__(problem)
        self._thought = thought

    @override
    async def act(self, observation: Observation) -> Action:
        return Action((), self._thought, "stop")

    @override
    async def graded(self, text: str) -> Grade:
        logprob, without = [await self.tokenized.logprob(t, self.policy) for t in (text, "")]
        return Grade(logprob, {"logprob": logprob, "informs": logprob - without})


def studied(problems_P: Sequence[MarkovianProblem], seed: int) -> list[ProblemGroupBuilder]:
    """Return the problems, each with the thought of the next with another answer."""
    found: list[ProblemGroupBuilder] = []
    for p, problem in enumerate(problems_P):
        others = (other.tokenized for other in (*problems_P[p + 1 :], *problems_P[:p]))
        thoughts = (o.thought for o in others if o.thought and o.gold != problem.tokenized.gold)
        purpose = derive_seed(seed, "study", p)
        env = functools.partial(_StudiedEnv, problem.tokenized, next(thoughts, None), purpose)
        found.append(ProblemGroupBuilder(env, problem.name))
    return found

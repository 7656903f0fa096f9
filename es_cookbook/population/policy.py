"""An engine as a `Policy`: one genome, the centre or the base, as the Env of one attempt sees it.

An attempt's policies share its sampling seeds and its clock. The n-th call has the n-th seed,
whichever of them makes it, so an Env that asks four times gets four samples; and the clock stands
still while the engine has control, so that only the Env's own time counts towards its time-out.
"""

import dataclasses
from collections.abc import Callable, Sequence

import chz

from es_cookbook.common.errors import RequestError
from es_cookbook.engines.base import Engine, Host, LogprobsRequest, SampleRequest, Target
from es_cookbook.rl.timeouts import Clock
from es_cookbook.rl.types import Action, Observation, Policy, SamplingParams


@dataclasses.dataclass(slots=True)
class Residents:
    """A block of the population that one host has together.

    Attributes:
        range_G: which genomes of the population.
        targets_G: how requests name them.
        host: where they are; None before they are loaded and once the host is given back.
        has_own_centre: engines may meanwhile have another centre than that of these genomes.
    """

    range_G: range
    targets_G: Sequence[Target]
    host: Host | None = None
    has_own_centre: bool = False


@dataclasses.dataclass(slots=True)
class Attempt:
    """What the policies of one attempt (its genome's, the centre's and the base's) share.

    `sampling` holds where an Env gives none; `clock` stands still while the engine has control.
    """

    engine: Engine
    sampling: SamplingParams
    residents: Residents
    seed_of_call: Callable[[int], int]
    clock: Clock
    num_calls: int = 0

    def answering(self, target: Target) -> Host:
        """Who answers for a target.

        Raises:
            RequestError: The genome's host has gone on to others, or to the next generation.
        """
        if target == "centre" and self.residents.has_own_centre:
            if self.residents.host is None:
                raise RequestError(
                    "the centre was asked after the engine had gone on to other genomes, and may "
                    "have moved: group rewards that ask it need max_staleness=0"
                )
            return self.residents.host
        if not isinstance(target, int):
            return self.engine
        if self.residents.host is None:
            fits = "that fits" if self.engine.num_engines == 1 else "that fits on one engine"
            raise RequestError(
                f"genome {self.residents.range_G[target]} was asked after the engine had gone on "
                f"to others; it hosts {self.engine.traits.capacity} at a time, so group rewards "
                f"that ask genomes need a population {fits} (policy.centre and policy.base are "
                "always there)"
            )
        return self.residents.host


class EnginePolicy(Policy):
    """One of an attempt's policies.

    Its calls raise `RequestError` where the engine can never serve them or hosts the genome no
    longer, and `EngineError` where the engine failed.
    """

    def __init__(self, attempt: Attempt, target: Target) -> None:
        self.attempt = attempt
        self.target: Target = target

    async def sample(
        self,
        observation: Observation,
        params: SamplingParams | None = None,
        seed: int | None = None,
    ) -> Action:
        """Sample one action, with the attempt's next seed if no other is given."""
        attempt = self.attempt
        host = attempt.answering(self.target)
        if seed is None:
            seed = attempt.seed_of_call(attempt.num_calls)
        attempt.num_calls += 1
        params = _limited(params or attempt.sampling, observation.max_tokens)
        request = SampleRequest(self.target, observation, params, seed)
        attempt.clock.wait()
        try:
            return await host.sample(request)
        finally:
            attempt.clock.go_on()

    async def logprobs(self, prompt_T: Sequence[int], continuation_T: Sequence[int]) -> list[float]:
        """Log-probability of each continuation token."""
        attempt = self.attempt
        host = attempt.answering(self.target)
        request = LogprobsRequest(self.target, tuple(prompt_T), tuple(continuation_T))
        attempt.clock.wait()
        try:
            return await host.logprobs(request)
        finally:
            attempt.clock.go_on()

    @property
    def sampling(self) -> SamplingParams:
        return self.attempt.sampling

    @property
    def context_length(self) -> int:
        return self.attempt.engine.traits.context_length

    @property
    def centre(self) -> "EnginePolicy":
        return EnginePolicy(self.attempt, "centre")

    @property
    def base(self) -> "EnginePolicy":
        return EnginePolicy(self.attempt, "base")


def _limited(params: SamplingParams, max_tokens: int | None) -> SamplingParams:
    if max_tokens is None or max_tokens >= params.max_tokens:
        return params
    return chz.replace(params, max_tokens=max_tokens)

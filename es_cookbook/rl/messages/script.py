"""A policy that says given texts, turn by turn: for tests, and to prove gold answers."""

from collections.abc import Sequence

from typing_extensions import override

from es_cookbook.common.errors import EnvError
from es_cookbook.rl.types import Action, Observation, Policy, SamplingParams, Tokenizer


class Script(Policy):
    """Says one text a turn, then the tokenizer's end-of-sequence token, if it has one.

    Args:
        texts: in order.
        tokenizer: turns them into tokens.
        context_length: of the engine that it stands in for.

    Attributes:
        seen: the observations up to now.
    """

    def __init__(
        self, texts: Sequence[str], tokenizer: Tokenizer, context_length: int = 2**20
    ) -> None:
        self.seen: list[Observation] = []
        self._texts = texts
        self._tokenizer = tokenizer
        self._context_length = context_length

    @override
    async def sample(
        self, observation: Observation, params: SamplingParams | None = None
    ) -> Action:
        """The next text, cut where no room is left.

        Raises:
            EnvError: There are no more.
        """
        turn = len(self.seen)
        if turn == len(self._texts):
            raise EnvError(f"the rollout was not done after all {turn} turns of a script")
        self.seen.append(observation)
        text = self._texts[turn]
        tokens_T = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        most = self._context_length - len(observation.tokens_T)
        most = min(most, observation.max_tokens or most)
        if len(tokens_T) > most:
            tokens_T = tokens_T[:most]
            return Action(tokens_T, str(self._tokenizer.decode(list(tokens_T))), "length")
        end = self._tokenizer.eos_token_id
        if isinstance(end, int) and len(tokens_T) < most:
            tokens_T += (end,)
        return Action(tokens_T, text, "stop")

    @override
    async def logprobs(self, prompt_T: Sequence[int], continuation_T: Sequence[int]) -> list[float]:
        """Certain: it says nothing else."""
        return [0.0] * len(continuation_T)

    @property
    @override
    def context_length(self) -> int:
        return self._context_length

    @property
    @override
    def centre(self) -> "Script":
        return self

    @property
    @override
    def base(self) -> "Script":
        return self

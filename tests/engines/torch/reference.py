"""What the torch engine's answers are held against: transformers, one genome at a time.

A greedy action is right if and only if the reference's most probable token after every prefix of it
is its next token, so one forward pass over prompts and actions checks them all.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from es_cookbook.checkpoints.linear_weights import named_weights
from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.checkpoints.peft import read_adapter
from es_cookbook.engines.base import LogprobsRequest, SampleRequest, Target
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.torch.host import TorchEngine
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.rl.types import Action, Observation, SamplingParams

LOGPROB_TOLERANCE = 1e-4
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
"""Device of engines that are held against the reference; `make gpu-test` has another."""


@asynccontextmanager
async def running_engine(
    path: Path, space: SearchSpaceBuilder, **options: object
) -> AsyncIterator[TorchEngine]:
    """A float32 engine of two lanes unless options say otherwise, closed in the end."""
    builder = TorchEngineBuilder(**{"dtype": "float32", "num_lanes": 2, "device": DEVICE} | options)
    engine = await builder(model_name=str(path), search_space=space)
    try:
        yield engine
    finally:
        await engine.close()


async def sample_all(engine: TorchEngine, requests: Sequence[SampleRequest]) -> list[Action]:
    """All at once, in this order."""
    return list(await asyncio.gather(*map(engine.sample, requests)))


async def score_all(engine: TorchEngine, requests: Sequence[LogprobsRequest]) -> list[list[float]]:
    """All at once, in this order."""
    return list(await asyncio.gather(*map(engine.logprobs, requests)))


async def wait_until_sampling(engine: TorchEngine) -> None:
    """Return once the engine has sampled another token than so far."""
    before = engine.stats()["tokens"]
    while engine.stats()["tokens"] == before:
        await asyncio.sleep(0.001)


def request(
    target: Target,
    prompt: Sequence[int],
    *,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    **params: object,
) -> SampleRequest:
    """A greedy request of 12 tokens with logprobs unless told otherwise."""
    observation = Observation(tuple(prompt), stop, stop_token_ids)
    sampling = SamplingParams(**{"max_tokens": 12, "logprobs": True} | params)
    return SampleRequest(target, observation, sampling, seed)


def who(genomes_G: Sequence[Genome], target: Target) -> Genome | Literal["base"]:
    """Whom a target names; the genome without terms is the centre."""
    if target == "base":
        return "base"
    return genomes_G[target] if isinstance(target, int) else Genome()


class Reference:
    """A transformers model and a centre of the test's own.

    Its distributions are over the tokenizer's tokens: rows of the embedding beside them are no
    tokens.
    """

    def __init__(self, path: Path, space: SearchSpaceBuilder) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.base = {name: p.detach().clone() for name, p in named_weights(self.model)}
        self.space = space(parameter_infos(self.model), read_adapter)
        self.centre = Centre(self.base, self.space)
        named = set(AutoTokenizer.from_pretrained(path).get_vocab().values())
        rows = range(self.model.get_input_embeddings().num_embeddings)
        self.nameless = [row for row in rows if row not in named]

    def become(self, who: Genome | Literal["base"]) -> None:
        """Take a genome's merged weights (`Genome()` is the centre), or the base's."""
        with torch.no_grad():
            for name, weight in named_weights(self.model):
                weight.copy_(self.base[name])
            if who != "base":
                values = {name: self.centre.perturbed(who, name) for name in self.space.shapes}
                self.space.merge_(dict(named_weights(self.model)), values)

    @torch.no_grad()
    def logits(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """(tokens, vocabulary) of each prompt; padding comes after, where nothing looks at it."""
        longest = max(map(len, prompts))
        padded = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts])
        logits = self.model(padded).logits
        logits[..., self.nameless] = -torch.inf
        return [row[: len(p)] for row, p in zip(logits, prompts, strict=True)]

    def check_greedy(
        self, who: Genome | Literal["base"], answers: Sequence[tuple[SampleRequest, Action]]
    ) -> None:
        """Assert that these actions are the model's own greedy ones, with its logprobs."""
        self.become(who)
        prompts = [request.observation.tokens_T for request, _ in answers]
        logits = self.logits([p + a.tokens_T for p, (_, a) in zip(prompts, answers, strict=True)])
        for prompt, (_, action), logits_T in zip(prompts, answers, logits, strict=True):
            predicting = logits_T[len(prompt) - 1 : -1]
            assert tuple(predicting.argmax(-1).tolist()) == action.tokens_T
            if action.logprobs_T is not None:
                self._check_logprobs(predicting, action.tokens_T, action.logprobs_T)

    def check_targets(
        self,
        genomes_G: Sequence[Genome],
        requests: Sequence[SampleRequest],
        actions: Sequence[Action],
    ) -> None:
        """Assert that every action is the greedy one of its target: genome, centre or base."""
        for target in {request.target: None for request in requests}:
            answers = zip(requests, actions, strict=True)
            own = [(request, action) for request, action in answers if request.target == target]
            self.check_greedy(who(genomes_G, target), own)

    def check_logprobs(
        self, prompt: Sequence[int], continuation: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        """Assert that these are the log-probabilities of the model it now is."""
        (logits,) = self.logits([[*prompt, *continuation]])
        self._check_logprobs(logits[len(prompt) - 1 : -1], continuation, logprobs)

    @staticmethod
    def _check_logprobs(
        predicting: torch.Tensor, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        expected = predicting.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).flatten()
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=LOGPROB_TOLERANCE)

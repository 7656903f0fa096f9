"""What low-rank genomes of any causal LM are held against: their weights merged, by transformers.

The model's own forward, one sequence at a time and without a cache, is its definition.
"""

import copy
import random
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.causal_lms import VOCABULARY
from es_cookbook.checkpoints.linear_weights import named_weights
from es_cookbook.engines.base import LogprobsRequest, Target
from es_cookbook.engines.torch.attention import set_attention
from es_cookbook.engines.torch.host import TorchEngine
from es_cookbook.engines.torch.self_check import TOLERANCE
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Genome, Step, Term
from tests.engines.torch.reference import request, sample_all, score_all

GENOMES_G = [Genome((Term(11, 0.05),)), Genome((Term(12, -0.03), Term(11, 0.02)))]
STEP = Step((Term(21, 0.03),))
LENGTHS = (1, 9)
"""Of prompts: fewer tokens than the tiny models' windows, past which they decode, and more."""


async def difference_from_merged(engine: TorchEngine, model: PreTrainedModel) -> float:
    """Return the greatest difference of a log-probability from that of merged weights.

    Base, centre and genomes sample greedily after prompts of several lengths and score; a token
    that is not the model's most probable counts as much as it is less probable. The engine was
    built of `model`, which stays as it was, and its centre moves.
    """
    rng = random.Random(1)
    prompts = [rng.choices(range(3, VOCABULARY), k=length) for length in LENGTHS]
    centre = Centre(dict(named_weights(model)), engine.space)
    assert await engine.apply(STEP) == centre.apply(STEP)
    await engine.load(GENOMES_G)
    targets: dict[Target, Genome | None] = {0: GENOMES_G[0], 1: GENOMES_G[1], "centre": Genome()}
    requests = [request(who, prompt, max_tokens=5) for prompt in prompts for who in targets]
    requests.append(request("base", prompts[-1], max_tokens=3))
    scored = [LogprobsRequest(who, (*prompts[0],), (*prompts[1],)) for who in targets]
    actions = await sample_all(engine, requests)
    scores = await score_all(engine, scored)
    differences: list[float] = []
    merged = copy.deepcopy(model)
    set_attention(merged, "eager")  # which is the model's definition
    for who, genome in {"base": None, **targets}.items():
        if genome is not None:
            _become(merged, centre, genome)
        for asked, action in zip(requests, actions, strict=True):
            if asked.target == who:
                assert action.logprobs_T is not None
                said = (asked.observation.tokens_T, action.tokens_T, action.logprobs_T)
                differences.append(_difference(merged, *said, greedy=True))
        for asked, logprobs_T in zip(scored, scores, strict=True):
            if asked.target == who:
                said = (asked.prompt_T, asked.continuation_T, logprobs_T)
                differences.append(_difference(merged, *said, greedy=False))
    return float(np.max(differences))  # NaN if any is


@torch.no_grad()
def _become(merged: PreTrainedModel, centre: Centre, genome: Genome) -> None:
    """Write a genome's weights into a model."""
    for name, weight in named_weights(merged):
        if name in centre.weights:
            weight.copy_(centre.perturbed(genome, name))


@torch.no_grad()
def _difference(
    model: PreTrainedModel,
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    logprobs: Sequence[float],
    greedy: bool,
) -> float:
    own_T_V = _logprobs(model, prompt, tokens)
    own_T = own_T_V.gather(1, torch.tensor(tokens)[:, None]).flatten()
    difference_T = (torch.tensor(logprobs) - own_T).abs()
    if greedy:
        difference_T = difference_T.maximum(own_T_V.amax(-1) - own_T)
    if bool((difference_T > TOLERANCE).any()):
        # Models that select tokens or experts have near-ties, where rounding chooses.
        difference_T[_undecided(model, prompt, tokens, own_T_V)] = 0
    return float(difference_T.max())


def _logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> torch.Tensor:
    """Return (tokens, vocabulary), by the model's own forward of one sequence."""
    sequence = torch.tensor([[*prompt, *tokens]])
    return model(input_ids=sequence).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def _undecided(
    model: PreTrainedModel,
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    own_T_V: torch.Tensor,
) -> torch.Tensor:
    """Return where answers change if weights change by a few units of float32.

    Also from a token on whose embedding is zero, as padding's can be: all its scores are equal.
    """
    embedding = cast("torch.nn.Embedding", model.get_input_embeddings())
    empty_T = ~embedding.weight[list(tokens)].any(-1)
    undecided_T = empty_T.roll(1).index_fill(0, torch.tensor([0]), False).cummax(0).values
    for seed in range(16):
        generator = torch.Generator().manual_seed(seed)
        shaken = copy.deepcopy(model)
        for parameter in shaken.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1 + 3e-7 * noise)
        shaken_T_V = _logprobs(shaken, prompt, tokens)
        undecided_T |= (shaken_T_V - own_T_V).abs().amax(-1) > TOLERANCE
    return undecided_T

"""Steps that graphs repeat give the answers of the usual path, whatever is in the batch.

Where no GPU is, a tape stands in for graphs: it records the operations of a step with the tensors
that they read and wrote, and repeats these alone, as a graph does.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from benchmarks.launches import is_in_place, made_by, tensors
from es_cookbook import FullRank, LowRank
from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.torch import host
from es_cookbook.engines.torch.flat import new_cache
from es_cookbook.engines.torch.gpu import graphs
from es_cookbook.engines.torch.gpu.graphs import TOKENS_AT_ONCE, CapturedForward, Step
from es_cookbook.engines.torch.kernels import modules
from es_cookbook.engines.torch.kernels.low_rank import LowRankTable
from es_cookbook.engines.torch.population_layers import LinearGroup, PopulationModel
from es_cookbook.engines.torch.prefix_cache import PrefixCache
from es_cookbook.engines.torch.slots import (
    Choice,
    SlotTable,
    Work,
    choose_on_device,
    choose_tokens,
    token_logprobs,
)
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.rl.types import Action
from tests.engines.torch.reference import DEVICE, request, running_engine, sample_all
from tests.families import sampled
from tests.tiny_models import EOS, FIRST_CHARACTER, VOCABULARY, TinyModel

GENOMES_G = [Genome((Term(5 + g // 2, 0.1 * (-1) ** g),)) for g in range(5)]
ONE_LANE = {"num_lanes": 1, "max_batch_size": 32}


class Tape(TorchDispatchMode):
    """Records a step while it runs; called again, repeats it on the same tensors."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.is_new = True
        self.calls: list[tuple[Any, Sequence[Any], Mapping[str, Any], list[torch.Tensor]]] = []
        with self:
            step()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> object:
        found = func(*args, **(kwargs or {}))
        made = made_by(func, args, found)
        if made or is_in_place(func):  # no view
            self.calls.append((func, args, kwargs or {}, made))
        return found

    def __call__(self) -> None:
        if self.is_new:  # a graph runs nothing while it is captured
            self.is_new = False
            return
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            for own, new in zip(made, tensors(again) if made else (), strict=True):
                own.copy_(new)


def _requests(number: int, seed: int) -> list[SampleRequest]:
    """Greedy and hot ones, with and without stops, of lengths that make rows come and go."""
    rng = random.Random(seed)
    return [
        request(
            rng.choice((0, 1, 2, 3, 4, "centre", "base")),
            [5] * 9 + rng.choices(range(FIRST_CHARACTER, VOCABULARY), k=rng.choice((1, 7, 8, 30))),
            max_tokens=rng.choice((1, 2, 5, 23)),
            temperature=rng.choice((0.0, 0.0, 0.8)),
            top_p=rng.choice((1.0, 0.9)),
            logprobs=rng.choice((True, False)),
            stop=rng.choice(((), ("a",))),
            stop_token_ids=rng.choice(((), (7,))),
            seed=i,
        )
        for i in range(number)
    ]


def _check_same(actions: Sequence[Action], expected: Sequence[Action]) -> None:
    """Log-probabilities are rounded otherwise in batches of other heights."""
    for action, wanted in zip(actions, expected, strict=True):
        close = wanted.logprobs_T and pytest.approx(wanted.logprobs_T, abs=1e-4)
        assert action.logprobs_T == close
        assert dataclasses.replace(action, logprobs_T=wanted.logprobs_T) == wanted


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said, on a machine where all runs as on a GPU."""
    said: list[str] = []
    monkeypatch.setattr(modules, "KERNEL_DEVICES", frozenset())
    monkeypatch.setattr(graphs, "say_once", said.append)
    return said


@pytest.mark.parametrize(
    ("family", "space"),
    sampled(
        [
            ("qwen2", LowRank()),
            ("qwen3", FullRank()),
            ("llama", Adapter(rank=2)),
            ("gemma2", LowRank(rank=2)),
            ("gemma3", LowRank()),
            ("gpt_neox", LowRank()),
        ],
        1,
    ),
)
@pytest.mark.gpu
async def test_repeated_steps_give_the_answers_of_the_usual_path(
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    said: list[str],
    family: str,
    space: SearchSpaceBuilder,
) -> None:
    tapes: list[Tape] = []

    def capture(step: Step) -> Step:
        tapes.append(Tape(step))
        return tapes[-1]

    captures = (lambda _: lambda: capture) if DEVICE == "cpu" else host.captures
    monkeypatch.setattr(host, "captures", lambda _: None)
    waves = [_requests(24, seed) for seed in (1, 2, 1)]
    async with running_engine(tiny_model(family), space, **ONE_LANE) as engine:
        await engine.load(GENOMES_G)
        expected = [await sample_all(engine, requests) for requests in waves]
    monkeypatch.setattr(host, "captures", captures)
    async with running_engine(tiny_model(family), space, **ONE_LANE) as engine:
        await engine.load(GENOMES_G)
        for requests, wanted in zip(waves, expected, strict=True):
            _check_same(await sample_all(engine, requests), wanted)
    assert DEVICE != "cpu" or (len(tapes) > 3 and not any(tape.is_new for tape in tapes))
    assert not said


def _fails(step: Step) -> Step:
    raise RuntimeError("CUDA error: out of memory\nAsynchronous errors may be reported later.")


@pytest.mark.parametrize(
    ("family", "says"), [("qwen2", "CUDA error: out of memory"), ("experts", "waits for aten")]
)
async def test_without_graphs_a_run_goes_on_and_says_why(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, said: list[str], family: str, says: str
) -> None:
    requests = _requests(12, seed=1)
    async with running_engine(tiny_model(family), LowRank(), **ONE_LANE) as engine:
        await engine.load(GENOMES_G)
        expected = await sample_all(engine, requests)
    monkeypatch.setattr(host, "captures", lambda _: lambda: _fails)
    async with running_engine(tiny_model(family), LowRank(), **ONE_LANE) as engine:
        await engine.load(GENOMES_G)
        for _ in range(3):
            _check_same(await sample_all(engine, requests), expected)
    assert len(said) == 1 and says in said[0] and "\n" not in said[0]


def test_steps_need_nothing_of_the_host(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    device = torch.device("meta")  # what reads a number of it fails
    model = PopulationModel(AutoModelForCausalLM.from_pretrained(tiny_model("gemma2")).to(device))

    def table(group: LinearGroup) -> LowRankTable:
        outputs, inputs = sum(group.sizes), group.in_features
        a, b = (torch.empty(3, 1, size, device=device) for size in (outputs, inputs))
        return LowRankTable(a, b.mT, np.array([[0, outputs]]))

    model.tables = [table(group) for group in model.groups if isinstance(group, LinearGroup)]
    prefixes = PrefixCache(new_cache(device, 64, torch.float32), 0)
    flat = device, 512, prefixes, None, np.array([EOS])
    forward, slots = CapturedForward(*flat, lambda: lambda step: step), SlotTable(16, 32)
    forward.fit(16, 32)
    forward.turn_to(model)
    hot = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 9}
    works = [Work(request(g, [5, 6], **hot), model, g, 9) for g in (0, 1)]
    looks = 0

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal looks
        looks += 1
        return torch.full(tensor.shape, 3, dtype=tensor.dtype)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    with torch.inference_mode():
        placed = list(zip(forward.admit(works), slots.place(works), strict=True))
        for of_slots, tokens, logprobs in forward.first_tokens(slots, placed):
            slots.accept(of_slots, tokens, logprobs)
        for of_slots, tokens, logprobs in forward.next_tokens(slots):
            slots.accept(of_slots, tokens, logprobs)
    assert slots.count.sum() == 2 * (1 + TOKENS_AT_ONCE)
    assert looks == 2 * 2 and not said  # tokens and log-probabilities


def test_devices_choose_the_tokens_that_kernels_choose() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(64, 997), scale=3).astype(np.float32))
    options = np.stack([rng.choice((0, 0.7, 1.0), 64), rng.choice((0.9, 1.0), 64), rng.random(64)])
    expected = choose_tokens(logits, *options, np.arange(64))
    tokens, logprobs = choose_on_device(logits, torch.from_numpy(options), Choice(True, True, True))
    assert tokens.tolist() == expected.tolist() and logprobs is not None
    wanted = token_logprobs(logits, np.arange(64), expected)
    torch.testing.assert_close(logprobs, torch.from_numpy(wanted))

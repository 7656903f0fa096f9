"""Real vLLM on real (tiny) models, held against transformers and against the torch engine.

Of some, linear weights are transposed.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from es_cookbook import FullRank, LowRank, VLLMEngineBuilder
from es_cookbook.checkpoints.linear_weights import named_weights
from es_cookbook.common.errors import ConfigError, EngineError, RequestError
from es_cookbook.engines.base import LogprobsRequest
from es_cookbook.engines.torch.kernels import products
from es_cookbook.evolution.genome import Genome, MuonRule, Offsets, OffsetsRule, Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.plugins.cma.singular_values import SingularValues
from es_cookbook.runs.centre.snapshots import write_snapshot
from tests.adapters import make_adapter
from tests.engines.running import Running
from tests.engines.torch.reference import Reference, request
from tests.families import sampled
from tests.integration.vllm_models import CONTEXT, make_vllm_model
from tests.linear_models import LINEAR_FAMILIES, make_linear_model
from tests.tiny_models import save_with_tokenizer

psutil = pytest.importorskip("psutil")  # comes with vLLM
pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.usefixtures("warm_vllm")]

STEPS = (
    Step((Term(1, 0.02), Term(2, -0.03), Term(3, 0.1))),
    Step(),
    Step((Term(4, 0.05), Term(5, 0.02)), decay=0.25, rule=MuonRule(0.05, 5)),
)
PROMPTS = ((5, 7, 9), (11,), tuple(range(3, 30)), (5, 7, 9, 12, 30))


class VLLM(Running):
    """A vLLM engine that holds little, unless options say otherwise."""

    # Their own dtype is float32, and that it is kept shows in every comparison.
    def __init__(self, path: Path, space: SearchSpaceBuilder, **options: object) -> None:
        settings: dict[str, Any] = {"max_genomes": 5, "kv_cache_gib": 0.05}
        # Blocks of 32 tokens, so that short prompts have some to share.
        settings |= {"extra": {"block_size": 32}, "gpu_memory_utilization": 0.3}
        super().__init__(VLLMEngineBuilder(**settings | options), path, space)


def genomes(count: int, first: int = 100) -> list[Genome]:
    """Mirrored pairs, and one that is the centre at the end."""
    pairs = [Genome((Term(first + i // 2, 0.05 * (1 - 2 * (i % 2))),)) for i in range(count - 1)]
    return [*pairs, Genome()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("vllm")

    def path_of(family: str) -> Path:
        make = make_linear_model if family in LINEAR_FAMILIES else make_vllm_model
        return path if (path := root / family).exists() else make(family, path)

    return path_of


@pytest.fixture(scope="module")
def low_rank(model: Callable[[str], Path], warm_vllm: None) -> Iterator[Running]:
    with VLLM(model("qwen2"), LowRank()) as running:
        yield running


SHARES = {
    "partitions": 3,
    "sigma_patterns": ("*.q_proj.*", "*.k_proj.*"),
    "sigma_factors": (2, 0.5),
}
SPACES = {
    "rank 3, two terms, untied, shared": ("llama", LowRank(rank=3, **SHARES)),
    "dense": ("qwen3", FullRank()),
    "adapters": ("llama", Adapter(rank=3, exclude=("*up_proj*", "lm_head*"))),
    "transposed, untied head": ("gpt2, untied", LowRank(rank=2)),
    "transposed, adapters": ("gpt2", Adapter(rank=2, init="orthogonal")),
}


@pytest.mark.parametrize("which", sampled(SPACES, 3))
def test_every_target_answers_as_its_merged_weights_would(
    model: Callable[[str], Path], which: str, tmp_path: Path
) -> None:
    family, space = SPACES[which]
    options = {"terms_per_genome": 2} if "two terms" in which else {}
    with VLLM(model(family), space, **options) as running:
        check_all_the_way(running, Reference(model(family), space), tmp_path)


def test_so_does_every_target_of_the_shared_engine(low_rank: Running, tmp_path: Path) -> None:
    check_all_the_way(low_rank, Reference(low_rank.path, LowRank()), tmp_path)


def check_all_the_way(running: Running, reference: Reference, tmp_path: Path) -> None:
    """Answers after every step, and what is restored and saved."""
    traits, call = running.engine.traits, running.portal.call
    terms = getattr(running.builder, "terms_per_genome", 1)
    assert traits.base_dtype == "float32"
    space = running.space
    hosted = {1: 1, 2: 4, 3: 2}[space.rank] if isinstance(space, LowRank) else None
    assert traits.max_terms == hosted
    answers: set[tuple[int, ...]] = set()
    for generation, step in enumerate([Step(), *STEPS]):
        assert call(running.engine.apply, step) == reference.centre.apply(step)
        genomes_G = genomes(traits.capacity, 100 * (generation + 1))
        if terms == 2:
            genomes_G[0] = Genome((*genomes_G[0].terms, Term(7, -0.02)))
        # The same prompts in each generation: nothing may come from the others' cache.
        answers = check_targets(running, reference, genomes_G)
    assert len(answers) > len(PROMPTS)
    assert call(running.engine.restore, STEPS[:2]) == reference.centre.restore(STEPS[:2])
    check_centre(running, reference)
    check_restoring_from_a_snapshot(running, reference, tmp_path)
    check_saved(running, reference, tmp_path / "saved")


def check_targets(
    running: Running, reference: Reference, genomes_G: Sequence[Genome]
) -> set[tuple[int, ...]]:
    """That all answer as they should; gives the answers."""
    running.load(genomes_G)
    targets = ["centre", *range(len(genomes_G)), "base"]
    asked = [request(target, prompt) for prompt in PROMPTS for target in targets]
    pairs = list(zip(asked, running.sample(asked), strict=True))
    for target in targets:
        who = genomes_G[target] if isinstance(target, int) else Genome()
        of_target = [pair for pair in pairs if pair[0].target == target]
        reference.check_greedy("base" if target == "base" else who, of_target)
    return {answer.tokens_T for _, answer in pairs}


def check_centre(running: Running, reference: Reference) -> None:
    asked = [request("centre", prompt) for prompt in PROMPTS]
    reference.check_greedy(Genome(), list(zip(asked, running.sample(asked), strict=True)))


def check_saved(running: Running, reference: Reference, path: Path) -> None:
    """That the centre is saved as transformers has it."""
    running.portal.call(running.engine.save, path)
    reference.become(Genome())
    expected = dict(named_weights(reference.model))
    saved = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert all(torch.equal(weight, expected[name]) for name, weight in named_weights(saved))
    with pytest.raises(EngineError, match="exists already"):
        running.portal.call(running.engine.save, path)


def test_singular_values_and_coordinates(model: Callable[[str], Path], tmp_path: Path) -> None:
    path = model("llama")
    space = SingularValues(start=str(make_adapter(path, tmp_path / "adapter")))
    reference = Reference(path, space)
    size = sum(weight.numel() for weight in reference.centre.weights.values())
    rng = np.random.default_rng(0)
    points = [Offsets.of(rng.normal(size=size) * 2) for _ in range(5)]
    genomes_G = [*(Genome(offsets=point) for point in points[:4]), Genome((Term(3, 1.0),))]
    steps = [Step(rule=OffsetsRule(points[4], 1.0)), Step((Term(4, 0.5),))]
    with VLLM(path, space) as running:
        for step in steps:
            moved = running.portal.call(running.engine.apply, step)
            assert moved == reference.centre.apply(step)
            assert len(check_targets(running, reference, genomes_G)) > 2 * len(PROMPTS)
        restored = running.portal.call(running.engine.restore, steps)
        assert restored == reference.centre.restore(steps)
        check_saved(running, reference, tmp_path / "saved")


@pytest.fixture
def narrow(model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint in bfloat16."""
    wide = AutoModelForCausalLM.from_pretrained(model("qwen2"), dtype=torch.bfloat16)
    save_with_tokenizer(wide, tmp_path / "narrow")
    return tmp_path / "narrow"


def test_bfloat16_is_held_in_float32_where_the_processor_multiplies_that_faster(
    narrow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are rounded all the same: answers and fingerprints are those of bfloat16 weights."""
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
    reference = Reference(narrow, LowRank())
    with VLLM(narrow, LowRank(), max_genomes=1) as running:
        assert running.engine.traits.base_dtype == "bfloat16"
        for step in STEPS:
            fingerprint = running.portal.call(running.engine.apply, step)
            assert fingerprint == reference.centre.apply(step)
        reference.become(Genome())
        with torch.inference_mode():
            for weight in reference.model.parameters():
                weight.copy_(weight.bfloat16())
        prompt, continuation = (5, 6, 7), (8, 9, 10, 11)
        (found,) = running.score([LogprobsRequest("centre", prompt, continuation)])
        reference.check_logprobs(prompt, continuation, found)


def check_restoring_from_a_snapshot(running: Running, reference: Reference, path: Path) -> None:
    """Each rank reads its own parts; without the file it begins at the base."""
    expected = reference.centre.restore(STEPS)
    fingerprint = reference.centre.restore(STEPS[:1])
    shapes = reference.space.shapes.items()
    write_snapshot(path, 1, fingerprint, shapes, reference.centre.weights.items())
    snapshot = path / "snapshots" / "000001.safetensors"
    # The first step is in the snapshot: what is said of it here does not matter.
    restored = running.portal.call(running.engine.restore, [Step(), *STEPS[1:]], snapshot)
    assert restored == expected
    reference.centre.restore(STEPS)
    check_centre(running, reference)
    assert running.portal.call(running.engine.restore, STEPS, path / "elsewhere") == expected


def test_logprobs_of_a_continuation_up_to_the_full_context(low_rank: Running) -> None:
    genomes_G = genomes(3)
    low_rank.portal.call(low_rank.engine.restore, [])
    low_rank.load(genomes_G)
    reference = Reference(low_rank.path, low_rank.space)
    full = tuple(3 + i % 30 for i in range(CONTEXT - 10))
    cases = [((5,), (6,)), ((5, 6, 7), (8, 9, 10, 11)), (full, tuple(range(3, 13)))]
    for target, who in ((0, genomes_G[0]), ("centre", Genome()), ("base", "base")):
        reference.become(who)
        found = low_rank.score([LogprobsRequest(target, *case) for case in cases])
        for case, logprobs in zip(cases, found, strict=True):
            reference.check_logprobs(*case, logprobs)


def test_a_genomes_next_turn_continues_from_its_own_cache_only(
    low_rank: Running, model: Callable[[str], Path]
) -> None:
    engine = low_rank.engine
    reference = Reference(model("qwen2"), LowRank())
    low_rank.portal.call(engine.restore, [])
    first_T = tuple(3 + i % 31 for i in range(60))
    for generation in range(2):  # of which the second one's genomes are in the first one's slots
        genomes_G = genomes(3, first=700 + 100 * generation)
        low_rank.load(genomes_G)
        before = engine.stats()["cached_tokens"]
        actions = low_rank.sample([request(g, first_T) for g in range(3)])
        assert engine.stats()["cached_tokens"] == before
        # The second turns of all, asked of everybody: who has the tokens is who wrote them.
        for g, action in enumerate(actions):
            second_T = (*first_T, *action.tokens_T, 5, 6, 7)
            for other in range(3):
                before = engine.stats()["cached_tokens"]
                asked = request(other, second_T)
                (answer,) = low_rank.sample([asked])
                found = engine.stats()["cached_tokens"] - before
                same = action.tokens_T[:4] == actions[other].tokens_T[:4]
                # Blocks of 32: the first prompt fills one, and with four tokens more two.
                assert found == 64 if other == g else found in ((32, 64) if same else (32,))
                reference.check_greedy(genomes_G[other], [(asked, answer)])


def test_a_cancelled_request_is_aborted_in_vllm(
    low_rank: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = low_rank.engine
    low_rank.load(genomes(2))
    aborting: list[AsyncLLM] = []
    abort = AsyncLLM.abort

    async def noted(llm: AsyncLLM, *args: Any, **options: Any) -> None:
        aborting.append(llm)
        await abort(llm, *args, **options)

    monkeypatch.setattr(AsyncLLM, "abort", noted)

    async def cancel() -> None:
        asked = request(0, (5,), max_tokens=CONTEXT - 1)
        tasks = [asyncio.create_task(engine.sample(asked)) for _ in range(20)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in done)
        assert len(aborting) == 20
        assert aborting[0].get_num_unfinished_requests() == 0

    low_rank.portal.call(cancel)
    low_rank.load(genomes(2))  # Nothing is in flight any more.


def test_weights_do_not_change_under_a_request(low_rank: Running) -> None:
    engine = low_rank.engine
    low_rank.load(genomes(2))

    async def change_under_way() -> None:
        running = asyncio.create_task(engine.sample(request(0, (5,), max_tokens=60)))
        await asyncio.sleep(0)
        for change in (engine.load([]), engine.apply(Step()), engine.restore([])):
            with pytest.raises(EngineError, match="with 1 request in flight"):
                await change
        await running

    low_rank.portal.call(change_under_way)


def test_wrong_requests_are_refused_and_others_are_answered(low_rank: Running) -> None:
    low_rank.load(genomes(2))
    with pytest.raises(EngineError, match=r"6 genomes do not fit.*hosts 5.*engine\.max_genomes"):
        low_rank.load(genomes(6))
    two_terms = Genome((Term(1, 0.1), Term(2, 0.1)))
    with pytest.raises(EngineError, match=r"no room for 1 genome of rank 2.*terms_per_genome"):
        low_rank.load([two_terms])
    low_rank.load(genomes(2))
    for target in (2, -1):
        with pytest.raises(RequestError, match=f"no genome {target}: 2 are loaded"):
            low_rank.sample([request(target, (5,))])
    with pytest.raises(RequestError, match=f"leaves no room .* {CONTEXT} tokens"):
        low_rank.sample([request(0, (5,) * CONTEXT)])
    with pytest.raises(RequestError, match=r"vLLM refuses a request: temperature .* got 3\.0"):
        low_rank.sample([request(0, (5,), temperature=3.0)])
    with pytest.raises(RequestError, match=r"temperature 0 .*, or from 0\.01 on, found 0\.005"):
        low_rank.sample([request(0, (5,), temperature=0.005)])
    assert low_rank.sample([request(0, (5,), max_tokens=1)])


def test_a_tensor_parallel_engine_answers_as_a_single_rank_does(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    path, space = model("llama"), LowRank(rank=2)
    reference = Reference(path, space)
    with VLLM(path, space, tensor_parallel_size=2, max_genomes=3) as running:
        for step in STEPS:
            applied = running.portal.call(running.engine.apply, step)
            assert applied == reference.centre.apply(step)
        check_targets(running, reference, genomes(3))
        check_restoring_from_a_snapshot(running, reference, tmp_path)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpus_lora_arithmetic(rank: int, dtype: torch.dtype) -> None:
    from es_cookbook.engines.vllm import cpu

    torch.manual_seed(0)
    x, y = torch.randn(50, 33).to(dtype), torch.randn(50, 60).to(dtype)
    a, b = torch.randn(7, rank, 33).to(dtype), torch.randn(7, 41, rank).to(dtype)
    slot_T = torch.randint(-1, 7, (50,))
    expected = y.float()
    for token, slot in enumerate(slot_T.tolist()):
        if slot >= 0:
            expected[token, 9:50] += 0.5 * b[slot].float() @ (a[slot].float() @ x[token].float())
    cpu.add_product(y, 9, x, a, b, slot_T, 0.5)
    torch.testing.assert_close(
        y.float(), expected, atol=2e-5 if dtype == torch.float32 else 0.5, rtol=0
    )
    untouched = torch.tensor([slot < 0 for slot in slot_T.tolist()])
    assert untouched.any()
    assert torch.equal(y[untouched].float(), expected[untouched])


async def _start(path: object, space: SearchSpaceBuilder, **options: object) -> None:
    engine = await VLLMEngineBuilder(**options)(model_name=str(path), search_space=space)
    await engine.close()


async def test_a_space_that_no_slot_can_hold_is_refused_before_vllm_starts(
    model: Callable[[str], Path],
) -> None:
    with pytest.raises(ConfigError, match=r"slots of rank 600 .*terms_per_genome.*at most 512"):
        await _start(model("qwen2"), LowRank(rank=300), terms_per_genome=2)
    with pytest.raises(ConfigError, match="matches no parameter"):
        await _start(model("qwen2"), LowRank(include=("nothing*",)))


async def test_slots_of_32_bits_are_refused_on_gpus(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(ConfigError, match=r"of 16 bits only, .* use engine\.dtype=bfloat16"):
        await _start(model("qwen2"), LowRank())


async def test_experts_are_refused_before_vllm_starts(model: Callable[[str], Path]) -> None:
    """Of the CPU build, and wherever genomes would need slots of them."""
    with pytest.raises(ConfigError, match=r"no LoRA slots for fused experts, .*gate_up_proj\[0\]"):
        await _start(model("qwen3_moe"), LowRank())
    with pytest.raises(ConfigError, match=r"hosts no model with fused experts on the CPU"):
        await _start(model("qwen3_moe"), FullRank())


async def test_an_argument_that_vllm_does_not_have_is_named(model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.extra.*'max_num_sequences'.*max_num_seqs"):
        await _start(model("qwen2"), LowRank(), extra={"max_num_sequences": 3})


async def test_without_vllm_the_error_says_what_to_install(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"pip install 'es-cookbook\[vllm\]'"):
        await _start(model("qwen2"), LowRank())

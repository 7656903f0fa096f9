"""The engine on llama.cpp, with the real library over small files, beside the torch engine."""

import asyncio
import ctypes
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import GPT2Config

from es_cookbook import LowRank, Observation, SamplingParams, TorchEngineBuilder
from es_cookbook.checkpoints.model_files import CACHE
from es_cookbook.common.errors import ConfigError, EngineError, ModelError
from es_cookbook.common.terminal import show_bytes
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.plugins.gguf.export import llama_cpp_factors, write_gguf
from es_cookbook.plugins.gguf.form import GGUF
from es_cookbook.plugins.llama_cpp.engine import LlamaCppEngineBuilder
from es_cookbook.plugins.llama_cpp.library import PACKAGE, Library, Refused
from es_cookbook.plugins.llama_cpp.model import load
from es_cookbook.plugins.llama_cpp.process import LlamaProcess
from es_cookbook.plugins.llama_cpp.rows import Row, Work, begin, next_pass
from es_cookbook.plugins.plan.plan import PlanConfig
from es_cookbook.plugins.plan.plan import main as plan
from es_cookbook.plugins.vectors.spaces import Steering
from es_cookbook.runs.centre.replay import open_replay
from es_cookbook.runs.export.export import write_export
from tests.engines.running import Running
from tests.engines.torch.reference import request
from tests.gguf_models import make_gguf_model
from tests.runs.recorded_run import record_run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed"
)
SPACE = Adapter(rank=2, alpha=3.0, init="orthogonal")
GENOMES_G = [Genome((Term(3, 0.4),)), Genome((Term(4, -0.3), Term(5, 0.2)))]
TOLERANCE = 0.02
"""llama.cpp rounds keys, values and rows of products to 16 bits."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, str(tmp_path_factory.mktemp("cache")))
        yield


def make_file(kind: str, directory: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    model, file = make_gguf_model(kind, directory / kind), directory / f"{kind}.gguf"
    write_gguf(model, file, options.get("matrices", "float16"), str(model))
    return file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_file("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(file: Path) -> Iterator[Running]:
    with Running(LlamaCppEngineBuilder(threads=1, max_batch_size=4), file, SPACE) as running:
        yield running


@pytest.fixture(scope="module")
def reference(file: Path) -> Iterator[Running]:
    with Running(TorchEngineBuilder(device="cpu", num_lanes=1), file, SPACE) as running:
        yield running


def prompt(i: int) -> tuple[int, ...]:
    return (5, 9, 3, *(20 + i * k % 200 for k in range(i % 7)))


@pytest.mark.daily
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3"])
def test_genomes_score_as_on_the_torch_engine(kind: str, tmp_path: Path) -> None:
    """Rows of queries and keys stand in another order in files of Llama."""
    file = make_file(kind, tmp_path)
    asked = [
        LogprobsRequest(target, prompt(i), tuple(range(30, 38)))
        for target in ("base", "centre", 0, 1)
        for i in range(4)
    ]
    scores = []
    for builder in (LlamaCppEngineBuilder(threads=1), TorchEngineBuilder(device="cpu")):
        with Running(builder, file, SPACE) as running:
            scores.append(torch.tensor(running.score(asked, GENOMES_G)))
    ours, theirs = scores
    assert (ours - theirs).abs().mean() < TOLERANCE / 4
    assert (ours - theirs).abs().max() < 5 * TOLERANCE
    base, _, one, other = theirs.split(4)
    assert (one - base).abs().max() > 3 * TOLERANCE
    assert (one - other).abs().max() > 3 * TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_file_with_steering_vectors_as_biases_scores_as_the_run(
    kind: str, tmp_path: Path
) -> None:
    base = make_gguf_model(kind, tmp_path / "base")
    run = record_run(tmp_path / "run", base, Steering(), (Step((Term(1, 0.5),)),)).path
    write_export(open_replay(run), tmp_path / "out", form=GGUF())
    asked = [LogprobsRequest("base", prompt(i), tuple(range(30, 38))) for i in range(4)]
    scores = []
    for model in (tmp_path / "out/out.gguf", run, base):
        builder = TorchEngineBuilder(device="cpu")
        if model.suffix:
            builder = LlamaCppEngineBuilder(threads=1)
        with Running(builder, model, SPACE) as running:
            scores.append(torch.tensor(running.score(asked, [])))
    ours, theirs, before = scores
    assert (ours - theirs).abs().max() < 5 * TOLERANCE
    assert (theirs - before).abs().max() > 20 * TOLERANCE


def test_a_seed_draws_as_on_the_torch_engine(engine: Running, reference: Running) -> None:
    hot = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 1}
    asked = [
        request(target, prompt(i), seed=seed, **hot)
        for target in (0, "base")
        for seed in range(40)
        for i in range(5)
    ]
    ours, theirs = (each.sample(asked, GENOMES_G) for each in (engine, reference))
    same = sum(a.tokens_T == b.tokens_T for a, b in zip(ours, theirs, strict=True))
    assert same > 0.97 * len(asked), "all but those at a border between two tokens"


def test_more_requests_than_rows_share_prefixes_and_get_their_own_answers(engine: Running) -> None:
    long = tuple(20 + i * i % 180 for i in range(60))
    asked = [request(i % 2, (*long, 30 + i % 5), max_tokens=4 + i % 7) for i in range(40)]
    before = engine.engine.stats()
    together = engine.sample(asked, GENOMES_G)
    after = engine.engine.stats()
    assert [len(action.tokens_T) for action in together] == [4 + i % 7 for i in range(40)]
    alone = [engine.sample([each], GENOMES_G)[0] for each in asked[:6]]
    for one, other in zip(alone, together, strict=False):
        assert one.tokens_T == other.tokens_T
        assert one.logprobs_T == pytest.approx(other.logprobs_T, abs=TOLERANCE)
    assert after["prefilled_tokens"] - before["prefilled_tokens"] < 2 * 61 + 40 * 3
    assert after["cached_tokens"] > before["cached_tokens"]


def test_an_action_ends_at_stop_texts_and_stop_tokens(engine: Running) -> None:
    free, *_ = engine.sample([request(0, prompt(3), max_tokens=10)], GENOMES_G)
    third = free.tokens_T[2]
    first = free.tokens_T.index(third)
    (by_token,) = engine.sample([request(0, prompt(3), stop_token_ids=(third,))], GENOMES_G)
    assert (by_token.tokens_T, by_token.stop_reason) == (free.tokens_T[: first + 1], "stop")
    params = SamplingParams(max_tokens=10, stop=(free.text[1:3],))
    of_run = SampleRequest(0, Observation(prompt(3)), params)
    (by_text,) = engine.sample([of_run], GENOMES_G)
    assert by_text.text == free.text[: free.text.index(free.text[1:3])]
    assert by_text.stop_reason == "stop"


def test_the_centre_moves_as_on_the_torch_engine_to_the_bit(
    engine: Running, reference: Running
) -> None:
    steps = [Step((Term(7, 0.01), Term(8, -0.02))), Step((Term(9, 0.03),), decay=0.1)]
    found = [
        [running.portal.call(running.engine.apply, step) for step in steps]
        for running in (engine, reference)
    ]
    assert found[0] == found[1]
    asked = [LogprobsRequest("centre", prompt(5), (30, 31, 32))]
    ours, theirs = (torch.tensor(each.score(asked)) for each in (engine, reference))
    assert (ours - theirs).abs().max() < TOLERANCE
    for running in (engine, reference):
        assert running.portal.call(running.engine.restore, steps[:1]) == found[0][0]
        running.portal.call(running.engine.restore, [])


def test_top_tokens_are_beside_their_log_probabilities(engine: Running, reference: Running) -> None:
    asked = [LogprobsRequest(0, prompt(4), tuple(range(30, 36)))]
    ((ours,), (theirs,)) = (each.tops(asked, GENOMES_G) for each in (engine, reference))
    for one, other in zip(ours, theirs, strict=True):
        assert one.best_logprob == pytest.approx(other.best_logprob, abs=TOLERANCE)
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)


def test_only_adapters_are_hosted(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot host LowRank, .* use search_space=adapter"):
        Running(LlamaCppEngineBuilder(), file, LowRank()).__enter__()


def test_a_request_that_the_cache_cannot_hold_is_refused_before_the_start(file: Path) -> None:
    builder = LlamaCppEngineBuilder(max_model_len=16_000, kv_cache_gib=0.0001)
    with pytest.raises(ConfigError, match=r"max_model_len=16000: .* take 2\.0 MiB, .* hold 104"):
        Running(builder, file, SPACE).__enter__()


def test_other_models_than_gguf_files_are_refused(tmp_path: Path) -> None:
    directory = make_gguf_model("llama", tmp_path / "llama")
    with pytest.raises(ModelError, match=r"engine=llama_cpp runs GGUF files, and .* is none"):
        LlamaCppEngineBuilder().check(str(directory))


def test_a_process_that_ends_is_said_in_one_sentence(file: Path) -> None:
    before = psutil.Process().children(recursive=True)
    with Running(LlamaCppEngineBuilder(threads=1), file, SPACE) as running:
        (process,) = (
            each
            for each in psutil.Process().children(recursive=True)
            if LlamaCppEngineBuilder.__module__.replace("engine", "child") in each.cmdline()
            and each not in before
        )
        process.kill()
        with pytest.raises(EngineError, match=r"llama\.cpp's process was ended by SIGKILL"):
            running.sample([request("base", prompt(1))])
        with pytest.raises(EngineError, match="closed"):
            running.sample([request("base", prompt(1))])


def work(*tokens: int, limit: int = 4) -> Work:
    asked = SampleRequest("base", Observation(tokens), SamplingParams(max_tokens=limit))
    future: Any = None
    return Work(asked, limit, future)


def test_requests_wait_for_a_prefix_that_another_computes() -> None:
    common = range(100, 120)
    rows = [Row(i, work=work(*common, i)) for i in range(3)]
    assert begin(rows) == [(0, 0, 0)]
    first, _ = next_pass(rows, 256, 3)
    assert first == [(t, i, 0, i == 20) for i, t in enumerate([*common, 0])]
    assert begin(rows) == [(1, 0, 20), (2, 0, 20)]
    second, outputs = next_pass(rows, 256, 3)
    assert [(token, place) for token, place, *_ in second] == [(1, 20), (2, 20)]
    assert [row.number for row, _ in outputs] == [1, 2]


def test_a_pass_has_at_most_so_many_tokens() -> None:
    rows = [Row(0, work=work(*range(10)))]
    begin(rows)
    sizes = []
    while rows[0].waiting:
        sizes.append(len(next_pass(rows, 4, 1)[0]))
    assert sizes == [4, 4, 2]


async def test_what_llama_cpp_refuses_is_said_and_its_process_lives(
    file: Path, tmp_path: Path
) -> None:
    process = await LlamaProcess.start(4, 2, 16)
    try:
        options = {"threads": 1, "gpu_layers": -1, "repack": False}
        (bad := tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(64))
        with pytest.raises(ModelError, match=r"llama\.cpp refuses the file: "):
            process.order("open", str(bad), **options)
        process.order("open", str(file), **options)
        with pytest.raises(ModelError, match="refuses adapters of this model: "):
            process.order("load_adapter", str(bad), [])
        process.order("make_context", 256, 2)
    finally:
        await process.close()


def test_its_process_starts_in_engines_of_a_ray_pool() -> None:
    """There uvloop starts processes."""
    uvloop = pytest.importorskip("uvloop")

    async def started() -> None:
        process = await LlamaProcess.start(4, 2, 16)
        await process.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(started())


async def test_tensors_that_an_adapter_cannot_sit_on_are_named(file: Path, tmp_path: Path) -> None:
    model = load(str(file), SPACE)
    model.write_genome(tmp_path / "adapter.gguf", Genome())
    process = await LlamaProcess.start(4, 2, 16)
    try:
        process.order("open", str(file), threads=1, gpu_layers=-1, repack=False)
        with pytest.raises(ModelError, match=r"does not use the adapter's tensor other\.lora_a"):
            process.order("load_adapter", str(tmp_path / "adapter.gguf"), [("other.lora_a", 8)])
    finally:
        await process.close()


def test_a_library_of_another_version_is_refused() -> None:
    with pytest.raises(Refused, match=rf"{PACKAGE} \S+ lacks a function"):
        Library(ctypes.CDLL(None))


def test_other_architectures_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"llama\.cpp's names for gpt2 are not known here"):
        llama_cpp_factors(GPT2Config())


def test_a_plan_is_measured(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = PlanConfig(
        model_name=str(file), engine=LlamaCppEngineBuilder(threads=1), search_space=Adapter(rank=1)
    )
    plan(config)
    printed = capsys.readouterr().out
    assert re.search(r"a generation on this machine, measured, about +\d", printed)
    assert re.search(rf"the file, mapped +{show_bytes(file.stat().st_size)}", printed)
    with pytest.raises(ConfigError, match="search_space=adapter is not counted for engine=torch"):
        PlanConfig(model_name=str(file), search_space=Adapter())

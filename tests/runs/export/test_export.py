"""An export is the engine's centre, in files that transformers and PEFT load as they are."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from es_cookbook import ES, FullRank, LowRank
from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.cli.export import ExportConfig, export
from es_cookbook.common.errors import ConfigError, HistoryError, RunDirectoryError
from es_cookbook.evolution.optimizers.adam import Adam
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.plugins.quantised.qes import QES
from es_cookbook.plugins.quantised.spaces import QuantCodes, QuantScales
from es_cookbook.runs.history import store
from tests.limits import largest_file
from tests.quantised_models import How, quantise
from tests.runs.export_runs import check_same_answers, engine_at, greedy, make_base, make_run
from tests.said import typed


def write(run: Path, output: Path, **fields: Any) -> str:
    return export(ExportConfig(log_path=str(run), output=str(output), **fields))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@dataclasses.dataclass
class Case:
    """A base, a run on it, and the dtype that sampled."""

    space: SearchSpaceBuilder
    family: str = "llama"
    stored: str = "float32"
    sampled: str = "auto"
    shards: int = 1


CASES = {
    "low rank, three files": Case(LowRank(rank=2), shards=3),
    "dense, tied, bfloat16": Case(FullRank(), "qwen2", "bfloat16"),
    "adapter, merged": Case(Adapter(rank=3, alpha=12.0, exclude=("*up_proj*",)), shards=3),
    "stored narrower than it sampled": Case(LowRank(), "qwen2", "bfloat16", "float32"),
    "stored wider than it sampled": Case(LowRank(), "qwen2", "float32", "bfloat16"),
}


QUANTISED_CASES = {
    "scales": (QuantScales(), ES(population_size=4, sigma=0.1, learning_rate=0.3)),
    "codes": (QuantCodes(), QES(population_size=4, sigma=0.1, learning_rate=0.5)),
}


@pytest.mark.parametrize("which", QUANTISED_CASES)
async def test_a_quantised_run_is_exported_in_its_own_format(tmp_path: Path, which: str) -> None:
    space, optimizer = QUANTISED_CASES[which]
    how = How("compressed-tensors", symmetric=False, dtype=torch.float32)
    quantise(make_base(tmp_path / "plain"), tmp_path / "model", tmp_path / "numbers", how)
    model = tmp_path / "model"
    run = await make_run(tmp_path / "run", model, space, optimizer=optimizer)
    assert "as a quantised Hugging Face model directory" in write(run, tmp_path / "out")
    async with engine_at(run, model, space) as engine:
        await engine.save(tmp_path / "saved")
        actions = await greedy(engine)
    assert same(weights(tmp_path / "out"), weights(tmp_path / "saved"))
    before, after = weights(model), weights(tmp_path / "out")
    assert {name: (t.dtype, t.shape) for name, t in before.items()} == {
        name: (t.dtype, t.shape) for name, t in after.items()
    }
    assert not same(before, after)
    assert (tmp_path / "out/config.json").read_bytes() == (model / "config.json").read_bytes()
    check_same_answers(load_causal_lm(str(tmp_path / "out"), "auto", torch.device("cpu")), actions)
    with pytest.raises(ConfigError, match="an adapter holds changes of linear weights only"):
        write(run, tmp_path / "adapter", rank=2)


@pytest.mark.daily
@pytest.mark.parametrize("which", CASES)
async def test_a_model_directory_is_what_the_engine_would_save(tmp_path: Path, which: str) -> None:
    case = CASES[which]
    model = make_base(tmp_path / "model", case.family, case.stored, case.shards)
    run = await make_run(tmp_path / "run", model, case.space, case.sampled)
    said = write(run, tmp_path / "out", merge="merged" in which)
    assert "after 3 generations (fingerprint " in said
    async with engine_at(run, model, case.space, dtype=case.sampled) as engine:
        await engine.save(tmp_path / "saved")
        actions = await greedy(engine)
    assert same(loaded(tmp_path / "out"), loaded(tmp_path / "saved"))
    assert not same(loaded(tmp_path / "saved"), loaded(model) | {})
    # Laid out as the base: the same files, the same tensors in them, tied ones as often.
    files = {file.name for file in (tmp_path / "out").iterdir()} - {"README.md"}
    assert files == {file.name for file in model.iterdir()}
    assert len(list(model.glob("*.safetensors"))) >= case.shards
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert load_file(file).keys() == load_file(model / file.name).keys()
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    if case.stored == case.sampled or case.sampled == "auto":
        config = (tmp_path / "out" / "config.json").read_bytes()
        assert config == (model / "config.json").read_bytes()
    if case.stored == "float32" and case.sampled == "auto":
        check_same_answers(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), actions)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("5A").input_ids == [11, 23]


async def test_a_low_rank_run_as_an_adapter_tells_its_error(tmp_path: Path) -> None:
    model = make_base(tmp_path / "model")
    run = await make_run(tmp_path / "run", model, LowRank())
    async with engine_at(run, model, LowRank()) as engine:
        actions = await greedy(engine)
        await engine.save(tmp_path / "saved")
    seeds = {t.seed for r in store.read_history(run / "history.jsonl") for t in r.step.terms}
    base, centre = weights(model), weights(tmp_path / "saved")
    said = write(run, tmp_path / "rank1", rank=1)
    adapter, squares = weights(tmp_path / "rank1"), torch.zeros(2)
    for name in (name for name in base if not torch.equal(base[name], centre[name])):
        prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        a, b = (adapter[f"{prefix}{side}.weight"] for side in "AB")
        change = centre[name] - base[name]
        squares += torch.stack([(change - b @ a).norm(), change.norm()]) ** 2
    error = float((squares[0] / squares[1]) ** 0.5)
    assert error > 0.1 and said.startswith(
        f"an approximation: {error:.0%} of what the run changed is left out (relative error "
        f"{error:.4g}); an adapter of rank {len(seeds)} would hold all of it: rank=exact\n"
    )
    assert "(the start)" in write(run, tmp_path / "none", generation=0)
    for file in model.iterdir():
        assert (tmp_path / "none" / file.name).read_bytes() == file.read_bytes()
    said = write(run, tmp_path / "exact", rank="exact")
    assert f"adapter holds all of what the run changed (at most rank {len(seeds)} " in said
    exact = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "exact").eval()
    check_same_answers(exact, actions)


async def test_what_an_adapter_cannot_hold_is_named(tmp_path: Path) -> None:
    model = make_base(tmp_path / "model")
    dense = await make_run(tmp_path / "dense", model, FullRank())
    with pytest.raises(ConfigError, match=r"linear .*only.* model\.embed_tokens\.weight.* 3 more"):
        write(dense, tmp_path / "out", rank=2)
    linear = await make_run(tmp_path / "linear", model, FullRank(include=("*proj*",)))
    said = write(linear, tmp_path / "out", rank=2)
    assert "an adapter of rank 32 would hold all of it: rank=exact" in said
    adam = Adam(population_size=4, sigma=0.1, learning_rate=0.01)
    quotients = await make_run(tmp_path / "adam", model, LowRank(), optimizer=adam)
    # They were counted by their seeds, and the "exact" adapter left a third of them out.
    assert "rank 32 would hold all of it" in write(quotients, tmp_path / "quotients", rank=4)
    adapter = await make_run(tmp_path / "adapter", model, Adapter(rank=2))
    with pytest.raises(ConfigError, match="adapter has rank 2 and is written as it is without it"):
        write(adapter, tmp_path / "no", rank=2)
    with pytest.raises(ConfigError, match="give one of them"):
        write(linear, tmp_path / "no", rank=2, merge=True)
    assert "merge=true changes nothing" in write(linear, tmp_path / "whole", merge=True)
    assert not (tmp_path / "no").exists()


async def test_the_card_says_where_the_weights_come_from(tmp_path: Path) -> None:
    model = make_base(tmp_path / "model")
    run = await make_run(tmp_path / "run", model, LowRank())
    write(run, tmp_path / "out", generation=2)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "- evolution-strategies\n" in card.split("---")[1]
    record = list(store.read_history(run / "history.jsonl"))[1]
    for fact in (f"{record.fingerprint:016x}", str(model), "LowRank", "float32"):
        assert f"| `{fact}` |" in card
    assert json.loads(card.split("```json\n")[1].split("```")[0])["seed"] == 0
    assert re.search(r"\nFrom the start to this centre: test/env/all/correct \d.* -> \d", card)


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    yield make_base(tmp_path / "model")


async def test_another_fingerprint_is_refused_with_both_and_leaves_nothing(
    tmp_path: Path, base: Path
) -> None:
    run = await make_run(tmp_path / "run", base, LowRank())
    records = list(store.read_history(run / "history.jsonl"))
    wrong = dataclasses.replace(records[1], fingerprint=records[1].fingerprint ^ 1)
    lines = (run / "history.jsonl").read_bytes().splitlines(keepends=True)
    lines[lines.index(store.encode(records[1]))] = store.encode(wrong)
    (run / "history.jsonl").write_bytes(b"".join(lines))
    for fields in ({}, {"rank": 2}):
        with pytest.raises(HistoryError) as raised:
            write(run, tmp_path / "out" / "here", generation=2, **fields)
        assert f"{records[1].fingerprint:016x}" in str(raised.value)
        assert f"{wrong.fingerprint:016x}" in str(raised.value)
        assert list((tmp_path / "out").iterdir()) == []
    write(run, tmp_path / "fine", generation=3)


async def test_mistakes_are_one_sentence(tmp_path: Path, base: Path) -> None:
    run = await make_run(tmp_path / "run", base, LowRank())
    for fields, error, sentence in (
        ({"generation": 4}, HistoryError, r"generation must be 0 to 3, since .*found 4"),
        ({"output": str(run)}, ConfigError, "is there already"),
        ({"log_path": str(base)}, RunDirectoryError, r"config\.json does not describe a run"),
    ):
        given = {"log_path": str(run), "output": str(tmp_path / "out"), **fields}
        with pytest.raises(error, match=sentence) as raised:
            export(ExportConfig(**given))
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "out").exists()


async def test_a_full_disk_leaves_nothing_under_the_final_name(tmp_path: Path, base: Path) -> None:
    run = await make_run(tmp_path / "run", base, LowRank())
    size = (base / "model.safetensors").stat().st_size
    words = ("export", f"log_path={run}", f"output={tmp_path / 'out' / 'here'}")
    with largest_file(size // 2):
        done = typed(*words)
    what_it_does, said = done.stderr.splitlines()
    assert done.returncode == 1
    assert what_it_does == f"{run}: rebuilding its centre for {tmp_path / 'out' / 'here'}"
    assert said.startswith("cannot write output") and "nothing was left" in said
    assert list((tmp_path / "out").iterdir()) == []
    with largest_file(2 * size):
        assert "exported the centre after 3 generations" in typed(*words).stdout

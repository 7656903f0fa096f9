"""Coefficients of adapters: the weights are the base's plus each adapter times its coefficient."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from es_cookbook.checkpoints.linear_weights import named_weights
from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.checkpoints.peft import read_adapter
from es_cookbook.common.errors import ConfigError, HistoryError, ModelError
from es_cookbook.evolution.genome import Genome, Offsets, Step, Term
from es_cookbook.plugins.merge.space import Merge
from es_cookbook.runs.centre.replay import open_replay
from es_cookbook.runs.export.export import write_export
from tests.adapters import make_adapter
from tests.engines.torch.reference import Reference, request, running_engine, sample_all
from tests.runs.recorded_run import record_run
from tests.said import refused

TOKENS = torch.tensor([[5, 7, 9, 12, 30, 3, 4, 20]])


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen2")


@pytest.fixture
def adapters(model: Path, tmp_path: Path) -> tuple[str, str]:
    """Of different ranks, scales and layers."""
    first = make_adapter(model, tmp_path / "first")
    second = make_adapter(model, tmp_path / "second", rank=2, layers=("q_proj", "up_proj"), seed=1)
    return str(first), str(second)


def load(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in named_weights(model)}


def merged(model: Path, adapter: str) -> dict[str, torch.Tensor]:
    return weights(PeftModel.from_pretrained(load(model), adapter).merge_and_unload())


@pytest.mark.parametrize("each", ["model", "layer"])
def test_weights_are_the_base_plus_each_adapter_times_its_coefficient(
    model: Path, adapters: tuple[str, str], each: str
) -> None:
    loaded = load(model)
    base = weights(loaded)
    changes = [
        {name: weight - base[name] for name, weight in merged(model, adapter).items()}
        for adapter in adapters
    ]
    space = Merge(adapters=adapters, each=each)(parameter_infos(loaded), read_adapter)  # pyright: ignore[reportArgumentType]
    number = {"model": 1, "layer": 2}[each]
    assert list(space.shapes.values()) == [(2,)] * number
    assert all(torch.equal(v, torch.full((2,), 0.5)) for v in space.base({}).values())
    for first, second in ((1.0, 0.0), (0.0, 1.0), (0.3, -2.0), (0.0, 0.0)):
        centre = {name: torch.tensor([first, second]) for name in space.shapes}
        found = {name: torch.nn.Parameter(weight.clone()) for name, weight in base.items()}
        space.merge_(found, centre)
        for name, weight in found.items():
            expected = base[name] + first * changes[0][name] + second * changes[1][name]
            torch.testing.assert_close(weight.data, expected, rtol=0, atol=2e-6)
            if not (first or second):
                assert torch.equal(weight.data, base[name])


def test_a_layers_coefficients_change_that_layer_alone(
    model: Path, adapters: tuple[str, str]
) -> None:
    loaded = load(model)
    space = Merge(adapters=adapters, each="layer")(parameter_infos(loaded), read_adapter)
    assert list(space.shapes) == ["layers.0.coefficients", "layers.1.coefficients"]
    centre = {name: torch.tensor([float("layers.1" in name)] * 2) for name in space.shapes}
    found = {n: torch.nn.Parameter(w.clone()) for n, w in weights(loaded).items()}
    space.merge_(found, centre)
    changed = {n for n, w in weights(loaded).items() if not torch.equal(found[n].data, w)}
    assert changed and all(".layers.1." in name for name in changed)


async def test_genomes_answer_as_their_merged_weights(
    model: Path, adapters: tuple[str, str]
) -> None:
    space = Merge(adapters=adapters)
    genomes_G = [Genome((Term(seed, 2.0),)) for seed in (1, 2)]
    genomes_G.append(Genome(offsets=Offsets.of(np.array([0.5, -0.5]))))
    asked = [request(g, [5, 7, 9], max_tokens=6) for g in (*range(3), "centre", "base")]
    async with running_engine(model, space) as engine:
        await engine.load(genomes_G)
        actions = await sample_all(engine, asked)
    assert len({action.tokens_T for action in actions}) > 1
    Reference(model, space).check_targets(genomes_G, asked, actions)


def test_the_result_is_exported_as_one_adapter(
    model: Path, adapters: tuple[str, str], tmp_path: Path
) -> None:
    steps = (Step((Term(1, 0.5),)), Step((Term(2, 0.3),)))
    own = str(shutil.copytree(adapters[0], tmp_path / "own"))
    run = record_run(tmp_path / "run", model, Merge(adapters=(own, adapters[1])), steps)
    for merge in (True, False):
        write_export(open_replay(run.path), tmp_path / f"out {merge}", merge=merge)
    with torch.no_grad():
        expected = load(tmp_path / "out True").eval()(TOKENS).logits
        adapter = PeftModel.from_pretrained(load(model), tmp_path / "out False")
        found = adapter.eval()(TOKENS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    # A regression: coefficients have the same fingerprint for other adapters in the same place.
    trained = load_file(weights_file := Path(own) / "adapter_model.safetensors")
    save_file({name: 2 * factor for name, factor in trained.items()}, weights_file)
    with pytest.raises(HistoryError, match=r"its start \(search_space\) was [0-9a-f]{16}, is"):
        write_export(open_replay(run.path), tmp_path / "no")


def test_adapters_that_cannot_be_merged_are_refused(
    model: Path, adapters: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"at least two trained PEFT LoRA adapters.*found 1"):
        Merge(adapters=("a",))
    with pytest.raises(ConfigError, match="adapters must be different ones, found a,a/"):
        Merge(adapters=("a", "a/"))
    infos = parameter_infos(load(model))
    with pytest.raises(ModelError, match="is no PEFT adapter"):
        Merge(adapters=(adapters[0], str(tmp_path / "none")))(infos, read_adapter)
    said = refused("countdown", "search_space=merge", f"log_path={tmp_path / 'run'}")
    assert said.startswith("search_space=merge needs search_space.adapters=A,B")
    run = f"log_path={tmp_path / 'run'}"
    both = f"search_space.adapters={','.join(adapters)}"
    said = refused("countdown", "search_space=merge", both, run)
    assert said.startswith("search_space: the adapter in") and "does not fit" in said

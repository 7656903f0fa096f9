"""The centre of any generation comes back bit for bit, in the memory of a few tensors."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import chz
import pytest
import torch
from safetensors.torch import load_file, save_file

from es_cookbook import FullRank, LowRank
from es_cookbook.common.errors import ConfigError, HistoryError, ModelError
from es_cookbook.common.trust import resolve
from es_cookbook.engines.base import LogprobsRequest
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SEARCH_SPACE_NAMES
from es_cookbook.plugins.cma.singular_values import SingularValues
from es_cookbook.plugins.merge.space import Merge
from es_cookbook.plugins.quantised.spaces import QuantCodes, QuantScales
from es_cookbook.plugins.vectors.spaces import SoftPrompt, Steering
from es_cookbook.plugins.zeroth_order.lozo import LazyLowRank
from es_cookbook.runs.centre.replay import open_replay
from tests.adapters import make_adapter
from tests.engines.torch.reference import running_engine, score_all
from tests.families import sampled
from tests.quantised_models import How, quantise
from tests.runs.recorded_run import STEPS, as_bfloat16, record_run, same_bits, take_snapshots

SPACES = {
    "rank 1": LowRank(),
    "rank 3, signs": LowRank(rank=3, noise="rademacher"),
    "rank 2, one factor kept": LazyLowRank(rank=2),
    "dense": FullRank(),
    "adapter": Adapter(rank=2, init_seed=5),
    "singular values of an adapter": SingularValues(start="given later", fraction=0.5),
    "merged adapters": Merge(adapters=("given", "later"), each="layer"),
    "soft prompt": SoftPrompt(text="123", num_tokens=5),
    "steering": Steering(),
    "quantised: scales, zero points": QuantScales(which="both"),
    "quantised: codes": QuantCodes(),
}


@pytest.mark.daily
@pytest.mark.parametrize(
    ("which", "dtype"), sampled(itertools.product(SPACES, ("float32", "bfloat16")), 7)
)
async def test_any_generation_comes_back_from_the_base_and_from_a_snapshot(
    tiny_model: Callable[[str], Path], tmp_path: Path, which: str, dtype: str
) -> None:
    model = tiny_model("qwen2")
    if "quantised" in which:
        how = How(symmetric=False, dtype=getattr(torch, dtype))
        quantise(model, tmp_path / "model", tmp_path / "numbers", how)
        model = tmp_path / "model"
    elif dtype == "bfloat16":
        model = as_bfloat16(model, tmp_path / "model")
    space = SPACES[which]
    if isinstance(space, SingularValues):
        space = chz.replace(space, start=str(make_adapter(model, tmp_path / "adapter")))
    if isinstance(space, Merge):
        made = [make_adapter(model, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
        space = chz.replace(space, adapters=tuple(map(str, made)))
    recorded = record_run(tmp_path / "run", model, space)
    for generation in (0, 2, 6, None):
        replay = open_replay(recorded.path, generation)
        last = len(STEPS) if generation is None else generation
        assert replay.generation == last == len(replay.steps)
        assert replay.fingerprint == (recorded.fingerprints[last] if last else None)
        assert replay.snapshot is None
        assert same_bits(dict(replay.centre_tensors()), recorded.weights[last])
    assert all(path.exists() for path in take_snapshots(recorded.path, 2))
    for generation in (2, 3, 6):
        replay = open_replay(recorded.path, generation)
        assert replay.snapshot is not None and replay.snapshot.generation == 2
        for num_threads in (1, 3):
            assert same_bits(dict(replay.centre_tensors(num_threads)), recorded.weights[generation])
    take_snapshots(recorded.path, 5)  # Which begins at the one before.
    replay = open_replay(recorded.path)
    assert replay.snapshot is not None and replay.snapshot.generation == 5
    assert same_bits(dict(replay.centre_tensors()), recorded.weights[6])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_default_dtype", None)  # It would change threads that sample.
        before_any = open_replay(recorded.path, 1)
    assert same_bits(dict(before_any.centre_tensors()), recorded.weights[1])
    asked = [LogprobsRequest(who, (5, 7), (9, 12, 4)) for who in ("centre", "base")]
    async with running_engine(model, space, dtype="auto") as engine:
        centre, base = await score_all(engine, asked)
    assert (centre == base) == space.starts_at_base


def test_another_base_is_refused_by_name_and_by_both_fingerprints(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model("qwen2"), tmp_path / "model")
    recorded = record_run(tmp_path / "run", model, LowRank())
    other = shutil.copytree(model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[3, 4] ^= 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    open_replay(recorded.path).check_base()
    replay = open_replay(recorded.path, model_name=str(other))
    with pytest.raises(HistoryError, match=f"cannot go on with model_name={other}: its weights"):
        replay.check_base()
    with pytest.raises(HistoryError, match=f"had fingerprint {recorded.fingerprints[-1]:016x}, "):
        list(replay.centre_tensors())
    shutil.rmtree(model)
    with pytest.raises(ModelError, match="there is no directory"):
        open_replay(recorded.path)


def test_what_cannot_be_replayed_is_one_sentence(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    recorded = record_run(tmp_path / "run", tiny_model("qwen2"), LowRank())
    with pytest.raises(HistoryError, match=r"generation must be 0 to 6, since .* found 7"):
        open_replay(recorded.path, 7)
    (recorded.path / "config.json").write_text('{"$format": 1, "$class": ""}')
    with pytest.raises(ConfigError, match="must hold a run's Config, which has a model_name"):
        open_replay(recorded.path)


def test_every_search_space_is_tried() -> None:
    offered = {resolve(target) for target in SEARCH_SPACE_NAMES.values()}
    assert {*map(type, SPACES.values())} == offered

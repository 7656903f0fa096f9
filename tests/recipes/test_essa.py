"""ESSA end to end, as a user runs it: SFT LoRA -> SVD -> CMA-ES -> PEFT export; tiny numbers."""

from pathlib import Path

import chz
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from es_cookbook import SamplingParams, TorchEngineBuilder
from es_cookbook.cli.export import ExportConfig, export
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.genome import OffsetsRule
from es_cookbook.plugins.branches import fork
from es_cookbook.plugins.cma.optimizers import CMA
from es_cookbook.plugins.cma.singular_values import SingularValues
from es_cookbook.plugins.gradients.sft import SFTConfig, main
from es_cookbook.plugins.gradients.supervised import SupervisedRows
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL, CLIConfig
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tools.bundled.countdown_demonstrations import main as demonstrate
from tools.rows.generated import RowsConfig as Demonstrations

pytest.importorskip("peft", reason="PEFT is not installed: pip install 'es-cookbook[baselines]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's, after four steps on clean demonstrations."""
    path = tmp_path_factory.mktemp("sft")
    demonstrate(Demonstrations(output=str(path / "rows.jsonl"), count=64))
    config = SFTConfig(
        model_name=str(BUNDLED_MODEL),
        dataset=SupervisedRows(source=str(path / "rows.jsonl")),
        output=str(path / "adapter"),
        rank=4,
        alpha=8,
        learning_rate=2e-3,
        batch_size=16,
    )
    main(config)
    with pytest.raises(ConfigError, match="is there already"):
        main(config)
    return path / "adapter"


def config(log_path: Path, adapter: Path, num_generations: int) -> CLIConfig:
    return CLIConfig(
        log_path=str(log_path),
        engine=TorchEngineBuilder(device="cpu", num_lanes=1),
        search_space=SingularValues(start=str(adapter), fraction=0.5),
        optimizer=CMA(population_size=8, sigma=0.3),
        dataset=CountdownDatasetBuilder(num_train=64, num_test=4, problems_per_generation=8),
        sampling=SamplingParams(max_tokens=32),
        trackers=JsonlTrackerBuilder(),
        num_generations=num_generations,
        eval_every=0,
        behavior_if_log_dir_exists="resume",
    )


async def test_from_fine_tuning_to_an_adapter_that_peft_loads(
    adapter: Path, tmp_path: Path
) -> None:
    await train(config(tmp_path / "whole", adapter, 4))
    for num_generations in (2, 4):
        await train(config(tmp_path / "resumed", adapter, num_generations))
    history = (tmp_path / "whole" / "history.jsonl").read_bytes()
    assert (tmp_path / "resumed" / "history.jsonl").read_bytes() == history
    steps = [record.step for record in read_history(tmp_path / "whole" / "history.jsonl")]
    assert len(steps) == 4 and any(isinstance(step.rule, OffsetsRule) for step in steps)

    forked = tmp_path / "forked"
    fork.main(fork.Fork(log_path=str(tmp_path / "whole"), output=str(forked)), {"seed": "1"})
    await train(chz.replace(config(forked, adapter, 5), seed=1))
    *taken, own = (record.step for record in read_history(forked / "history.jsonl"))
    assert taken == steps and isinstance(own.rule, OffsetsRule)
    (*_, last) = (step.rule for step in steps if isinstance(step.rule, OffsetsRule))
    way = own.rule.offsets.array - last.offsets.array
    assert own.rule.moved == pytest.approx(np.sqrt(np.mean(way**2)), rel=1e-4)

    export(ExportConfig(log_path=str(tmp_path / "whole"), output=str(tmp_path / "out")))
    started = load_file(adapter / "adapter_model.safetensors")
    moved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name: t.shape for name, t in moved.items()} == {n: t.shape for n, t in started.items()}
    assert not any(torch.equal(moved[name], started[name]) for name in moved)

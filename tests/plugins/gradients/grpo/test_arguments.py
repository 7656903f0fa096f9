"""TRL's own arguments: what is passed on, and what is refused with a sentence."""

from pathlib import Path

import pytest
import torch

from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.gradients.grpo.training import arguments
from tests.grpo_runs import grpo_config


def test_losses_and_clipping_are_what_trl_is_told(tmp_path: Path) -> None:
    said: dict[str, object] = {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "epsilon": 0.1,
        "epsilon_high": 0.28,
        "beta": 0.04,
        "importance_sampling_level": "sequence",
        "num_iterations": 3,
        "weight_decay": 0.02,
        "seed": 7,
    }
    found = arguments(grpo_config(tmp_path, tmp_path, **said), 2, 64)
    assert {name: getattr(found, name) for name in said} == said
    assert found.disable_dropout and not found.gradient_checkpointing
    assert not found.shuffle_dataset and found.use_cpu != torch.cuda.is_available()
    assert arguments(grpo_config(tmp_path, tmp_path, seed=2**32 + 7), 2, 64).seed == 7
    cut = arguments(grpo_config(tmp_path, tmp_path, max_gradient_norm=0.3), 2, 64)
    assert cut.max_grad_norm == 0.3


def test_batches_are_shared_out_to_passes_and_steps(tmp_path: Path) -> None:
    config = grpo_config(tmp_path, tmp_path, attempts=6, steps=2, num_iterations=3)
    found = arguments(config, num_problems=4, context_length=4096)
    assert found.per_device_train_batch_size == 4, "16,384 tokens have room for 4 of the context"
    assert (found.gradient_accumulation_steps, found.steps_per_generation) == (3, 6)
    assert found.generation_batch_size == 24 and found.num_generations == 6
    assert found.max_steps == 4 * 3 * 2, "generations, iterations and steps"
    assert (found.bf16, found.max_completion_length) == (False, 4)
    odd = grpo_config(tmp_path, tmp_path, attempts=6, steps=2)
    one = arguments(odd, num_problems=4, context_length=10**6)
    assert one.per_device_train_batch_size == 1, "a row of a context has more tokens than a pass"
    with pytest.raises(ConfigError, match=r"steps must divide the 18 rollouts .*, found 4"):
        arguments(grpo_config(tmp_path, tmp_path, attempts=6, steps=4), 3, 64)


def test_several_visible_devices_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = grpo_config(tmp_path, tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert arguments(config, 2, 64).num_generations == 16
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="one process on one device"):
        arguments(config, 2, 64)

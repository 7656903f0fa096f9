"""TRL's own arguments: what is passed on, and what is refused with a sentence."""

from pathlib import Path

import pytest
import torch

from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.gradients.grpo import main
from es_cookbook.plugins.gradients.grpo.arguments import arguments, checked
from es_cookbook.rl.types import SamplingParams
from tests.grpo_runs import grpo_config
from tests.tiny_run import write_tiny_model


def test_values_are_of_the_types_that_trl_declares() -> None:
    given = ["entropy_coef=0.001", "sync_ref_model=True", "delta=None", "optim=sgd", "delta=2"]
    assert checked(given) == {
        "entropy_coef": 0.001,
        "sync_ref_model": True,
        "delta": 2,
        "optim": "sgd",
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("entropy_coeff=1", r"no such argument; did you mean 'entropy_coef'\?"),
        ("entropy_coef", "trl must be NAME=VALUE"),
        ("entropy_coef=much", "trl.entropy_coef must be float, found 'much'"),
        ("top_entropy_quantile=None", "must be float, found 'None'"),
        ("num_generations=8", "follows from the options of the run"),
        ("learning_rate=1", "follows from the options of the run"),
        ("lr_scheduler_type=cosine", "follows from the options of the run"),
        ("warmup_steps=some", "trl.warmup_steps must be float, found 'some'"),
        ("epsilon_high=0.3", "follows from the options of the run"),
        ("use_vllm=True", "follows from the options of the run"),
        ("vllm_mode='server'", "follows from the options of the run"),
        ("temperature=0.3", "follows from the options of the run"),
        ("save_steps=3", "follows from the options of the run"),
        ("output_dir=/tmp", "follows from the options of the run"),
        ("__class__=1", "no such argument"),
    ],
)
def test_what_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked([given])


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
    given = {"entropy_coef": 0.001}
    found = arguments(grpo_config(tmp_path, tmp_path, **said), given, 2, 64)
    assert {name: getattr(found, name) for name in said} == said
    assert found.entropy_coef == 0.001
    assert found.disable_dropout and not found.gradient_checkpointing
    assert not found.shuffle_dataset and found.use_cpu != torch.cuda.is_available()
    assert arguments(grpo_config(tmp_path, tmp_path, seed=2**32 + 7), {}, 2, 64).seed == 7
    cut = arguments(grpo_config(tmp_path, tmp_path, max_gradient_norm=0.3), {}, 2, 64)
    assert cut.max_grad_norm == 0.3


def test_batches_are_shared_out_to_passes_and_steps(tmp_path: Path) -> None:
    config = grpo_config(tmp_path, tmp_path, attempts=6, steps=2, num_iterations=3)
    found = arguments(config, {}, num_problems=4, context_length=4096)
    assert found.per_device_train_batch_size == 4, "16,384 tokens have room for 4 of the context"
    assert (found.gradient_accumulation_steps, found.steps_per_generation) == (3, 6)
    assert found.generation_batch_size == 24 and found.num_generations == 6
    assert found.max_steps == 4 * 3 * 2, "generations, iterations and steps"
    assert (found.bf16, found.max_completion_length) == (False, 4)
    odd = grpo_config(tmp_path, tmp_path, attempts=6, steps=2)
    whole = arguments(odd, {"max_completion_length": 99}, num_problems=3, context_length=10**6)
    assert (whole.per_device_train_batch_size, whole.max_completion_length) == (1, 99)
    one = arguments(odd, {}, num_problems=4, context_length=10**6)
    assert one.per_device_train_batch_size == 1, "a row of a context has more tokens than a pass"
    with pytest.raises(ConfigError, match=r"steps must divide the 18 rollouts .*, found 4"):
        arguments(grpo_config(tmp_path, tmp_path, attempts=6, steps=4), {}, 3, 64)


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one process on one device"):
        arguments(grpo_config(tmp_path, tmp_path), {}, 2, 64)


def test_several_visible_devices_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = grpo_config(tmp_path, tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert arguments(config, {}, 2, 64).num_generations == 16
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="one process on one device"):
        arguments(config, {}, 2, 64)


@pytest.mark.anyio
async def test_what_trl_itself_refuses_is_a_sentence(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    how = {
        "trl": ("sync_ref_model=True",),
        "sampling": SamplingParams(max_tokens=4, temperature=1.0),
    }
    with pytest.raises(ConfigError, match="TRL refuses these settings: You passed `sync_ref_model"):
        await main(grpo_config(model, tmp_path / "run", **how))

"""TRL's `GRPOConfig` for a run: what a Config says, and what a user adds as `trl.NAME=VALUE`.

What follows from the run's own options is refused there. So is a name that TRL does not know, and a
value that is not of the type that TRL declares.

TRL is imported here, without the vLLM that it would have with it where that is installed: that
takes seconds and hundreds of megabytes. TRL's generation is not used, and its versions of vLLM are
not those of our engine.
"""

import ast
import dataclasses
import os
import typing
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from es_cookbook.common.errors import ConfigError, did_you_mean, not_installed
from es_cookbook.common.fields import fits
from es_cookbook.plugins.gradients.grpo.config import Config
from es_cookbook.plugins.gradients.learner import MOST_TOKENS


def _not_wanted(min_version: str | None = None) -> bool:
    del min_version
    return False


try:
    from trl import import_utils
except ImportError as missing:
    raise not_installed("grpo", "trl", "es-cookbook[baselines]") from missing

with mock.patch.object(import_utils, "is_vllm_available", _not_wanted):
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

__all__ = ["GRPOConfig", "GRPOTrainer", "add_fused_lm_head", "arguments", "checked"]

_OURS = (
    *("seed", "data_seed", "learning_rate", "lr_scheduler", "weight_decay", "max_grad_norm"),
    *("num_iterations", "loss_type", "scale_rewards", "epsilon", "beta", "num_generations"),
    *("importance_sampling_level", "max_steps", "num_train_epochs", "per_device"),
    *("auto_find_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
    *("generation_batch_size", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("generation_kwargs", "chat_template_kwargs", "reward_weights", "max_tool_calling"),
    *("use_vllm", "vllm_", "use_transformers_", "transformers_", "eval", "do_", "batch_eval"),
    *("save", "restore_", "resume_from_checkpoint", "logging", "log_", "report_to", "run_name"),
    *("disable_tqdm", "push_to_hub", "hub_", "output_dir", "model_init_kwargs"),
    *("trust_remote_code", "shuffle_dataset", "remove_unused_columns", "dataloader_", "use_cpu"),
    *("ddp_", "fsdp", "deepspeed", "parallelism_config"),
)
"""Beginnings of names of TRL's arguments that follow from the run's own options."""


def checked(given: Sequence[str]) -> dict[str, object]:
    """TRL's arguments that a user adds, NAME=VALUE each, by name.

    Raises:
        ConfigError: TRL has no such argument, it is ours to say, or the value is of another type.
    """
    declared = typing.get_type_hints(GRPOConfig)
    names = [field.name for field in dataclasses.fields(GRPOConfig) if field.init]
    found: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"trl must be NAME=VALUE, found {text!r}")
        if name not in names:
            raise ConfigError(
                f"trl.{name}: TRL's GRPOConfig has no such argument{did_you_mean(name, names)}"
            )
        if name.startswith(_OURS):
            raise ConfigError(f"trl.{name} follows from the options of the run; leave it out")
        found[name] = _value(value)
        if not fits(found[name], declared[name]):
            raise ConfigError(f"trl.{name} must be {_shown(declared[name])}, found {value!r}")
    return found


def _value(text: str) -> object:
    """A Python literal, or else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _shown(declared: object) -> str:
    return declared.__name__ if isinstance(declared, type) else str(declared)


def arguments(
    config: Config,
    more: Mapping[str, object],
    num_problems: int,
    context_length: int,
    products: torch.dtype = torch.float32,
) -> GRPOConfig:
    """TRL's arguments for batches of so many problems, and matrix products in a dtype.

    A backward pass has as many rows as `tokens_per_pass` has room for, if all were as long as the
    context, and as divide a step's rows.

    Raises:
        ConfigError: The rollouts cannot be shared out to steps, or TRL refuses a setting.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or torch.cuda.device_count() > 1:
        raise ConfigError(
            "grpo trains in one process on one device: make one GPU visible, with "
            "CUDA_VISIBLE_DEVICES, and do not start it by accelerate or torchrun"
        )
    num_rollouts = num_problems * config.attempts
    of_step, rest = divmod(num_rollouts, config.steps)
    if rest:
        raise ConfigError(
            f"steps must divide the {num_rollouts} rollouts of a generation ({num_problems} "
            f"problems, attempts={config.attempts}), found {config.steps}"
        )
    most = max(1, (config.tokens_per_pass or MOST_TOKENS) // context_length)
    rows = max(size for size in range(1, min(most, of_step) + 1) if of_step % size == 0)
    given: dict[str, Any] = {
        **{"max_completion_length": config.sampling.max_tokens, "disable_dropout": True},
        **{"bf16": products == torch.bfloat16, "gradient_checkpointing": False},
        **more,
    }
    try:
        return GRPOConfig(
            output_dir=config.log_path,
            seed=config.seed % 2**32,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            num_iterations=config.num_iterations,
            loss_type=config.loss_type,
            scale_rewards=config.scale_rewards,
            epsilon=config.epsilon,
            epsilon_high=config.epsilon_high,
            beta=config.beta,
            importance_sampling_level=config.importance_sampling_level,
            use_cpu=not torch.cuda.is_available(),
            max_grad_norm=config.max_gradient_norm,
            max_steps=config.num_generations * config.num_iterations * config.steps,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=of_step // rows,
            steps_per_generation=num_rollouts // rows,
            num_generations=config.attempts,
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **given,
        )
    except (ValueError, TypeError, ImportError) as error:
        raise refused_by_trl(error) from error


def refused_by_trl(error: Exception) -> ConfigError:
    """What TRL says of settings that do not go together."""
    return ConfigError(f"TRL refuses these settings: {' '.join(str(error).split())}")

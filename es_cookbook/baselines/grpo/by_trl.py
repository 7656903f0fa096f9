"""The parts of TRL that we stand on, imported without the vLLM that it would have with it.

TRL imports vLLM where that is installed, which takes seconds and hundreds of megabytes. Its
generation is not used here, and its versions of vLLM are not those of our engine.
"""

from unittest import mock

from es_cookbook.common.errors import not_installed


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

__all__ = ["GRPOConfig", "GRPOTrainer", "add_fused_lm_head"]

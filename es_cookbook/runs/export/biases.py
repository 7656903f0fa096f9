"""Steering vectors as biases of the model: a whole model that other programs load.

The outputs of a layer's last linear module are added to the residual stream. So a bias of that
module is added to the layer's outputs at every position, as a steering vector is. Only the order of
two sums differs, and with it the last bits.

Llama has such biases with `mlp_bias`, where they are new, as are those of the other linear modules
of its MLPs, which stay 0. Qwen2 has none, but is Llama in all else: with biases of queries, keys
and values, for which `attention_bias` stands. So it becomes a Llama.

Left out: layers that scale or normalise the outputs before they add them (Granite, Gemma, OLMo 2),
and other models without biases there (Qwen3, experts).
"""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import LlamaConfig

from es_cookbook.checkpoints.models import load_architecture
from es_cookbook.common.errors import ModelError
from es_cookbook.runs.centre.replay import Replay

_LAST = {
    "llama": "mlp.down_proj",
    "smollm3": "mlp.down_proj",
    "gpt2": "mlp.c_proj",
    "gpt_neox": "mlp.dense_4h_to_h",
    "phi": "mlp.fc2",
}
"""transformers' `model_type` -> the last linear module of its layers."""


def with_biases(replay: Replay) -> tuple[PreTrainedModel, dict[str, str]]:
    """Return an architecture with biases at the end of layers, and their names by the vectors'.

    Raises:
        ModelError: The model cannot have such biases.
    """
    base = load_architecture(replay.model_name)
    config = base.config
    if config.model_type == "qwen2" and config.sliding_window is None:
        own = config.to_dict()
        shared = LlamaConfig().to_dict().keys() & own.keys() - {"model_type", "architectures"}
        config = LlamaConfig(**{name: own[name] for name in shared}, attention_bias=True)
    if config.model_type not in _LAST:
        raise ModelError(
            f"the layers of {type(base).__name__} have no bias that could be a steering vector; "
            f"accepted: models of the types {', '.join((*_LAST, 'qwen2'))} without sliding "
            "windows; leave merge= and form= out for a file of vectors"
        )
    if hasattr(config, "mlp_bias"):
        config.mlp_bias = True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.config.architectures = [type(model).__name__]
    last = f"{_LAST[config.model_type]}.bias"
    return model, {
        vector: f"{layer}.{last}" for vector, layer in (replay.space.vectors or {}).items()
    }

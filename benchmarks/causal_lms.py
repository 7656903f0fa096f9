"""Every causal language model class of the installed transformers as a tiny random model.

A class gets its default config with the usual sizes made small, and keeps what its architecture is
known for: both kinds of layers of a hybrid, windows and selections that a dozen tokens exceed,
fewer key heads than query heads, experts that not every token takes, projections that several
layers share. What needs more than small sizes stands in a table. A class that a newer transformers
adds is made in the same way without being named here.
"""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 64
"""Every model can read these tokens; a few have entries of their own above them."""
CONTEXT = 128
LAYERS = 4
"""Twice around a pattern of two kinds of layers; a few classes have another number."""
WINDOW = 5
"""Tokens that layers with a sliding window or chunks see."""
MAX_PARAMETERS = 1_250_000
"""5 MB in float32."""

UNBUILDABLE: Mapping[str, str] = MappingProxyType(
    {
        "CpmAntForCausalLM": "Every token attends to later tokens too.",
        "Gemma3nForConditionalGeneration": "Its vision tower needs the timm package.",
        "Gemma4AssistantForCausalLM": (
            "It reads the hidden states and keys of another model, not token ids alone."
        ),
        "Gemma4UnifiedAssistantForCausalLM": (
            "It reads the hidden states and keys of another model, not token ids alone."
        ),
        "ProphetNetForCausalLM": "The logits of a token depend on how many tokens follow it.",
    }
)
"""Class name to the reason why there is no tiny causal language model of it."""

CAUSAL_LM_CLASSES: tuple[str, ...] = tuple(
    sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - set(UNBUILDABLE))
)


def build(name: str) -> PreTrainedModel:
    """Build one of `CAUSAL_LM_CLASSES` or `VARIANTS` in float32, always with the same weights.

    Raises:
        ValueError: It would be larger than `MAX_PARAMETERS`: its config has a size that neither
            `_SIZES` nor `_OVERRIDES` makes small.
    """
    class_name, _, _ = name.partition(" ")
    model_class = getattr(transformers, class_name)
    overrides = {**_OVERRIDES.get(class_name, {}), **_VARIANTS.get(name, {})}
    config = _small_config(model_class.config_class, overrides)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in model_class(config).named_parameters()}
    if sum(shape.numel() for shape in shapes.values()) > MAX_PARAMETERS:
        largest = max(shapes, key=lambda name: shapes[name].numel())
        raise ValueError(f"{name} is too large: {largest} has the shape {tuple(shapes[largest])}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).float().eval()
    _fill(model)
    return model


def _small_config(
    config_class: type[PreTrainedConfig], overrides: Mapping[str, Any]
) -> PreTrainedConfig:
    """Return the default config with small sizes; an override may be a mapping for a sub-config."""
    default = config_class()
    settings: dict[str, Any] = {}
    for name in (field.name for field in fields(config_class)):
        if name in config_class.sub_configs:
            if isinstance(sub_config := getattr(default, name), PreTrainedConfig):
                settings[name] = _small_config(type(sub_config), overrides.get(name, {}))
        elif name in _SIZES:
            settings[name] = _SIZES[name]
        elif name.endswith("layer_types"):
            kinds = tuple(dict.fromkeys(getattr(default, name) or ()))
            if len(kinds) > 1:  # A short list made by the config might lack the rare kind.
                settings[name] = _alternating(*kinds)
    if "kv_lora_rank" in settings:  # Latent attention expands to one key per query head.
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for name, value in overrides.items():
        if name not in config_class.sub_configs:
            settings[name] = value
    return config_class(**settings)


def _fill(model: PreTrainedModel) -> None:
    """Replace matrices by noise, and move everything else away from what it starts at.

    Logits then have a standard deviation of about 1, and leaving out a bias or a norm shows.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1 and name.rpartition(".")[2] not in _KEPT_IN_RANGE:
                parameter.copy_(noise * 0.2)
            else:
                parameter.add_(noise * 0.05)
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0  # As some classes do when they are loaded.


def _alternating(*kinds: str) -> list[str]:
    """Return one entry per layer."""
    return [kinds[layer % len(kinds)] for layer in range(LAYERS)]


_KEPT_IN_RANGE = {
    "A_log",
    "D",
    "dt_proj_bias",
    "time_mix_key",
    "time_mix_receptance",
    "time_mix_value",
}
"""Decays and step sizes of state-space layers that are no vectors; noise alone may diverge."""

_SIZES: dict[str, Any] = {
    name: value
    for value, names in (
        (
            VOCABULARY,
            "audio_vocab_size decoder_vocab_size pronunciation_vocab_size shape_vocab_size "
            "vocab_size vocab_size_per_layer_input",
        ),
        (
            32,
            "attention_hidden_size d_model emb_dim embedding_dim embedding_size hidden_size "
            "input_embedding_size lru_width n_embd output_embedding_size pronunciation_embed_dim "
            "shape_embed_dim word_embed_proj_dim",
        ),
        (
            48,
            "d_inner decoder_ffn_dim dense_intermediate_size dff dim_ff encoder_ffn_dim "
            "expert_ffn_hidden_size feed_forward_size ffn_dim ffn_hidden_size intermediate_size "
            "intermediate_size_mlp moe_intermediate_size moe_shared_expert_intermediate_size "
            "n_inner shared_expert_intermediate_size shared_intermediate_size",
        ),
        (
            LAYERS,
            "decoder_layers encoder_layers n_layer n_layers num_blocks num_decoder_layers "
            "num_encoder_layers num_hidden_layers num_layers",
        ),
        (
            4,
            "attention_heads decoder_attention_heads encoder_attention_heads linear_num_heads "
            "linear_num_value_heads mamba_n_heads mamba_num_heads n_head n_heads n_mamba_heads "
            "num_attention_heads num_decoder_attention_heads num_encoder_attention_heads num_heads "
            "rotary_dim swa_num_attention_heads",
        ),
        (4, "moe_num_experts n_routed_experts num_experts num_local_experts zero_expert_num"),
        (2, "linear_num_key_heads num_key_value_heads num_kv_heads swa_num_key_value_heads"),
        (2, "moe_k moe_topk num_experts_per_tok num_experts_per_token top_k_experts"),
        (1, "n_group topk_group"),
        (
            8,
            "attention_head_dim attention_head_size d_head dim_head head_dim "
            "hidden_size_per_layer_input kv_channels laurel_rank linear_head_dim "
            "linear_key_head_dim linear_value_head_dim mamba_d_state qk_nope_head_dim "
            "qk_rope_head_dim ssm_state_size state_size swa_head_dim v_head_dim",
        ),
        (16, "kv_lora_rank mamba_d_head mamba_head_dim q_lora_rank"),
        # Many heads: with few, scores are exactly 0 for several tokens, and a tie selects any.
        (16, "index_head_dim"),
        (64, "index_n_heads"),
        (6, "index_topk"),
        (
            CONTEXT,
            "context_length max_position_embeddings max_seq_len max_source_positions "
            "max_target_positions model_max_length n_ctx n_positions",
        ),
        (
            WINDOW,
            "attention_chunk_size attention_window_size keep_window_size sliding_window "
            "sliding_window_size window_size",
        ),
        (8, "crop_size image_size"),
        (4, "patch_size"),
        (0, "pad_token_id"),
        (1, "eos_token_id"),
        (2, "bos_token_id"),
        (True, "is_decoder"),
    )
    for name in names.split()
}

_WINDOWS = {"layer_types": _alternating("sliding_attention", "full_attention")}
_DENSE_AND_EXPERTS = {"mlp_layer_types": _alternating("dense", "sparse")}
# A recurrence that runs in chunks has to carry its state across them.
_STATES = {"mamba_n_groups": 2, "mamba_chunk_size": 4}
# Before decoding, transformers raises step sizes to `time_step_min`; while decoding it does not.
_STEPS = {"time_step_min": 1e-5, "time_step_max": 1.0, "chunk_size": 4}
_SHARED_KEYS = {**_WINDOWS, "global_head_dim": 16, "num_kv_shared_layers": 2}

_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "BambaForCausalLM": {**_STATES, "attn_layer_indices": [1, 3]},
    "BltForCausalLM": {
        "encoder_hash_byte_group_vocab": 50,
        "patching_threshold": 4.0,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
        "use_cache": False,  # Its forward cannot make a cache.
    },
    "CohereForCausalLM": {"logit_scale": 1.0},
    "Cohere2ForCausalLM": {"logit_scale": 1.0},
    "Cohere2MoeForCausalLM": {"logit_scale": 1.0},
    "CohereCompassForCausalLM": {
        **_WINDOWS,
        "logit_scale": 1.0,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
            "full_attention": None,
        },
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "DeepseekV2ForCausalLM": {"first_k_dense_replace": 1},
    "DeepseekV3ForCausalLM": {"first_k_dense_replace": 1, "n_group": 2},
    "DeepseekV4ForCausalLM": {
        "num_key_value_heads": 1,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "head_dim": 16,
        "index_topk": 2,
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "Dots1ForCausalLM": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "FalconH1ForCausalLM": {**_STATES, "mamba_d_ssm": 64},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nForCausalLM": {
        **_WINDOWS,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "Gemma4ForCausalLM": {**_SHARED_KEYS, "use_double_wide_mlp": True},
    "Gemma4ForConditionalGeneration": {"text_config": _SHARED_KEYS},
    "Gemma4UnifiedForCausalLM": {"global_head_dim": 16},
    "Gemma4UnifiedForConditionalGeneration": {"text_config": {"global_head_dim": 16}},
    "Glm4MoeForCausalLM": {"first_k_dense_replace": 1},
    "GotOcr2ForConditionalGeneration": {"vision_config": {"output_channels": 8, "mlp_dim": 48}},
    "GraniteMoeHybridForCausalLM": {
        **_STATES,
        "layer_types": _alternating("linear_attention", "full_attention"),
    },
    "HrmTextForCausalLM": {"num_hidden_layers": 1},  # Called eight times.
    "InklingForCausalLM": {"logits_mup_width_multiplier": 1.0},
    "JambaForCausalLM": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 0,
    },
    "LagunaForCausalLM": {**_WINDOWS, "num_attention_heads_per_layer": [4, 2, 4, 2]},
    "Lfm2ForCausalLM": {
        "layer_types": _alternating("conv", "full_attention"),
        "block_multiple_of": 16,
    },
    "Lfm2MoeForCausalLM": {"layer_types": _alternating("conv", "full_attention")},
    "Llama4ForCausalLM": {"floor_scale": 4},
    "Mamba2ForCausalLM": {"head_dim": 16, "n_groups": 2, "chunk_size": 4},
    "MellumForCausalLM": _WINDOWS,
    "MiniCPM3ForCausalLM": {"dim_model_base": 32},
    "MiniMaxForCausalLM": {"block_size": 4},
    "MiniMaxM3VLForCausalLM": {
        **_DENSE_AND_EXPERTS,
        "layer_types": _alternating("full_attention", "minimax_m3_sparse"),
        "index_n_heads": 4,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "MusicgenForCausalLM": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1},
    "NemotronHForCausalLM": {
        **_STEPS,
        "layers_block_type": [
            "linear_attention",
            "moe",
            "full_attention",
            "mlp",
            "linear_attention",
        ],
        "n_groups": 2,
    },
    "Phi4MultimodalForCausalLM": {
        "audio_config": {
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
            "input_size": 8,
        },
    },
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 64,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1, 3],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "hc_lowrank": 8,
        "ple_embed_dim": 32,
    },
    "ReformerModelWithLMHead": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 16],
        "attn_layers": _alternating("local", "lsh"),
        "hash_seed": 0,
    },
    "XLMWithLMHeadModel": {"causal": True},
    "XLNetLMHeadModel": {"attn_type": "uni"},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "Zamba2ForCausalLM": {
        **_STEPS,
        "layers_block_type": _alternating("linear_attention", "hybrid"),
        "num_key_value_heads": 4,
        "mamba_ngroups": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 4,
        "use_mem_rope": True,
    },
    "ZambaForCausalLM": {
        "layers_block_type": _alternating("linear_attention", "hybrid"),
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
    },
    "ZayaForCausalLM": {
        "num_experts_per_tok": 1,
        "layer_types": _alternating("hybrid", "hybrid_sliding"),
        "router_hidden_size": 16,
    },
    "xLSTMForCausalLM": {  # Its widths are multiples of 64.
        "hidden_size": 128,
        "embedding_dim": 128,
        "ffn_proj_factor": 1.0,
        "ffn_round_up_to_multiple_of": 16,
    },
}

_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "DeepseekV2ForCausalLM groups": {"topk_method": "group_limited_greedy", "n_group": 2},
    "FalconForCausalLM alibi": {
        "alibi": True,
        "multi_query": False,
        "num_kv_heads": 4,
        "parallel_attn": False,
    },
    "FalconForCausalLM new": {"new_decoder_architecture": True},
    "FalconH1ForCausalLM multipliers": {
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8,
        "embedding_multiplier": 1.2,
        "key_multiplier": 0.7,
        "lm_head_multiplier": 0.9,
        "mlp_multipliers": [0.9, 1.1],
        "ssm_in_multiplier": 1.1,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.1],
        "ssm_out_multiplier": 0.9,
    },
    "GPTBigCodeForCausalLM heads": {"multi_query": False},
    "GPTNeoXForCausalLM serial": {"use_parallel_residual": False},
    "Gemma4ForCausalLM experts": {
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "GraniteForCausalLM multipliers": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "logits_scaling": 0.8,
        "residual_multiplier": 0.6,
    },
    "GraniteMoeHybridForCausalLM dense": {"num_local_experts": 0, "num_experts_per_tok": 0},
    "LlamaForCausalLM rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "OPTForCausalLM projected": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "PhiForCausalLM norms": {"qk_layernorm": True},
    "Qwen2ForCausalLM windows": {"use_sliding_window": True, "max_window_layers": 2},
    "Qwen3ForCausalLM windows": {"use_sliding_window": True, "max_window_layers": 2},
    "StableLmForCausalLM parallel": {"use_parallel_residual": True, "qk_layernorm": True},
    "Zamba2ForCausalLM blocks": {"num_mem_blocks": 2},
}

VARIANTS: tuple[str, ...] = tuple(_VARIANTS)
"""Class name, space, and what differs from the class: settings that run other code of it."""

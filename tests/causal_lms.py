"""Every causal language model class of transformers as a tiny random model."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 64
LAYERS = 4
WINDOW = 5
MAX_PARAMETERS = 1_250_000

_SIZES: dict[str, Any] = {
    name: value
    for value, names in (
        (VOCABULARY, "vocab_size vocab_size_per_layer_input audio_vocab_size decoder_vocab_size pronunciation_vocab_size shape_vocab_size"),
        (32, "hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size output_embedding_size "
        "word_embed_proj_dim lru_width attention_hidden_size backbone_hidden_size shape_embed_dim pronunciation_embed_dim mamba_d_ssm"),
        (48, "intermediate_size moe_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff d_inner n_inner "
        "ffn_hidden_size expert_ffn_hidden_size shared_intermediate_size intermediate_size_mlp feed_forward_size "
        "shared_expert_intermediate_size moe_shared_expert_intermediate_size dense_intermediate_size"),
        (LAYERS, "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers "
        "num_blocks num_layers_per_stack"),
        (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
        "mamba_n_heads linear_num_heads linear_num_value_heads swa_num_attention_heads index_n_heads n_mamba_heads mamba_num_heads "
        "zero_expert_num rotary_dim"),
        (2, "num_key_value_heads num_kv_heads linear_num_key_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token "
        "moe_k moe_topk top_k_experts"),
        (1, "n_group topk_group"),
        (8, "head_dim attention_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim dim_head d_head kv_channels "
        "swa_head_dim index_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim mamba_d_state state_size ssm_state_size "
        "attention_head_size"),
        (16, "q_lora_rank kv_lora_rank mamba_d_head mamba_head_dim"),
        (128, "max_position_embeddings n_positions max_seq_len context_length model_max_length n_ctx max_target_positions max_source_positions"),
        (WINDOW, "sliding_window window_size attention_window_size attention_chunk_size sliding_window_size keep_window_size"),
    )
    for name in names.split()
}
_SIZES |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "is_decoder": True}


def _repeated(*kinds: str) -> list[str]:
    """One entry per layer."""
    return [kinds[layer % len(kinds)] for layer in range(LAYERS)]


_SLIDING = {"layer_types": _repeated("sliding_attention", "full_attention")}
_INDEXED = {"index_topk": 6, "mlp_layer_types": _repeated("dense", "sparse")}
_SMALL_VISION = {"image_size": 8, "patch_size": 4}

_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "AXK2ForCausalLM": _INDEXED,
    "BltForCausalLM": {
        "encoder_hash_byte_group_vocab": 50,
        "patching_threshold": 4.0,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "BambaForCausalLM": {"attn_layer_indices": [1, 3], "mamba_n_groups": 2, "mamba_chunk_size": 4},
    "CohereForCausalLM": {"logit_scale": 1.0},
    "Cohere2ForCausalLM": {"logit_scale": 1.0},
    "Cohere2MoeForCausalLM": {"logit_scale": 1.0},
    "CohereCompassForCausalLM": {
        "layer_types": _repeated("sliding_attention", "full_attention"),
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
            "full_attention": None,
        },
        "logit_scale": 1.0,
    },
    "DbrxForCausalLM": {"ffn_config": {"moe_top_k": 2}, "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0}},
    "DeepseekV2ForCausalLM": {"first_k_dense_replace": 1},
    "DeepseekV3ForCausalLM": {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    "DeepseekV32ForCausalLM": _INDEXED,
    "DeepseekV4ForCausalLM": {
        "num_key_value_heads": 1,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": _repeated("hash_moe", "moe"),
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "head_dim": 16,
        "index_topk": 2,
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_sinkhorn_iters": 4,
    },
    "Dots1ForCausalLM": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64, "mamba_n_groups": 2, "mamba_chunk_size": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nForCausalLM": {
        **_SLIDING,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "Glm4MoeForCausalLM": {"first_k_dense_replace": 1},
    "GlmMoeDsaForCausalLM": _INDEXED,
    "GotOcr2ForConditionalGeneration": {"vision_config": {**_SMALL_VISION, "output_channels": 8, "mlp_dim": 48}},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": _repeated("linear_attention", "full_attention"),
        "mamba_n_groups": 2,
        "mamba_chunk_size": 4,
    },
    "HYV4ForCausalLM": _INDEXED,
    "HrmTextForCausalLM": {"num_hidden_layers": 1, "num_layers_per_stack": None},
    "InklingForCausalLM": {"logits_mup_width_multiplier": 1.0},
    "JambaForCausalLM": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 0,
    },
    "LagunaForCausalLM": {
        **_SLIDING,
        "num_attention_heads_per_layer": [4, 2, 4, 2],
    },
    "Lfm2ForCausalLM": {"layer_types": _repeated("conv", "full_attention"), "block_multiple_of": 16},
    "Lfm2MoeForCausalLM": {"layer_types": _repeated("conv", "full_attention")},
    "Mamba2ForCausalLM": {"head_dim": 16, "n_groups": 2, "chunk_size": 4},
    "MellumForCausalLM": _SLIDING,
    "MiniMaxForCausalLM": {"block_size": 4},
    "MiniMaxM3VLForCausalLM": {
        "layer_types": _repeated("full_attention", "minimax_m3_sparse"),
        "mlp_layer_types": _repeated("dense", "sparse"),
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "MusicgenForCausalLM": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1},
    "NemotronHForCausalLM": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "n_groups": 2,
        "chunk_size": 4,
    },
    "Phi4MultimodalForCausalLM": {
        "audio_config": {
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
            "input_size": 8,
        },
        "vision_config": {**_SMALL_VISION, "crop_size": 8},
    },
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 4,
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
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "hash_seed": 0,
    },
    "XLMWithLMHeadModel": {"causal": True},
    "XLNetLMHeadModel": {"attn_type": "uni"},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "Zamba2ForCausalLM": {
        "layers_block_type": _repeated("linear_attention", "hybrid"),
        "num_mem_blocks": 1,
        "num_key_value_heads": 4,
        "mamba_ngroups": 2,
        "chunk_size": 4,
        "use_shared_attention_adapter": True,
        "adapter_rank": 4,
        "use_mem_rope": True,
    },
    "ZambaForCausalLM": {
        "layers_block_type": _repeated("linear_attention", "hybrid"),
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
    },
    "ZayaForCausalLM": {
        "num_experts_per_tok": 1,
        "layer_types": _repeated("hybrid", "hybrid_sliding"),
        "router_hidden_size": 16,
    },
    "xLSTMForCausalLM": {
        "hidden_size": 128,
        "embedding_dim": 128,
        "ffn_proj_factor": 1.0,
        "ffn_round_up_to_multiple_of": 16,
        "autocast_kernel_dtype": "float32",
    },
}

UNBUILDABLE: Mapping[str, str] = {}

CAUSAL_LM_CLASSES: tuple[str, ...] = tuple(
    sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - set(UNBUILDABLE))
)


def build(class_name: str) -> PreTrainedModel:
    model_class = getattr(transformers, class_name)
    config = small_config(model_class.config_class, _OVERRIDES.get(class_name, {}))
    with torch.device("meta"):
        sizes = {n: tuple(p.shape) for n, p in model_class(config).named_parameters()}
    size = sum(torch.Size(shape).numel() for shape in sizes.values())
    if size > MAX_PARAMETERS:
        largest = sorted(sizes.items(), key=lambda item: -torch.Size(item[1]).numel())[:6]
        raise ValueError(f"{class_name} has {size:,} parameters, {largest}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).float().eval()
    fill(model)
    return model


def fill(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() > 1:
                    parameter.copy_(noise * 0.2)
                else:
                    parameter.add_(noise * 0.05)


def small_config(config_class: type[PreTrainedConfig], overrides: Mapping[str, Any]) -> PreTrainedConfig:
    base = {f.name for f in fields(PreTrainedConfig)}
    default = config_class()
    settings: dict[str, Any] = {}
    for field in fields(config_class):
        if field.name in config_class.sub_configs:
            sub = getattr(default, field.name)
            if isinstance(sub, PreTrainedConfig):
                settings[field.name] = small_config(type(sub), overrides.get(field.name, {}))
        elif field.name in _SIZES and (
            field.name not in base or "token" in field.name or field.name == "is_decoder"
        ):
            settings[field.name] = _SIZES[field.name]
        elif field.name.endswith("layer_types"):
            kinds = list(dict.fromkeys(getattr(default, field.name) or ()))
            if len(kinds) > 1:
                settings[field.name] = _repeated(*kinds)
    if "kv_lora_rank" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    settings |= {name: value for name, value in overrides.items() if name not in config_class.sub_configs}
    return config_class(**settings)

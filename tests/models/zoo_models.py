"""Transformers models of many families: tiny, with random weights, nothing downloaded.

One row a model: its configuration and the inputs of one forward. A model is built on demand and in eval mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

Inputs = Callable[[], dict[str, Any]]

VOCAB = 64


def ids(length: int = 7, name: str = "input_ids") -> dict[str, Any]:
    return {name: torch.randint(3, VOCAB - 4, (2, length))}


def tokens() -> dict[str, Any]:
    return ids()


def with_mask() -> dict[str, Any]:
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    return {**ids(), "attention_mask": mask}


def both_sides() -> dict[str, Any]:
    return {**ids(), **ids(5, "decoder_input_ids")}


def image(size: int = 32) -> Inputs:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def pair(size: int = 32) -> Inputs:
    """Text and an image."""
    return lambda: {**ids(), **image(size)()}


def speech(length: int = 4000) -> Inputs:
    return lambda: {"input_values": torch.randn(2, length)}


class Row(NamedTuple):
    """A model: what kind it is, the names of its classes, the configuration and the inputs."""

    family: str
    model: str
    config: str
    settings: dict[str, Any]
    inputs: Inputs

    def build(self) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        config._attn_implementation = "eager"  # the one that returns attentions
        return getattr(transformers, self.model)(config).eval()


# The names that most configurations share.
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
IMAGE: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
END: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GQA: dict[str, Any] = {**BASE, **END, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True}
D_MODEL: dict[str, Any] = {
    **END,
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
SPEECH: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0,
}
STAGES: dict[str, Any] = {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
RESNET: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}
TEXT: dict[str, Any] = {**BASE, **END}


SWIN: dict[str, Any] = {
    "image_size": 64,
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "window_size": 2,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "model_type": "swin",
}
DETR: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_queries": 5,
}

ROWS: dict[str, Row] = {
    # encoders
    "bert": Row("encoder", "BertForMaskedLM", "BertConfig", BASE, with_mask),
    "roberta": Row("encoder", "RobertaForTokenClassification", "RobertaConfig", TEXT, tokens),
    "albert": Row("encoder", "AlbertModel", "AlbertConfig", {**BASE, "embedding_size": 16}, tokens),
    "electra": Row("encoder", "ElectraForPreTraining", "ElectraConfig", {**BASE, "embedding_size": 16}, tokens),
    "deberta": Row("encoder", "DebertaV2Model", "DebertaV2Config", {**BASE, "relative_attention": True}, tokens),
    "distilbert": Row(
        "encoder",
        "DistilBertForQuestionAnswering",
        "DistilBertConfig",
        {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        tokens,
    ),
    "modernbert": Row(
        "encoder",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**BASE, **END, "cls_token_id": 1, "sep_token_id": 2},
        tokens,
    ),
    "longformer": Row(
        "encoder", "LongformerModel", "LongformerConfig", {**TEXT, "attention_window": 4}, lambda: ids(8)
    ),
    "fnet": Row("encoder", "FNetModel", "FNetConfig", TEXT, tokens),
    # decoders
    "gpt2": Row(
        "decoder",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        tokens,
    ),
    "llama": Row("decoder", "LlamaForCausalLM", "LlamaConfig", GQA, with_mask),
    "mistral": Row("decoder", "MistralForCausalLM", "MistralConfig", {**GQA, "sliding_window": 4}, tokens),
    "qwen3": Row("decoder", "Qwen3ForCausalLM", "Qwen3Config", {**GQA, "head_dim": 8}, tokens),
    "gemma2": Row("decoder", "Gemma2ForCausalLM", "Gemma2Config", {**GQA, "head_dim": 8, "sliding_window": 4}, tokens),
    "phi3": Row("decoder", "Phi3ForCausalLM", "Phi3Config", GQA, tokens),
    "opt": Row(
        "decoder",
        "OPTForCausalLM",
        "OPTConfig",
        {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32},
        tokens,
    ),
    "bloom": Row(
        "decoder",
        "BloomForCausalLM",
        "BloomConfig",
        {**END, "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        tokens,
    ),
    "gpt_neox": Row("decoder", "GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, tokens),
    "falcon": Row("decoder", "FalconForCausalLM", "FalconConfig", {**TEXT, "num_kv_heads": 2}, tokens),
    # encoder-decoders
    "t5": Row("encoder-decoder", "T5ForConditionalGeneration", "T5Config", T5, both_sides),
    "bart": Row("encoder-decoder", "BartForConditionalGeneration", "BartConfig", D_MODEL, both_sides),
    "pegasus": Row("encoder-decoder", "PegasusForConditionalGeneration", "PegasusConfig", D_MODEL, both_sides),
    "marian": Row("encoder-decoder", "MarianMTModel", "MarianConfig", D_MODEL, both_sides),
    "longt5": Row("encoder-decoder", "LongT5Model", "LongT5Config", {**T5, "local_radius": 3}, both_sides),
    # mixtures of experts
    "mixtral": Row(
        "mixture of experts", "MixtralForCausalLM", "MixtralConfig", {**GQA, **EXPERTS, "num_local_experts": 4}, tokens
    ),
    "qwen3_moe": Row(
        "mixture of experts",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**GQA, **EXPERTS, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
        tokens,
    ),
    "switch": Row(
        "mixture of experts",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            **T5,
            "num_experts": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_decoder_layers": 2,
        },
        both_sides,
    ),
    # state space and recurrent
    "mamba": Row(
        "state space",
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        tokens,
    ),
    "mamba2": Row(
        "state space",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
        tokens,
    ),
    "rwkv": Row(
        "state space",
        "RwkvForCausalLM",
        "RwkvConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 32},
        tokens,
    ),
    # vision
    "vit": Row("vision", "ViTForImageClassification", "ViTConfig", IMAGE, image()),
    "dinov2": Row("vision", "Dinov2Model", "Dinov2Config", IMAGE, image()),
    "swin": Row("vision", "SwinForImageClassification", "SwinConfig", STAGES, image(64)),
    "convnext": Row(
        "vision",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
        image(),
    ),
    "resnet": Row("vision", "ResNetForImageClassification", "ResNetConfig", RESNET, image()),
    "vit_mae": Row(
        "vision",
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        {
            **IMAGE,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
        },
        image(),
    ),
    "videomae": Row(
        "video",
        "VideoMAEModel",
        "VideoMAEConfig",
        {**IMAGE, "num_frames": 4},
        lambda: {"pixel_values": torch.randn(1, 4, 3, 32, 32)},
    ),
    "dpt": Row(
        "depth",
        "DPTForDepthEstimation",
        "DPTConfig",
        {
            **IMAGE,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
            "is_hybrid": False,
        },
        image(),
    ),
    # detection and segmentation
    "detr": Row(
        "detection",
        "DetrForObjectDetection",
        "DetrConfig",
        {
            **DETR,
            "auxiliary_loss": True,
            "backbone_config": {**RESNET, "layer_type": "basic", "out_features": ["stage4"], "model_type": "resnet"},
        },
        image(64),
    ),
    "yolos": Row(
        "detection",
        "YolosForObjectDetection",
        "YolosConfig",
        {**IMAGE, "image_size": [32, 32], "num_detection_tokens": 4},
        image(),
    ),
    "segformer": Row(
        "segmentation",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
            "sr_ratios": [4, 2, 1, 1],
        },
        image(64),
    ),
    "upernet": Row(
        "segmentation",
        "UperNetForSemanticSegmentation",
        "UperNetConfig",
        {
            "hidden_size": 16,
            "pool_scales": [1, 2],
            "auxiliary_channels": 16,
            "auxiliary_in_channels": 64,
            "backbone_config": SWIN,
        },
        image(64),
    ),
    "sam": Row(
        "segmentation",
        "SamModel",
        "SamConfig",
        {
            "vision_config": {
                **IMAGE,
                "image_size": 64,
                "mlp_dim": 48,
                "output_channels": 16,
                "num_pos_feats": 8,
                "window_size": 4,
                "global_attn_indexes": [1],
            },
            "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 8},
            "mask_decoder_config": {
                "hidden_size": 16,
                "mlp_dim": 24,
                "num_attention_heads": 2,
                "iou_head_hidden_dim": 16,
            },
        },
        lambda: {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.rand(1, 1, 2, 2) * 64},
    ),
    # speech
    "wav2vec2": Row("speech", "Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, speech()),
    "hubert": Row("speech", "HubertModel", "HubertConfig", SPEECH, speech()),
    "wavlm": Row("speech", "WavLMModel", "WavLMConfig", SPEECH, speech()),
    "whisper": Row(
        "speech",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**D_MODEL, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16},
        lambda: {"input_features": torch.randn(2, 8, 40), **ids(5, "decoder_input_ids")},
    ),
    "speech_to_text": Row(
        "speech",
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        {
            **D_MODEL,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 40,
            "max_target_positions": 16,
        },
        lambda: {"input_features": torch.randn(2, 40, 8), **ids(5, "decoder_input_ids")},
    ),
    "ast": Row(
        "speech",
        "ASTForAudioClassification",
        "ASTConfig",
        {**IMAGE, "max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
        lambda: {"input_values": torch.randn(2, 32, 16)},
    ),
    # multimodal
    "clip": Row(
        "multimodal",
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16},
        pair(),
    ),
    "siglip": Row(
        "multimodal",
        "SiglipModel",
        "SiglipConfig",
        {"text_config": {**TEXT, "projection_size": 32}, "vision_config": IMAGE},
        pair(),
    ),
    "blip": Row(
        "multimodal",
        "BlipModel",
        "BlipConfig",
        {
            "text_config": {**TEXT, "encoder_hidden_size": 32, "sep_token_id": 2},
            "vision_config": IMAGE,
            "projection_dim": 16,
        },
        pair(),
    ),
    "vilt": Row("multimodal", "ViltModel", "ViltConfig", {**BASE, **IMAGE, "max_image_length": -1}, pair()),
    "llava": Row(
        "multimodal",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {**GQA, "model_type": "llama"},
            "vision_config": {**IMAGE, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_token_index": 62,
        },
        lambda: {"input_ids": torch.cat([torch.full((2, 16), 62), ids()["input_ids"]], 1), **image()()},
    ),
    # others
    "timeseries": Row(
        "time series",
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "prediction_length": 4,
            "d_model": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "ffn_dim": 24,
        },
        lambda: {"past_values": torch.randn(2, 16, 2)},
    ),
    "decision": Row(
        "reinforcement learning",
        "DecisionTransformerModel",
        "DecisionTransformerConfig",
        {"state_dim": 5, "act_dim": 3, "hidden_size": 32, "n_layer": 2, "n_head": 4, "max_ep_len": 20},
        lambda: {
            "states": torch.randn(2, 4, 5),
            "actions": torch.randn(2, 4, 3),
            "rewards": torch.randn(2, 4, 1),
            "returns_to_go": torch.randn(2, 4, 1),
            "timesteps": torch.arange(4).expand(2, 4),
            "attention_mask": torch.ones(2, 4, dtype=torch.int64),
        },
    ),
}

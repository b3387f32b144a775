"""Six models of the transformers package, tiny and with random weights: nothing is downloaded.

Each builder returns a model in eval mode and the keyword arguments of one forward. Hidden states, attentions
and the cache are switched on, because the nest of outputs is what the example is about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ALL_OUTPUTS = {"output_hidden_states": True, "output_attentions": True}


@dataclass(frozen=True)
class Subject:
    """A model and one batch for it.

    Attributes:
        name: What the table is called.
        model: The module, in float32 and eval mode.
        inputs: Keyword arguments of its forward; tensors in float32 or int64.
    """

    name: str
    model: nn.Module
    inputs: dict[str, Any]

    @property
    def has_floating_inputs(self) -> bool:
        """Whether some input is floating: what the policy ``"input"`` needs."""
        return any(is_floating(value) for value in self.inputs.values())

    def inputs_as(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the inputs with the floating ones in ``dtype``."""
        return {name: value.to(dtype) if is_floating(value) else value for name, value in self.inputs.items()}


def is_floating(value: Any) -> bool:
    """Return whether ``value`` is a floating tensor."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def tokens(length: int, vocabulary: int = 64) -> torch.Tensor:
    """Return (2, ``length``) random int64 token ids."""
    return torch.randint(3, vocabulary, (2, length))


def gpt2() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    ids = tokens(12)
    return Subject("GPT-2", GPT2LMHeadModel(config).eval(), {"input_ids": ids, "labels": ids, "use_cache": True})


def bert() -> Subject:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=3,
        attn_implementation="eager",
    )
    inputs = {"input_ids": tokens(12), "attention_mask": torch.ones(2, 12, dtype=torch.int64)}
    return Subject("BERT", BertForSequenceClassification(config).eval(), inputs)


def t5() -> Subject:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    inputs = {"input_ids": tokens(12), "decoder_input_ids": tokens(5), "use_cache": True}
    return Subject("T5", T5ForConditionalGeneration(config).eval(), inputs)


def vit() -> Subject:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=5,
        attn_implementation="eager",
    )
    return Subject("ViT", ViTForImageClassification(config).eval(), {"pixel_values": torch.rand(2, 3, 32, 32)})


def whisper() -> Subject:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=30,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        attn_implementation="eager",
    )
    # The encoder halves the time axis, hence twice max_source_positions.
    inputs = {"input_features": torch.randn(2, 16, 60), "decoder_input_ids": tokens(5), "use_cache": True}
    return Subject("Whisper", WhisperForConditionalGeneration(config).eval(), inputs)


def detr() -> Subject:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    # A backbone of transformers' own: the default one comes from timm.
    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = DetrConfig(
        backbone_config=backbone,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=10,
        num_labels=4,
        attn_implementation="eager",
    )
    inputs = {
        "pixel_values": torch.rand(2, 3, 64, 64),
        "pixel_mask": torch.ones(2, 64, 64, dtype=torch.int64),
    }
    return Subject("DETR", DetrForObjectDetection(config).eval(), inputs)


BUILDERS: dict[str, Callable[[], Subject]] = {
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
    "detr": detr,
}


def build(key: str) -> Subject:
    """Return the subject named ``key`` in :data:`BUILDERS`, the same weights and batch every time."""
    torch.manual_seed(0)
    subject = BUILDERS[key]()
    return Subject(subject.name, subject.model, {**subject.inputs, **ALL_OUTPUTS})

"""Small models of transformers, as users load them, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Logits(nn.Module):
    """A model that returns logits for tokens or images, classes on axis 1."""

    def __init__(self, model: nn.Module, argument: str) -> None:
        super().__init__()
        self.model = model
        self.argument = argument

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(**{self.argument: x}).logits
        return logits.mT if logits.ndim == 3 else logits


def of_transformers(name: str, argument: str = "input_ids", **config: Any) -> Callable[[], Logits]:
    """Makes the class of this name, with its own configuration.

    Args:
        argument: What the input is called.
        config: Options of the configuration; those that it has not are left out.
    """

    def make() -> Logits:
        import transformers

        kind = getattr(transformers, name)
        options = kind.config_class(**config)
        options._attn_implementation = "eager"  # which can be differentiated twice
        torch.manual_seed(0)
        return Logits(kind(options), argument)

    return make


SMALL: dict[str, Any] = {
    "vocab_size": 5,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "experts_implementation": "eager",
}

_GPT2: dict[str, Any] = {"vocab_size": 5, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
_GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_IMAGES: dict[str, Any] = {"image_size": 4, "patch_size": 2, "num_channels": 2, "num_labels": 3}

#: Of token classifiers.
LANGUAGE_MODELS = {
    "Mixtral": of_transformers("MixtralForCausalLM", **SMALL, **EXPERTS),
    "Qwen3-MoE": of_transformers("Qwen3MoeForCausalLM", **SMALL, **EXPERTS),
    "gpt-oss": of_transformers("GptOssForCausalLM", **SMALL, **EXPERTS),
    "SmolLM3": of_transformers("SmolLM3ForCausalLM", **SMALL),
    "Gemma3": of_transformers("Gemma3ForCausalLM", **SMALL),
    "GPT-2": of_transformers("GPT2LMHeadModel", **_GPT2),
}
#: Of classifiers of texts.
TEXT_MODELS = {
    "BERT": of_transformers(
        "BertForSequenceClassification", **{**SMALL, "num_labels": 3, "pad_token_id": 0}
    ),
}
#: Of classifiers of images.
IMAGE_MODELS = {
    "ViT of a package": of_transformers(
        "ViTForImageClassification", "pixel_values", **SMALL, **_IMAGES
    ),
}

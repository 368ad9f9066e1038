"""Small random models, saved by transformers as anyone would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save(folder: Path, family: str, *, tied: bool = False, shards: str | None = None, **changes: Any) -> Any:
    """Save a two-layer model of `family` (Llama, Mistral, Qwen2, Qwen3) into `folder`; returns the model."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": [1, 2],
        **({"head_dim": 32} if family == "Qwen3" else {}),
        **changes,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases begin as ones and zeros
            parameter.normal_(std=0.5)
    model.save_pretrained(folder, **({"max_shard_size": shards} if shards else {}))
    return model

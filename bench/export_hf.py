"""`python -m bench.export_hf DIRECTORY`: smollm2 as a Hugging Face directory, from the weights that minengine itself loads.

So every peer runs the same float32 numbers. There is no tokenizer in it: all engines are fed token ids.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

from torch import Tensor

__all__ = ["export", "split_halves"]


def split_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a Q or K projection from neighbouring RoPE pairs (GGUF) back to the half-split order of Hugging Face.

    Args:
        weight: (num_heads * head_dim, hidden).
    """
    rows, hidden = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)


def export(directory: Path, model: str = "smollm2") -> Path:
    """Write `config.json` and `model.safetensors` unless both are there; returns the directory."""
    from minengine.model.weights import open_model
    from safetensors.torch import save_file

    if (directory / "config.json").is_file():
        return directory
    config, weights = open_model(model)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if weights.rope_interleaved else {}
    tensors = {}
    for name in weights.names():
        tensor = weights.take(name)
        num_heads = next((n for part, n in heads.items() if part in name), None)
        tensors[name] = (split_halves(tensor, num_heads) if num_heads else tensor).contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({  # last: its presence says that the weights are complete
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size, "rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_position_embeddings, "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids), "attention_bias": False, "mlp_bias": False,
    }, indent=2))
    return directory


if __name__ == "__main__":
    print(export(Path(sys.argv[1])))

"""The tiny models of `tiny_models` as Hugging Face directories, for processes that cannot be handed one in memory."""
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from minengine.config import model_config
from minengine.model.decoder import Decoder
from tiny_models import GLM, LLAMA, RandomWeights


class _Noted(RandomWeights):
    """Keeps every tensor that a decoder takes."""

    def __init__(self, config):
        super().__init__(config, torch.float32, "cpu")
        self.tensors = {}

    def take(self, name, shape=None, dtype=None):
        tensor = super().take(name, shape, dtype)
        self.tensors[name] = tensor.clone()
        return tensor


def write_tiny(directory: Path, kind: str, **changes) -> Path:
    """Write `config.json` and `model.safetensors` of `tiny_model(kind)`, with other config fields than its own if `changes` says so."""
    hf = {**{"llama": LLAMA, "glm": GLM}[kind], **changes}
    config = model_config(hf)
    source = _Noted(config)
    Decoder(config, source)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in source.tensors.items()}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(hf))
    return directory

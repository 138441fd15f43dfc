"""Exercises of "The latent row". The references are the engine's cache and the formulas behind it."""
from __future__ import annotations

from functools import cache

from ..arithmetic import GLM_5_3, bytes_per_token, session_bytes
from ..claims import read_claims
from ..kv.layout import KVLayout
from .kinds import Function, Number

__all__ = ["EXERCISES"]


def gigabytes_without_latent() -> float:
    """A session of GLM-5.3 with a key and a value of every head in 8 bits."""
    a_head = GLM_5_3["qk_nope_head_dim"] + GLM_5_3["qk_rope_head_dim"] + GLM_5_3["v_head_dim"]
    tokens = read_claims()["session_tokens"].value
    return session_bytes(tokens, bytes_per_token(a_head, GLM_5_3["num_hidden_layers"], GLM_5_3["num_attention_heads"])) / 1e9


def stored_row(rank: int, rope: int) -> int:
    """Bytes between neighbouring tokens in a real cache of 4-bit rows."""
    from ..kv.rows import row_format  # torch, only when this exercise is checked

    return row_format("nvfp4_fp8_ds_mla", rank, rope).storage_width


def stored_at(layer: int, slot: int) -> int:
    """Where the engine puts a row of the chapter's pool."""
    lay = _layout()
    block, offset = divmod(slot, lay.block_size)
    return lay.offset + layer * lay.strides[0] + block * lay.strides[1] + offset * lay.strides[3]


@cache
def _layout() -> KVLayout:
    return KVLayout("LBNHC", GLM_5_3["num_hidden_layers"], 2, 1, 64, 352)


EXERCISES = {
    "ex1": Number(value=gigabytes_without_latent, hint="Keys and values, all heads, all layers, a byte each; a gigabyte is 10^9 bytes."),
    "ex2": Function(
        reference=stored_row, draw=lambda random: (16 * random.randint(1, 64), random.randint(1, 128)), corners=((512, 64), (32, 16)), tries=60,
        hint="Half a byte a value, a byte a group of 16, and a rotary key in 8 bits."),
    "ex3": Function(
        reference=stored_at, draw=lambda random: (random.randrange(78), random.randrange(128)), corners=((0, 0), (0, 1), (0, 64), (1, 0)), tries=60,
        hint="How many rows lie before this one?"),
}

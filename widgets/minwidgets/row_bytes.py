"""The widget KV row bytes: from a row's widths and format to the sessions that fit a memory.

    RowBytes()                                        # GLM-5.3 in 4 bits
    RowBytes(kv_cache_dtype="fp8", tokens=200_000)
    RowBytes.from_config(json.load(open("config.json")), kv_cache_dtype="fp8")

The drawing (`row_bytes.js`) works its numbers out in the page, so that it needs no kernel; they are those of
`minengine.arithmetic`, and `numbers` gives them here.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import traitlets
from minengine.arithmetic import GLM_5_3, KVRow, cached_tokens, layer_kinds, row_of_fields, session_bytes, sessions_held
from minengine.config import HEAD_DTYPES, LATENT_DTYPES, ConfigError, cache_fields

from .modules import bundle, styles
from .page_widget import VIEW_MIME, PageWidget, within

__all__ = ["VIEW_MIME", "RowBytes", "RowNumbers"]

LIMITS = {  # least and most of each count; the same as in row_formulas.js
    "kv_lora_rank": (1, 65536),
    "qk_rope_head_dim": (1, 65536),
    "num_hidden_layers": (1, 10_000),
    "num_indexer_layers": (0, 10_000),
    "index_head_dim": (0, 65536),
    "num_key_value_heads": (1, 65536),
    "head_dim": (1, 65536),
    "tokens": (1, 10**9),
    "kv_cache_memory_bytes": (1, 10**15),
}
LATENT = ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "num_indexer_layers", "index_head_dim")
HEADS = ("num_hidden_layers", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class RowNumbers:
    """What the widget shows."""

    kv_row: KVRow
    token_bytes: int
    session_bytes: int
    tokens_held: int
    sessions_held: int


class RowBytes(PageWidget):
    """Bytes of a cache row, of a token, of a session, and the sessions that a memory holds.

    Every trait is two-way while a kernel runs. A count outside its limits is a TraitError that names the trait.
    Widths that a format cannot divide are refused by the constructor and by `numbers`, not by an assignment, since
    one trait changes at a time; the page shows the same sentence.
    """

    _esm = bundle("row_bytes.js")
    _css = styles("controls.css", "row_bytes.css")

    attention = traitlets.Enum(("mla", "gqa"), "mla", help="mla: one latent that all heads share; gqa: K and V of each key/value head").tag(sync=True)
    kv_cache_dtype = traitlets.Enum(tuple(dict.fromkeys(LATENT_DTYPES + HEAD_DTYPES)), "nvfp4_fp8_ds_mla").tag(sync=True)
    kv_lora_rank = traitlets.Int(GLM_5_3["kv_lora_rank"], help="mla: values of the latent").tag(sync=True)
    qk_rope_head_dim = traitlets.Int(GLM_5_3["qk_rope_head_dim"], help="mla: values of the rotary key").tag(sync=True)
    num_hidden_layers = traitlets.Int(GLM_5_3["num_hidden_layers"]).tag(sync=True)
    num_indexer_layers = traitlets.Int(layer_kinds()["full"], help="mla: layers that keep an indexer key").tag(sync=True)
    index_head_dim = traitlets.Int(GLM_5_3["index_head_dim"], help="mla: values of an indexer key; 0: no indexer").tag(sync=True)
    num_key_value_heads = traitlets.Int(8, help="gqa: heads that own a row").tag(sync=True)
    head_dim = traitlets.Int(128, help="gqa: values of K, and of V, of one head").tag(sync=True)
    tokens = traitlets.Int(146_000, help="of one session").tag(sync=True)
    kv_cache_memory_bytes = traitlets.Int(50_000_000_000, help="for one copy of the cache").tag(sync=True)
    model_name = traitlets.Unicode("", help="what the drawing calls the model").tag(sync=True)
    initial = traitlets.Dict(help="what Reset goes back to: the traits as they were made").tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        known = {*LIMITS, "attention", "kv_cache_dtype", "model_name"}
        if unknown := next((name for name in traits if name not in known and not self.has_trait(name)), None):
            raise ConfigError(f"unknown option '{unknown}'; known options: {', '.join(sorted(known))}")
        if not {"attention", *LATENT, *HEADS, "model_name"}.intersection(traits):
            traits["model_name"] = "GLM-5.3"
        super().__init__(**traits)
        self.initial = {name: getattr(self, name) for name in sorted(known)}
        self.numbers  # an author's mistake is an error here, not a sentence in the page

    @classmethod
    def from_config(cls, config: Mapping[str, Any], kv_cache_dtype: str, **traits: Any) -> "RowBytes":
        """The widget at the row of a model's `config.json`.

        Raises:
            ConfigError: see `minengine.arithmetic.kv_row`.
        """
        fields = cache_fields(config)
        name = (config.get("architectures") or [config.get("model_type")])[0] or ""
        attention = "mla" if "kv_lora_rank" in fields else "gqa"
        return cls(**{"attention": attention, "model_name": name, **fields, "kv_cache_dtype": kv_cache_dtype, **traits})

    @traitlets.validate(*LIMITS)
    def _within_limits(self, proposal: Any) -> int:
        name = proposal["trait"].name
        return within(LIMITS[name], name, proposal["value"])

    @property
    def numbers(self) -> RowNumbers:
        """The numbers of the traits as they are now.

        Raises:
            ConfigError: a format that is not of this attention or cannot divide a width, or more indexers than layers.
        """
        row = row_of_fields({name: getattr(self, name) for name in (LATENT if self.attention == "mla" else HEADS)}, self.kv_cache_dtype)
        if row.indexer and row.indexer_layers > row.layers:
            raise ConfigError(f"num_indexer_layers={row.indexer_layers}: use at most num_hidden_layers, {row.layers}")
        held = cached_tokens(self.kv_cache_memory_bytes, row.bytes_per_token, 1)
        return RowNumbers(row, row.bytes_per_token, session_bytes(self.tokens, row.bytes_per_token), held, sessions_held(held, self.tokens))

    def _in_words(self) -> str:
        try:
            now = self.numbers
        except ConfigError as error:
            return f"KV row bytes: {error}"
        parts = ", ".join(f"{name.replace('_', ' ')} {nbytes:,}" for name, nbytes in now.kv_row.row.parts.items())
        return (f"KV row bytes: {self.model_name or 'a model'} in {self.kv_cache_dtype}: {now.kv_row.row.total:,} bytes a row ({parts}), "
                f"{now.token_bytes:,} bytes a token, {now.session_bytes:,} bytes a session of {self.tokens:,} tokens, "
                f"{now.sessions_held:,} sessions in {self.kv_cache_memory_bytes:,} bytes.")

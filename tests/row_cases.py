"""States of the row widget and configs of models, drawn at random, and what minengine.arithmetic says of them."""
from minengine.arithmetic import cached_tokens, kv_row, row_of_fields, session_bytes, sessions_held
from minengine.config import HEAD_DTYPES, LATENT_DTYPES, ConfigError

DEFAULTS = {
    "attention": "mla", "kv_cache_dtype": "fp8", "model_name": "", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 78,
    "num_indexer_layers": 21, "index_head_dim": 128, "num_key_value_heads": 8, "head_dim": 128,
    "tokens": 146_000, "kv_cache_memory_bytes": 50_000_000_000,
}
LATENT = ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "num_indexer_layers", "index_head_dim")
HEADS = ("num_hidden_layers", "num_key_value_heads", "head_dim")
LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


def expected(state):
    """The numbers of a state, from minengine.arithmetic; or the text of its complaint."""
    latent = state["attention"] == "mla"
    try:
        row = row_of_fields({name: state[name] for name in (LATENT if latent else HEADS)}, state["kv_cache_dtype"])
    except ConfigError as error:
        return str(error)
    if row.indexer and row.indexer_layers > row.layers:
        return f"num_indexer_layers={row.indexer_layers}: use at most num_hidden_layers, {row.layers}"
    held = cached_tokens(state["kv_cache_memory_bytes"], row.bytes_per_token, 1)
    return [list(map(list, row.row.parts.items())), row.row.total, row.indexer.total if row.indexer else 0, row.bytes_per_token,
            session_bytes(state["tokens"], row.bytes_per_token), held, sessions_held(held, state["tokens"])]


def shown(state):
    """Of `expected`, what the page shows: bytes a row, a token, a session, and sessions."""
    found = expected(state)
    return [None] * 4 if isinstance(found, str) else [found[1], found[3], found[4], found[6]]


def plain(state):
    """Bytes of the same row in bfloat16, which the drawing is scaled to."""
    return 2 * (state["kv_lora_rank"] + state["qk_rope_head_dim"] if state["attention"] == "mla" else 2 * state["head_dim"])


def random_state(draw):
    """Any state that the traits take: small and huge, most widths that formats can divide and some that they cannot."""
    kind = draw.choice(["mla", "gqa"])
    formats = LATENT_DTYPES if kind == "mla" else HEAD_DTYPES
    return {
        **DEFAULTS, "attention": kind,
        "kv_cache_dtype": draw.choice(formats) if draw.random() < 0.97 else draw.choice(LATENT_DTYPES + HEAD_DTYPES),
        "kv_lora_rank": 16 * draw.randint(1, 4096) if draw.random() < 0.9 else draw.randint(1, 65536),
        "qk_rope_head_dim": draw.choice([1, 64, draw.randint(1, 65536)]),
        "num_hidden_layers": draw.choice([1, 78, 10_000, draw.randint(1, 10_000)]),
        "num_indexer_layers": draw.choice([0, 1, draw.randint(0, 10_000)]),
        "index_head_dim": draw.choice([0, 128, draw.randint(0, 65536)]),
        "num_key_value_heads": draw.choice([1, 8, 65536, draw.randint(1, 65536)]),
        "head_dim": 32 * draw.randint(1, 2048) if draw.random() < 0.8 else draw.randint(1, 65536),
        "tokens": draw.choice([1, 10**9, draw.randint(1, 10**draw.randint(1, 9))]),
        "kv_cache_memory_bytes": draw.choice([1, 10**15, draw.randint(1, 10**draw.randint(1, 15))]),
    }


def random_config(draw):
    """A model's config.json, or something near one."""
    layers = draw.randint(1, 90)
    config = {"num_hidden_layers": layers, "hidden_size": draw.choice([1024, 4096, 6144]), "num_attention_heads": draw.choice([8, 32, 96])}
    if draw.random() < 0.5:
        config |= {"kv_lora_rank": 16 * draw.randint(1, 64), "qk_rope_head_dim": draw.randint(1, 128)}
        config |= draw.choice([{}, {"index_head_dim": draw.choice([0, 64, 128])}])
        config |= draw.choice([
            {}, {"index_topk_freq": draw.randint(0, 9)}, {"index_topk_freq": draw.randint(0, 9), "index_skip_topk_offset": draw.randint(0, 9)},
            {"indexer_types": []}, {"indexer_types": draw.choices(["full", "shared"], k=layers)},
            {"index_topk_pattern": "".join(draw.choices("FS", k=layers))},
        ])
    else:
        config |= draw.choice([{}, {"num_key_value_heads": draw.randint(1, 64)}, {"num_key_value_heads": None}])
        config |= draw.choice([{}, {"head_dim": draw.choice([64, 80, 128, 256])}, {"head_dim": None}])
        config |= draw.choice([{}, {"v_head_dim": draw.choice([64, 128])}])
    config |= draw.choice([{}, {"layer_types": ["full_attention"] * layers}, {"layer_types": None}, {"sliding_window": None}])
    config |= draw.choice([{}, {}, {"sliding_window": 4096, "max_position_embeddings": draw.choice([4096, 32768])}])
    config |= draw.choice([{}, {"use_sliding_window": draw.choice([True, False])}])
    if draw.random() < 0.4:  # damage one field
        config[draw.choice([*config, "layer_types", "head_dim", "indexer_types", "index_topk_freq"])] = draw.choice(
            [None, 0, -1, 3.5, "12", True, [], {}, ["linear_attention"], ["full"], [1], "FS"])
    if draw.random() < 0.1:
        config.pop(draw.choice([*config]))
    return {"text_config": config} if draw.random() < 0.1 else config


def expected_of_config(config, kv_cache_dtype):
    """What `kv_row` says of a config, as plain values; or the text of its complaint."""
    try:
        found = kv_row(config, kv_cache_dtype)
    except ConfigError as error:
        return str(error)
    indexer = found.indexer.total if found.indexer else 0
    return [list(map(list, found.row.parts.items())), found.layers, found.heads, indexer, found.indexer_layers, found.bytes_per_token]

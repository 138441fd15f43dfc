// What one cached token costs: the closed formulas of minengine/arithmetic/ and the config reading of
// minengine/config.py, said again for the page. Tests hold the two equal, messages included.

export const FORMATS = {
  mla: ["float32", "bfloat16", "fp8", "fp8_ds_mla", "nvfp4_fp8_ds_mla", "int4", "int3", "int2"],
  gqa: ["float32", "bfloat16", "fp8", "nvfp4", "q8_0", "q4_0", "int4", "int3", "int2"],
};
// Least and most of each field that holds a count; the same as in row_bytes.py.
export const LIMITS = {
  kv_lora_rank: [1, 65536],
  qk_rope_head_dim: [1, 65536],
  num_hidden_layers: [1, 10000],
  num_indexer_layers: [0, 10000],
  index_head_dim: [0, 65536],
  num_key_value_heads: [1, 65536],
  head_dim: [1, 65536],
  tokens: [1, 1e9],
  kv_cache_memory_bytes: [1, 1e15],
};
const WIDTH = { float32: 4, bfloat16: 2, fp8: 1 };
const INT_BITS = { int4: 4, int3: 3, int2: 2 };
const VALUES = { float32: "FP32", bfloat16: "BF16", fp8: "E4M3" };
const ROW_LAYERS = ["full_attention", "attention", "indexed_attention", "deepseek_sparse_attention"];

const part = (name, bytes, holds) => ({ name, bytes, holds });

function demandMultiple(ok, field, value, text) {
  if (!ok) throw new Error(`${field}=${value}: ${text}`);
}

function latentRow(format, rank, rope) {
  demandMultiple(rank >= 1 && rank % 16 === 0, "kv_lora_rank", rank, "latent rows need a positive multiple of 16");
  if (format === "fp8_ds_mla") {
    const scales = Math.ceil(rank / 128);
    return [part("latent", rank, `${rank} E4M3`), part("scales", 4 * scales, `${scales} FP32`), part("rope", 2 * rope, `${rope} BF16`)];
  }
  if (format === "nvfp4_fp8_ds_mla")
    return [part("latent", rank / 2, `${rank} E2M1`), part("rope", rope, `${rope} E4M3`), part("scales", rank / 16, `${rank / 16} E4M3`)];
  if (format in INT_BITS)
    return [
      part("latent", (rank * INT_BITS[format]) / 8, `${rank} INT${INT_BITS[format]}`), part("scale", 4, "1 FP32"),
      part("rope", 2 * rope, `${rope} BF16`),
    ];
  const [width, values] = [WIDTH[format], VALUES[format]];
  return [part("latent", width * rank, `${rank} ${values}`), part("rope", width * rope, `${rope} ${values}`)];
}

function headRow(format, width) {
  const group = { nvfp4: 16, q8_0: 32, q4_0: 32, int4: 8, int3: 8, int2: 8 }[format] || 1;
  demandMultiple(width >= 1 && width % group === 0, "head_dim", width, `kv_cache_dtype='${format}' needs a positive multiple of ${group}`);
  if (format === "nvfp4")
    return ["key", "value"].flatMap((name) => [
      part(name, width / 2, `${width} E2M1`), part(`${name}_scales`, width / 16, `${width / 16} E4M3`),
    ]);
  if (format in INT_BITS)
    return ["key", "value"].flatMap((name) => [
      part(name, (width * INT_BITS[format]) / 8, `${width} INT${INT_BITS[format]}`), part(`${name}_scale`, 4, "1 FP32"),
    ]);
  if (group === 32) {
    const bits = format === "q8_0" ? 8 : 4;
    const bytes = (width / 32) * (2 + 4 * bits);
    return ["key", "value"].map((name) => part(name, bytes, `${width} INT${bits} + ${width / 32} FP16`));
  }
  return ["key", "value"].map((name) => part(name, width * WIDTH[format], `${width} ${VALUES[format]}`));
}

const total = (parts) => parts.reduce((sum, { bytes }) => sum + bytes, 0);

/** What an indexer key takes beside a row: plain in a plain cache, else E4M3 and one FP32 scale. */
const indexerKey = (format, width) => (format === "float32" ? 4 * width : format === "bfloat16" ? 2 * width : width + 4);

/** One field's text of complaint, or nothing. */
export function complaint(field, value) {
  const [least, most] = LIMITS[field];
  return Number.isSafeInteger(value) && value >= least && value <= most ? "" : `${field}=${value}: use a whole number from ${least} to ${most}`;
}

/**
 * All numbers of a state (the widget's traits): the parts of the row, and counts as BigInt, since a session passes 2^53.
 * Throws an Error whose message names the field and the remedy.
 */
export function numbers(state) {
  const formats = FORMATS[state.attention];
  if (!formats) throw new Error(`attention='${state.attention}': use one of mla, gqa`);
  const format = state.kv_cache_dtype;
  if (!formats.includes(format)) {
    const what = state.attention === "mla" ? "a latent row" : "a row of grouped heads";
    throw new Error(`kv_cache_dtype='${format}' is not ${what}; use one of ${formats.join(", ")}`);
  }
  for (const field of Object.keys(LIMITS)) {
    const text = complaint(field, state[field]);
    if (text) throw new Error(text);
  }
  const latent = state.attention === "mla";
  const row = (name) => (latent ? latentRow(name, state.kv_lora_rank, state.qk_rope_head_dim) : headRow(name, state.head_dim));
  const parts = row(format);
  const indexed = latent && state.index_head_dim > 0;
  if (indexed && state.num_indexer_layers > state.num_hidden_layers)
    throw new Error(`num_indexer_layers=${state.num_indexer_layers}: use at most num_hidden_layers, ${state.num_hidden_layers}`);
  const layers = BigInt(state.num_hidden_layers);
  const heads = latent ? 1n : BigInt(state.num_key_value_heads);
  const indexer = indexed ? indexerKey(format, state.index_head_dim) : 0;
  const rowsToken = layers * heads * BigInt(total(parts));
  const indexerToken = indexed ? BigInt(state.num_indexer_layers) * BigInt(indexer) : 0n;
  const token = rowsToken + indexerToken;
  const tokens = BigInt(state.tokens);
  const held = BigInt(state.kv_cache_memory_bytes) / token;
  return {
    parts, row: BigInt(total(parts)), plain: row("bfloat16"), indexer: BigInt(indexer), token,
    session: tokens * token, sessionRows: tokens * rowsToken, sessionIndexer: tokens * indexerToken, held, sessions: held / tokens,
  };
}

// --- a pasted config.json ----------------------------------------------------------------------------------

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const absent = (value) => value === undefined || value === null;
const shown = (value) => JSON.stringify(value);
/** False for what Python calls false: the fields that a config may leave empty. */
const given = (value) => Boolean(value) && !(typeof value === "object" && Object.keys(value).length === 0);

function count(config, field, fallback = null, least = 1) {
  const value = absent(config[field]) ? fallback : config[field];
  if (value === null) throw new Error(`config.json: field '${field}' is missing; take the whole file of an MLA or grouped-head model`);
  if (!Number.isInteger(value) || value < least)
    throw new Error(`config.json: field '${field}' is ${shown(value)}; it must be a whole number of at least ${least}`);
  return value;
}

/** Layers with an indexer of their own: listed, in a pattern of F and S, or by the rule's two numbers. */
function fullLayers(config, layers) {
  let kinds = given(config.indexer_types) ? config.indexer_types : config.index_topk_pattern;
  if (absent(kinds)) {
    const every = Math.max(count(config, "index_topk_freq", 1, 0), 1);
    const offset = count(config, "index_skip_topk_offset", 2, 0);
    return Array.from({ length: layers }, (_, i) => Math.max(i - offset + 1, 0) % every === 0).filter(Boolean).length;
  }
  const asked = kinds;
  if (typeof kinds === "string" || Array.isArray(kinds)) {
    kinds = [...kinds].map((kind) => ({ F: "full", S: "shared" })[kind] || kind);
    if (kinds.length === layers && kinds.every((kind) => kind === "full" || kind === "shared")) return kinds.filter((kind) => kind === "full").length;
  }
  throw new Error(`config.json: field 'indexer_types' must name 'full' or 'shared' for each of ${layers} layers; got ${shown(asked)}`);
}

/** The traits that a model's config.json decides; throws as config.cache_fields does. */
export function fromConfig(whole) {
  const config = absent(whole.num_hidden_layers) && isObject(whole.text_config) ? whole.text_config : whole;
  const layers = count(config, "num_hidden_layers");
  if (layers > LIMITS.num_hidden_layers[1]) throw new Error(complaint("num_hidden_layers", layers));
  const kinds = given(config.layer_types) ? config.layer_types : [];
  for (const kind of Array.isArray(kinds) ? kinds : [kinds])
    if (!ROW_LAYERS.includes(kind))
      throw new Error(`config.json: field 'layer_types' has ${shown(kind)}, which keeps no row of every token; take a model without such layers`);
  const window = count(config, "sliding_window", 0, 0);
  if (window > 0 && window < count(config, "max_position_embeddings", 0, 0) && config.use_sliding_window !== false)
    throw new Error(`config.json: field 'sliding_window' is ${window}, so older rows are dropped; take a model that keeps every token`);
  if (!absent(config.kv_lora_rank)) {
    const [rank, rope, width] = [count(config, "kv_lora_rank"), count(config, "qk_rope_head_dim"), count(config, "index_head_dim", 0, 0)];
    const indexers = width ? fullLayers(config, layers) : 0;
    return {
      attention: "mla", num_hidden_layers: layers, kv_lora_rank: rank, qk_rope_head_dim: rope, num_indexer_layers: indexers, index_head_dim: width,
    };
  }
  const heads = count(config, absent(config.num_key_value_heads) ? "num_attention_heads" : "num_key_value_heads");
  let width;
  if (absent(config.head_dim)) {
    const queries = count(config, "num_attention_heads");
    width = Math.floor(count(config, "hidden_size", null, queries) / queries);
  } else width = count(config, "head_dim");
  if (count(config, "v_head_dim", width, 0) !== width)
    throw new Error(`config.json: field 'v_head_dim' is ${config.v_head_dim} beside keys of ${width}; ` +
      "take a model whose keys and values are equally wide");
  return { attention: "gqa", num_hidden_layers: layers, num_key_value_heads: heads, head_dim: width };
}

/** What a model's config calls it. */
export const nameOf = (config) => (Array.isArray(config.architectures) && config.architectures[0]) || config.model_type || "pasted model";

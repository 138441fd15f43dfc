// The pieces of a transfer and its time: the closed formulas of minengine/arithmetic/moving.py, said again for the page.
// Limits and choices come with the widget (`tables`); tests hold the numbers equal, messages included.

export const COUNTS = ["tokens", "num_hidden_layers", "row_bytes", "num_indexer_layers", "indexer_bytes", "block_size"];
export const SECONDS = ["byte_s", "copy_s"];

/** One field's text of complaint, or nothing. */
export function complaint(field, value, tables) {
  const [least, most] = tables.limits[field];
  const whole = COUNTS.includes(field);
  const fits = (whole ? Number.isSafeInteger(value) : Number.isFinite(value)) && value >= least && value <= most;
  if (fits) return "";
  return `${field}${Number.isNaN(value) ? "" : `=${value}`}: use ${whole ? "a whole number" : "seconds"} from ${least} to ${most}`;
}

export const blockMajor = (layout) => layout[0] === "B";

/** The pieces of one request at a layout and a block size. */
function copies(state, layout, size) {
  const { tokens, num_hidden_layers: layers, row_bytes: row, regions_per_layer: split, num_indexer_layers: planes, indexer_bytes: key } = state;
  const blocks = Math.ceil(tokens / size);
  const token = layers * row + planes * key;
  const whole = blockMajor(layout);
  const regions = whole ? 1 : layers * split + planes;
  return {
    blocks, regions, count: blocks * regions, nbytes: blocks * size * token, used_bytes: tokens * token,
    piece_bytes: whole ? size * token : (size * row) / split, indexer_piece_bytes: whole || !planes ? 0 : size * key,
  };
}

/** What a number of bytes in a number of pieces takes, by cause. */
const times = (state, nbytes, count) => ({ bytes_s: nbytes * state.byte_s, copies_s: count * state.copy_s, time_s: nbytes * state.byte_s + count * state.copy_s });

/** All numbers of a state (the widget's traits). Throws an Error whose message names the field and the remedy. */
export function numbers(state, tables) {
  const choices = { kv_cache_layout: tables.layouts, regions_per_layer: tables.regions_per_layer };
  for (const [field, allowed] of Object.entries(choices)) {
    const shown = typeof state[field] === "string" ? `'${state[field]}'` : state[field];
    if (!allowed.includes(state[field])) throw new Error(`${field}=${shown}: use one of ${allowed.join(", ")}`);
  }
  for (const field of [...COUNTS, ...SECONDS]) {
    const text = complaint(field, state[field], tables);
    if (text) throw new Error(text);
  }
  const { num_hidden_layers: layers, num_indexer_layers: planes, block_size: size, row_bytes: row, regions_per_layer: split } = state;
  if (planes > layers) throw new Error(`num_indexer_layers=${planes}: use at most num_hidden_layers, ${layers}`);
  if ((size * row) % split)
    throw new Error(`regions_per_layer=${split}: block_size x row_bytes is ${size * row}, which they do not divide; use an even one`);
  const now = { kv_cache_layout: state.kv_cache_layout, block_size: size };
  const isSet = (one) => one.kv_cache_layout === now.kv_cache_layout && one.block_size === now.block_size;
  const settings = tables.compared.some(isSet) ? tables.compared : [...tables.compared, now];
  const compared = settings.map((one) => {
    const found = copies(state, one.kv_cache_layout, one.block_size);
    return { ...one, set: isSet(one), ...found, ...times(state, found.nbytes, found.count) };
  });
  const found = copies(state, now.kv_cache_layout, size);
  return { ...found, ...times(state, found.nbytes, found.count), merged_s: times(state, found.nbytes, found.regions).time_s, compared };
}

// Bytes, operations and floors of sparse decode attention: the closed formulas of minengine/arithmetic/kernel.py, said again for
// the page. Cards, rows and limits come with the widget (`tables`); tests hold the numbers equal.

const SLOT_BYTES = 4;
const ACTIVATION_BYTES = 2;
const OWN = "own";
const WHOLE = ["query_tokens", "heads", "top_k"];
const PEAKS = ["memory_tb_s", "matrix_tflop_s"];
const TERA = 1e12;

/** One field's text of complaint, or nothing. */
export function complaint(field, value, limits) {
  const [least, most] = limits[field];
  const whole = WHOLE.includes(field);
  const fits = (whole ? Number.isSafeInteger(value) : Number.isFinite(value)) && value >= least && value <= most;
  if (fits) return "";
  return `${field}${Number.isNaN(value) ? "" : `=${value}`}: use a ${whole ? "whole number" : "number"} from ${least} to ${most}`;
}

/** The fields that count now: a card's own peaks only where it is a reader's own. */
export const inUse = (card) => [...WHOLE, "fill", ...(card === OWN ? PEAKS : [])];

const launch = (name, parts, flops) => ({ name, parts, flops, nbytes: Object.values(parts).reduce((sum, bytes) => sum + bytes, 0) });

function launches(path, state, { rows: widths, rank, rope }) {
  const { query_tokens: queries, heads, top_k, fill } = state;
  const rows = Math.floor(queries * top_k * fill + 0.5);
  const slots = SLOT_BYTES * queries * top_k;
  const given = { queries: ACTIVATION_BYTES * queries * heads * (rank + rope), outputs: ACTIVATION_BYTES * queries * heads * rank, slots };
  const flops = 2 * rows * heads * (rank + rope + rank);
  const read = { rows: rows * widths[path] };
  if (path !== "staged") return [launch("attention", { ...read, ...given }, flops)];
  const copy = rows * widths.fp8;
  return [launch("unpack", { ...read, copy_written: copy, slots }, 0), launch("attention", { copy_read: copy, ...given }, flops)];
}

const sum = (list, field) => list.reduce((total, one) => total + one[field], 0);

/** The launches, bounds and floor of each path, and the card. Throws an Error whose message names the field and the remedy. */
export function numbers(state, tables) {
  const cards = [...tables.order.cards, OWN];
  if (!cards.includes(state.card)) throw new Error(`card='${state.card}': use one of ${cards.join(", ")}`);
  for (const field of inUse(state.card)) {
    const text = complaint(field, state[field], tables.limits);
    if (text) throw new Error(text);
  }
  const card = tables.cards[state.card] || {
    name: "your own card", memory_bytes_s: TERA * state.memory_tb_s, matrix_flops_s: TERA * state.matrix_tflop_s, source: "given",
  };
  const paths = tables.order.paths.map((path) => {
    const made = launches(path, state, tables).map((one) => {
      const [memory_s, compute_s] = [one.nbytes / card.memory_bytes_s, one.flops / card.matrix_flops_s];
      return { ...one, memory_s, compute_s, time_s: Math.max(compute_s, memory_s), bound: memory_s >= compute_s ? "memory" : "compute" };
    });
    return { path, launches: made, nbytes: sum(made, "nbytes"), flops: sum(made, "flops"), time_s: sum(made, "time_s") };
  });
  const { setting, us } = tables.reported;
  const theirs = Object.entries(setting).every(([field, value]) => state[field] === value);
  return { card, paths, reported: theirs ? us : {}, balance: card.matrix_flops_s / card.memory_bytes_s };
}

// From a card's memory to cached tokens: minengine/arithmetic/memory.py, said again for the page. What lies on a card in each topology
// comes with the widget (`tables`); tests hold the numbers equal, messages included.

const WHOLE = ["step_tokens", "session_tokens"];
const OWN = "own";
const GIVEN = "given";
const GIGA = 1e9;

/** One field's text of complaint, or nothing. */
export function complaint(field, value, limits) {
  const [least, most] = limits[field];
  const whole = WHOLE.includes(field);
  const fits = (whole ? Number.isSafeInteger(value) : Number.isFinite(value)) && value >= least && value <= most;
  if (fits) return "";
  return `${field}${Number.isNaN(value) ? "" : `=${value}`}: use a ${whole ? "whole number" : "number"} from ${least} to ${most}`;
}

/** The fields that count now: a card's own memory, and what is beside, only where a reader gives them. */
export const inUse = (state) => [...WHOLE, "untouched", ...(state.card === OWN ? ["hbm_gb"] : []), ...(state.beside === GIVEN ? ["beside_gb"] : [])];

const sum = (values) => Object.values(values).reduce((total, one) => total + one, 0);
const rounded = (value) => Math.floor(value + 0.5);
const tokenBytes = (state, { rows, layers }, row) => rows[row] + rounded(state.untouched * layers);

/** What weights and buffers leave of a card, and both of them. */
function bare(state, { weights, buffer }, hbm) {
  const buffers = buffer * state.step_tokens;
  return { weights: weights[state.weights], buffers, left: hbm - sum(weights[state.weights]) - buffers };
}

/** The share of the card that is neither weights, buffers nor cache. */
function besideShare(state, tables, hbm) {
  if (state.beside === GIVEN) {
    if (GIGA * state.beside_gb >= hbm) throw new Error(`beside_gb=${state.beside_gb}: use less than the card has, ${(hbm / GIGA).toFixed(1)} GB`);
    return (GIGA * state.beside_gb) / hbm;
  }
  const { model, topology, card, row, tokens } = tables.source;
  const theirs = tables.models[model];
  const { gpus, copies } = theirs.topologies[topology];
  const all = tables.cards[card].hbm_bytes;
  const share = (bare(state, theirs.topologies[topology], all).left - (tokens * tokenBytes(state, theirs, row) * copies) / gpus) / all;
  if (share < 0) {
    throw new Error(`weights='${state.weights}', experts='nvfp4', step_tokens=${state.step_tokens}, untouched=${Number(state.untouched.toPrecision(6))}: ` +
      `four ${card} would then not hold the ${tokens.toLocaleString("en-US")} tokens that are reported; use less, or give \`beside\``);
  }
  return share;
}

/** The values that each choice has in this state, in their order. */
export function choicesOf(state, { order }) {
  const theirs = order.model.includes(state.model) ? state.model : order.model[0];
  return { model: order.model, topology: order.topology[theirs], card: [...order.card, OWN], kv_cache_dtype: order.kv_cache_dtype[theirs],
    weights: order.weights, beside: ["solved", GIVEN] };
}

/** The card, and the ladder of each topology that the model can have. Throws an Error whose message names the field and the remedy. */
export function numbers(state, tables) {
  const choices = choicesOf(state, tables);
  for (const [field, allowed] of Object.entries(choices)) {
    const none = field in tables.order && !Array.isArray(tables.order[field]) ? `${state.model} has none; ` : "";
    if (!allowed.includes(state[field])) throw new Error(`${field}='${state[field]}': ${none}use one of ${allowed.join(", ")}`);
  }
  for (const field of inUse(state)) {
    const text = complaint(field, state[field], tables.limits);
    if (text) throw new Error(text);
  }
  const own = tables.models[state.model];
  const card = tables.cards[state.card] || { name: "your own card", hbm_bytes: Math.trunc(GIGA * state.hbm_gb) };
  const hbm = card.hbm_bytes;
  const beside = rounded(besideShare(state, tables, hbm) * hbm);
  const token = tokenBytes(state, own, state.kv_cache_dtype);
  const compared = choices.topology.map((name) => {
    const { gpus, copies } = own.topologies[name];
    const { weights, buffers, left: above } = bare(state, own.topologies[name], hbm);
    const left = above - beside;
    const tokens = Math.floor((Math.max(0, left) * gpus) / (token * copies));
    const sessions = Math.floor(tokens / state.session_tokens);
    return { name, gpus, copies, weights, weight_bytes: sum(weights), buffers, beside, left, token, tokens, sessions };
  });
  return { card, compared, now: compared.find(({ name }) => name === state.topology) };
}

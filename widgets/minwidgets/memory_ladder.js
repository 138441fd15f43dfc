// Memory ladder: the controls, the numbers and the table around the drawing of a card and of what topologies cache.
import { binding } from "./binding.js";
import { blank, choice, freshId, make, numberField, showNumber, stat, tableBelow, thousands } from "./controls.js";
import { GROUPS, cardsOf, copiesOf, ladderDrawing } from "./memory_drawing.js";
import { choicesOf, complaint, inUse, numbers } from "./memory_formulas.js";
import { digits, spokenBytes } from "./units.js";

const LABELS = {
  hbm_gb: "Memory of the card, GB", beside_gb: "Everything else, GB", step_tokens: "Tokens of a step", session_tokens: "Tokens of a session",
  untouched: "More bytes a token and layer",
};
const SLIDERS = { step_tokens: [512, 16384, 512], session_tokens: [1000, 1_000_000, 1000], untouched: [0, 200, 1] };
const ALONE = "TP1";
const OTHER_ROW = { nvfp4: "nvfp4_fp8_ds_mla", nvfp4_fp8_ds_mla: "nvfp4" }; // four bits of the other model
const FIELDS = ["model", "topology", "card", "kv_cache_dtype", "weights", "beside", ...Object.keys(LABELS)];

const spokenTopology = (name) => (name === ALONE ? "one GPU" : name);
const spokenTokens = (count) => (count >= 999_500 ? `${digits(count / 1e6)}\u00a0million` : thousands(count));

function render({ model, el }) {
  const id = freshId("ml");
  const tables = model.get("tables");
  const { source, reported, order } = tables;
  const root = make("section", { class: "rb ml", "aria-label": "Memory ladder" });
  const { drafts, change, resetButton, watch } = binding(model, FIELDS, () => update());
  const state = () => Object.fromEntries(FIELDS.map((field) => [field, model.get(field)]));
  const theirModel = () => model.get("model") === source.model;
  /** The time of a token: as reported, and as the simulator has it. */
  function timesOf(name) {
    const [stated, simulated] = theirModel() ? [reported.itl_ms[name], tables.simulated_ms[name]] : [];
    return { stated: stated && `${stated.toFixed(2)}\u00a0ms`, simulated: simulated && `${simulated.toFixed(2)}\u00a0ms` };
  }
  function tokenTime(name) {
    const { stated, simulated } = timesOf(name);
    return stated ? `${stated} reported` : simulated ? `${simulated} simulated` : "";
  }

  const heading = make("p", { class: "rb-heading" });
  const frame = make("div", { class: "rb-drawing" });
  const drawing = ladderDrawing(frame, { bytes: spokenBytes, tokens: spokenTokens, topology: spokenTopology, token: tokenTime });
  const key = make("p", { class: "rb-key" }, make("span", {}, make("i", { "aria-hidden": "true" }), "reported"));
  const message = make("p", { class: "rb-message", role: "alert", id: `${id}-message` });
  const stats = { left: stat("left for the cache, a card"), copies: stat("of each row"), tokens: stat("tokens cached"), itl: stat("a decoded token") };
  const live = make("p", { class: "rb-hidden", "aria-live": "polite" });
  const why = make("p", { class: "ml-why" });
  const theirs = make("p", { class: "ml-theirs" });

  // --- the controls
  const texts = (names, text = (name) => name) => Object.fromEntries(names.map((name) => [name, text(name)]));
  const ofAny = (lists) => [...new Set(order.model.flatMap((name) => lists[name]))];
  const cardName = (name) => tables.cards[name]?.name || "your own";
  const sets = {
    model: choice(`${id}-model`, "Model", texts(order.model), (name) => change(ofModel(name))),
    topology: choice(`${id}-topology`, "Topology", texts(ofAny(order.topology), spokenTopology), (name) => change({ topology: name })),
    card: choice(`${id}-card`, "Card", texts([...order.card, "own"], cardName), (name) => change({ card: name })),
    kv_cache_dtype: choice(`${id}-row`, "Format of a row (kv_cache_dtype)", texts(ofAny(order.kv_cache_dtype)), (name) => change({ kv_cache_dtype: name })),
    weights: choice(`${id}-weights`, "Weights (weights); routed experts have 4 bits in any", texts(order.weights), (name) => change({ weights: name })),
    beside: choice(`${id}-beside`, "Everything else (beside)", { solved: "as the source’s decoder", given: "given" }, (name) => change({ beside: name })),
  };

  /** Another model takes the row and the topology with it, or the closest that it has. */
  function ofModel(name) {
    const [row, shape] = [model.get("kv_cache_dtype"), model.get("topology")];
    return { model: name, kv_cache_dtype: order.kv_cache_dtype[name].includes(row) ? row : OTHER_ROW[row],
      topology: order.topology[name].includes(shape) ? shape : ALONE };
  }
  function take(field, input) {
    const value = input.value.trim() === "" ? NaN : Number(input.value);
    const wrong = complaint(field, value, tables.limits);
    if (!wrong) {
      change({ [field]: value });
      return;
    }
    drafts.set(field, wrong);
    update();
  }
  const inputs = {};
  for (const [field, label] of Object.entries(LABELS)) {
    const [least, most] = tables.limits[field];
    const whole = field.endsWith("_tokens");
    inputs[field] = numberField({
      id: `${id}-${field}`, label, field, slider: SLIDERS[field], inputmode: "decimal", "aria-describedby": message.id, min: least, max: most,
      step: whole ? 1 : "any",
    }, take);
  }
  const fields = make("div", { class: "rb-fields" }, ...Object.values(inputs).map(({ node }) => node));
  const from = make("p", { class: "rb-fine" });
  const terms = make("p", { class: "rb-fine" }, "Weights are counted by the engine’s own rule from config.json, of the card that has most. Buffers hold " +
    "what the experts of a card may have to take in and give back in one step, whoever chooses them. Scales of whole tensors, and a layer for " +
    "drafting tokens, are left out. Times of a token are means at 64 sessions on GB200, with DCP of a run by itself; " +
    "simulated ones follow from the costs of a step, solved from those of TP4 and DEP8.");

  // --- the same in a table
  const columns = ["topology", "GPUs", "copies", "experts", "attention", "other weights", "buffers", "everything else", "left for the cache", "tokens",
    "sessions", "a token, reported", "a token, simulated"];
  const table = tableBelow("Every topology in a table, bytes of a card", columns);
  function fill(compared) {
    table.body.replaceChildren(...compared.map((one) => {
      const weights = Object.keys(GROUPS).map((group) => one.weights[group]);
      const cells = [one.gpus, one.copies, ...weights, one.buffers, one.beside, one.left, one.tokens, one.sessions];
      const { stated = "", simulated = "" } = timesOf(one.name);
      return make("tr", {}, make("th", { scope: "row" }, spokenTopology(one.name)),
        ...[...cells.map(thousands), stated, simulated].map((cell) => make("td", {}, cell)));
    }));
  }

  // --- everything as the model has it now
  const ratio = (compared) => {
    const [dep, tep] = ["DEP8", "TEP8"].map((wanted) => compared.find(({ name }) => name === wanted));
    return dep && tep?.tokens ? { dep, tep, times: dep.tokens / tep.tokens } : null;
  };
  function tellWhy({ compared }) {
    const found = ratio(compared);
    if (!found) return "";
    const { dep, tep, times } = found;
    return `DEP8 caches ${digits(times)} times the tokens of TEP8, not ${digits(tep.copies / dep.copies)}: a card of it holds ` +
      `${spokenBytes(dep.weight_bytes)} of weights and ${spokenBytes(dep.buffers)} of buffers, one of TEP8 ` +
      `${spokenBytes(tep.weight_bytes)} and ${spokenBytes(tep.buffers)}.`;
  }
  const atTheirs = (now) => now.model === source.model && now.card === source.card && now.beside === "solved";
  function tellTheirs({ compared }, now) {
    if (!atTheirs(now)) return "";
    const stated = reported.tokens[now.kv_cache_dtype];
    const prefix = `Reported: about ${reported.times} times.`;
    if (!stated) return prefix;
    const capacity = `${prefix} And on ${source.topology} ${spokenTokens(stated)} tokens`;
    if (now.kv_cache_dtype === source.row) return `${capacity}, from which everything else is solved.`;
    const decoder = compared.find(({ name }) => name === source.topology);
    const more = 100 * (decoder.tokens / stated - 1);
    if (Math.abs(more) < 0.1) return `${capacity}, as here.`;
    const excess = ((decoder.tokens - stated) * decoder.token * decoder.copies) / decoder.gpus;
    const remedy = more > 0 && !now.untouched ? ` ${digits(source.missing)} more bytes a token and layer would take them away, ` +
      `or ${spokenBytes(excess)} of each card.` : "";
    return `${capacity}; here they are ${digits(Math.abs(more))}\u00a0% ${more > 0 ? "more" : "fewer"}.${remedy}`;
  }
  function show(result, now) {
    const { card, compared, now: chosen } = result;
    const stated = atTheirs(now) && reported.tokens[now.kv_cache_dtype] ? { [source.topology]: reported.tokens[now.kv_cache_dtype] } : {};
    frame.hidden = false;
    key.hidden = !Object.keys(stated).length;
    heading.replaceChildren(make("strong", {}, now.model), " on ", make("strong", {}, chosen.gpus === 1 ? card.name : `${chosen.gpus} × ${card.name}`),
      `, ${spokenTopology(chosen.name)}`);
    drawing.draw(result, stated, Math.max(frame.clientWidth, 200));
    const short = chosen.left < 0;
    stats.left.value.textContent = short ? `−${spokenBytes(-chosen.left)}` : spokenBytes(chosen.left);
    stats.left.detail.textContent = `of ${spokenBytes(card.hbm_bytes)}; weights ${spokenBytes(chosen.weight_bytes)}`;
    stats.copies.value.textContent = copiesOf(chosen);
    stats.copies.detail.textContent = `on ${cardsOf(chosen)}; a token is ${thousands(chosen.token)} bytes`;
    stats.tokens.value.textContent = short ? "none" : spokenTokens(chosen.tokens);
    stats.tokens.detail.textContent = `${thousands(chosen.sessions)} sessions of ${thousands(now.session_tokens)}`;
    const { stated: itl, simulated } = timesOf(chosen.name);
    const beside = tables.fitted.includes(chosen.name) ? "; the simulator is fitted to it" : simulated ? `; simulated ${simulated}` : "";
    stats.itl.value.textContent = itl || simulated || "–";
    stats.itl.detail.textContent = itl ? `reported, GB200${beside}` : simulated ? "simulated, GB200; not reported" : "not known here";
    why.textContent = tellWhy(result);
    theirs.textContent = tellTheirs(result, now);
    const here = now.card === source.card;
    const solved = `${here ? "reasoned" : "assumed"}: what ${thousands(source.tokens)} tokens of 8-bit rows on ${source.topology} (reported) leave of a ` +
      `${tables.cards[source.card].name}${here ? "." : ", taken over."}`;
    const share = digits((100 * chosen.beside) / card.hbm_bytes);
    from.textContent = `Everything else: ${share}\u00a0% of the card, ${now.beside === "given" ? "as given." : solved}`;
    live.textContent = `${spokenTopology(chosen.name)}: ${short ? "does not fit" : `${spokenBytes(chosen.left)} a card for the cache`}, ${copiesOf(chosen)}, ` +
      `${spokenTokens(chosen.tokens)} tokens, ${thousands(chosen.sessions)} sessions.`;
    fill(compared);
  }
  function refuse(text) {
    message.textContent = text;
    for (const told of [live, why, theirs, from]) told.textContent = "";
    heading.textContent = "A card’s memory";
    drawing.clear();
    frame.hidden = key.hidden = true;
    blank(stats);
    fill([]);
  }
  function update() {
    const now = state();
    const used = inUse(now);
    const allowed = choicesOf(now, tables);
    for (const [field, set] of Object.entries(sets)) set.show(now[field], allowed[field]);
    for (const [field, control] of Object.entries(inputs)) {
      control.node.hidden = !used.includes(field);
      showNumber(control, now[field], drafts.has(field));
    }
    const draft = used.map((field) => drafts.get(field)).find(Boolean);
    message.textContent = "";
    try {
      if (draft) throw new Error(draft);
      show(numbers(now, tables), now);
    } catch (error) {
      refuse(error.message);
    }
  }

  root.append(make("div", { class: "rb-top" }, heading, resetButton()), frame, key, message,
    make("div", { class: "rb-stats" }, make("dl", {}, ...Object.values(stats).map((entry) => entry.node))), live, why, theirs,
    make("div", { class: "rb-controls" }, ...Object.values(sets).map(({ set }) => set), fields), from, terms, table.node);
  el.append(root);
  update();
  return watch(frame);
}

export default { render, linked: FIELDS };

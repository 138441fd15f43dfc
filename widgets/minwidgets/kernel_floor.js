// Kernel floor: the controls, the numbers and the table around the drawing of bytes and times.
import { binding } from "./binding.js";
import { blank, choice, freshId, make, numberField, showNumber, stat, tableBelow, thousands } from "./controls.js";
import { NAMES, PARTS, floorDrawing, split } from "./kernel_drawing.js";
import { complaint, inUse, numbers } from "./kernel_formulas.js";
import { digits, inUnits, spokenBytes, spokenShort } from "./units.js";

const LABELS = {
  query_tokens: "Query tokens", heads: "Heads of this rank", top_k: "Slots of a query", fill: "Share that hold a row",
  memory_tb_s: "Memory, TB/s", matrix_tflop_s: "Matrix units, TFLOP/s",
};
const SLIDERS = { query_tokens: [1, 256, 1], heads: [8, 128, 8], top_k: [64, 4096, 64], fill: [0, 1, 0.01] };
const STEP = { fill: 0.01, memory_tb_s: "any", matrix_tflop_s: "any" };
const FIELDS = ["card", ...Object.keys(LABELS)];

const spokenFlops = (flops) => inUnits(flops, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]);

/** `memory-bound`, or of two launches that differ `memory, then compute`. */
function spokenBound({ launches }) {
  const kinds = [...new Set(launches.map(({ bound }) => bound))];
  return kinds.length === 1 ? `${kinds[0]}-bound` : kinds.join(", then ");
}

function render({ model, el }) {
  const id = freshId("kf");
  const tables = model.get("tables");
  const root = make("section", { class: "rb kf", "aria-label": "Kernel floor" });
  const { drafts, change, resetButton, watch } = binding(model, FIELDS, () => update());
  const state = () => Object.fromEntries(FIELDS.map((field) => [field, model.get(field)]));

  const heading = make("p", { class: "rb-heading" });
  const frame = make("div", { class: "rb-drawing" });
  const drawing = floorDrawing(frame, { bytes: spokenBytes, time: spokenShort, bound: spokenBound });
  const swatch = ([kind, text]) => make("span", {}, make("i", { class: `kf-swatch kf-swatch-${kind}`, "aria-hidden": "true" }), text);
  const diamond = swatch(["reported", "reported"]);
  const key = make("div", { class: "kf-keys" }, make("p", { class: "rb-key" }, make("span", {}, "Bytes:"), ...PARTS.map(swatch)),
    make("p", { class: "rb-key" }, make("span", {}, "Time:"),
      ...[["memory", "of the bytes"], ["compute", "of the operations"], ["floor", "the floor: the longer"]].map(swatch), diamond));
  const message = make("p", { class: "rb-message", role: "alert", id: `${id}-message` });
  const stats = Object.fromEntries(tables.order.paths.map((path) => [path, stat(`${NAMES[path]}: floor`)]));
  const live = make("p", { class: "rb-hidden", "aria-live": "polite" });
  const why = make("p", { class: "kf-why" });
  const theirs = make("p", { class: "kf-theirs" });

  // --- the controls
  const cardNames = { ...Object.fromEntries(tables.order.cards.map((name) => [name, tables.cards[name].name])), own: "your own" };
  const card = choice(`${id}-card`, "Card", cardNames, (name) => change({ card: name }));
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
    inputs[field] = numberField({
      id: `${id}-${field}`, label, field, slider: SLIDERS[field], inputmode: "decimal", "aria-describedby": message.id,
      min: least, max: most, step: STEP[field] || 1,
    }, take);
  }
  const fields = make("div", { class: "rb-fields" }, ...Object.values(inputs).map(({ node }) => node));
  const source = make("p", { class: "rb-fine" });
  const terms = make("p", { class: "rb-fine" }, "A floor, not a forecast: of each launch either its bytes at the memory’s peak or its operations at the peak of the matrix " +
    "units on 16-bit values, whichever takes longer; staged adds its two launches. No row is assumed to serve two queries: where the L2 cache still " +
    "holds it, less moves. A slot of −1 costs its 4 bytes in the list and nothing else.");

  // --- the same in a table
  const columns = ["path", "launch", ...PARTS.map(([, text]) => text), "bytes", "FLOP", "bytes take", "operations take", "bound by"];
  const table = tableBelow("Each launch in a table", columns);
  function fill(paths) {
    table.body.replaceChildren(...paths.flatMap(({ path, launches }) => launches.map((one) => {
      const cells = [one.name, ...Object.values(split({ launches: [one] })).map(thousands), thousands(one.nbytes), thousands(one.flops),
        spokenShort(one.memory_s), spokenShort(one.compute_s), one.bound];
      return make("tr", {}, make("th", { scope: "row" }, NAMES[path]), ...cells.map((cell) => make("td", {}, cell)));
    })));
  }

  // --- everything as the model has it now
  function tellWhy({ paths: [native], balance }) {
    const [{ flops, nbytes, bound }] = native.launches;
    const word = bound === "memory" ? "so its memory decides" : "so its matrix units decide";
    return `The native path does ${digits(flops / nbytes)} operations for each byte that it moves; in the time of a byte this card can do ${digits(balance)}, ${word}. ` +
      "All heads work on the same rows, so each more adds operations and hardly any bytes.";
  }
  function tellTheirs({ paths, reported }) {
    const found = paths.filter(({ path }) => reported[path]).map(({ path, time_s }) =>
      `${NAMES[path]} ${reported[path].toFixed(1)}\u00a0µs, of which the floor is ${digits((100 * 1e6 * time_s) / reported[path])}\u00a0%`);
    return found.length ? `Reported for 15 query tokens on a GB200 (16 heads and full lists are this book’s reading): ${found.join("; ")}. ` +
      "A launch this short is mostly what a floor leaves out: its start, and waiting for rows to arrive." : "";
  }
  function show(result, now) {
    const full = now.fill < 1 ? `, ${digits(100 * now.fill)}\u00a0% of them rows` : "";
    heading.replaceChildren("One launch, one layer: ", make("strong", {}, `${thousands(now.query_tokens)} queries × ${thousands(now.heads)} heads × ${thousands(now.top_k)} slots`), full);
    frame.hidden = key.hidden = false;
    drawing.draw(result, Math.max(frame.clientWidth, 200));
    diamond.hidden = Object.keys(result.reported).length === 0;
    for (const one of result.paths) {
      stats[one.path].value.textContent = spokenShort(one.time_s);
      stats[one.path].detail.textContent = `${spokenBound(one)}; ${spokenBytes(one.nbytes)}, ${spokenFlops(one.flops)}`;
    }
    why.textContent = tellWhy(result);
    theirs.textContent = tellTheirs(result);
    const { name, memory_bytes_s, matrix_flops_s, source: from } = result.card;
    const peaks = `${digits(memory_bytes_s / 1e12)} TB/s, ${digits(matrix_flops_s / 1e12)} TFLOP/s`;
    source.textContent = now.card === "own" ? `Your own card: ${peaks}, as you gave them.` : `${name}: ${peaks} (reported: ${from}).`;
    live.textContent = `Floors: ${result.paths.map((one) => `${NAMES[one.path]} ${spokenShort(one.time_s)}, ${spokenBound(one)}`).join("; ")}.`;
    fill(result.paths);
  }
  function refuse(text) {
    message.textContent = text;
    for (const told of [live, why, theirs, source]) told.textContent = "";
    heading.textContent = "One launch, one layer";
    drawing.clear();
    frame.hidden = key.hidden = true;
    blank(stats);
    fill([]);
  }
  function update() {
    const now = state();
    const used = inUse(now.card);
    card.show(now.card, Object.keys(cardNames));
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
    make("div", { class: "rb-controls" }, card.set, fields), source, terms, table.node);
  el.append(root);
  update();
  return watch(frame);
}

export default { render, linked: FIELDS };

// Copy count: the controls, the numbers and the table around the drawing of a block in memory and of times.
import { binding } from "./binding.js";
import { blank, choice, freshId, make, numberField, showNumber, stat, tableBelow, thousands } from "./controls.js";
import { copyDrawing } from "./copy_drawing.js";
import { COUNTS, SECONDS, blockMajor, complaint, numbers } from "./copy_formulas.js";
import { digits, spokenBytes, spokenShort } from "./units.js";

const LABELS = {
  tokens: "Tokens", num_hidden_layers: "Layers", block_size: "Tokens of a block", row_bytes: "Bytes of a row", indexer_bytes: "Bytes of a key",
  byte_s: "Bandwidth, GB/s", copy_s: "Cost of a copy, µs",
};
const SLIDERS = { tokens: [1000, 1_000_000, 1000], block_size: [16, 2048, 16] };
// What the boxes show of a trait, and the trait of what they hold.
const SHOWN = {
  byte_s: { show: (seconds) => Number((1e-9 / seconds).toPrecision(4)), read: (rate) => 1e-9 / rate },
  copy_s: { show: (seconds) => Number((1e6 * seconds).toPrecision(4)), read: (us) => us / 1e6 },
};
const FIELDS = ["kv_cache_layout", "regions_per_layer", ...COUNTS, ...SECONDS];

const spokenTime = (seconds) => (seconds === 0 ? "0\u00a0ms" : spokenShort(seconds));

function render({ model, el }) {
  const id = freshId("cc");
  const tables = model.get("tables");
  const initial = model.get("initial");
  const root = make("section", { class: "rb cc", "aria-label": "Copy count" });
  const { drafts, change, resetButton, watch } = binding(model, FIELDS, () => update());
  const state = () => Object.fromEntries(FIELDS.map((field) => [field, model.get(field)]));

  const heading = make("p", { class: "rb-heading" });
  const frame = make("div", { class: "rb-drawing" });
  const drawing = copyDrawing(frame, { bytes: spokenBytes, time: spokenTime });
  const swatch = ([kind, text]) => make("span", {}, make("i", { class: `cc-swatch-${kind}`, "aria-hidden": "true" }), text);
  const keysKey = swatch(["keys", "its indexer keys"]);
  const key = make("p", { class: "rb-key" }, ...[["rows", "rows of one block"]].map(swatch), keysKey, ...[["bytes", "time of the bytes"], ["copies", "time of the copies"]].map(swatch));
  const message = make("p", { class: "rb-message", role: "alert", id: `${id}-message` });
  const stats = { copies: stat("copies"), each: stat("bytes a copy"), moved: stat("moved in all"), time: stat("estimated time") };
  const live = make("p", { class: "rb-hidden", "aria-live": "polite" });
  const merged = make("p", { class: "cc-merged" });
  const source = make("p", { class: "rb-fine" });
  const terms = make("p", { class: "rb-fine" }, "Whole blocks move, the last one as if it were full. A copy is a descriptor before merging: its bytes are contiguous " +
    "on both sides. The time is linear, bytes × seconds a byte + copies × seconds a copy; a real link may overlap the two.");

  // --- the controls
  const layout = choice(`${id}-layout`, "Layout (kv_cache_layout): L layer, B block, H head, N token, C channel",
    Object.fromEntries(tables.layouts.map((name) => [name, name])), (name) => change({ kv_cache_layout: name }));
  const regions = choice(`${id}-regions`, "Regions a layer (regions_per_layer), where layers are outermost",
    Object.fromEntries(tables.regions_per_layer.map((n) => [n, n === 1 ? "1 tensor" : `${n} tensors`])), (n) => change({ regions_per_layer: Number(n) }));
  const planeCounts = [...new Set([...tables.indexer_layers, initial.num_indexer_layers])].sort((one, other) => one - other);
  const planes = choice(`${id}-planes`, "Indexer keys (num_indexer_layers)",
    Object.fromEntries(planeCounts.map((n) => [n, n ? `on ${n} layers` : "left out"])), (n) => change({ num_indexer_layers: Number(n) }));

  const ends = (field) => tables.limits[field].map(SHOWN[field].show).sort((one, other) => one - other);
  const valueOf = (field, input) => (SHOWN[field]?.read ?? Number)(input.value.trim() === "" ? NaN : Number(input.value));
  function take(field, input) {
    const value = valueOf(field, input);
    let wrong = complaint(field, value, tables);
    if (!wrong) {
      change({ [field]: value });
      return;
    }
    if (field in SHOWN) { // in the box's own unit
      const [least, most] = ends(field);
      wrong = `${LABELS[field]}${input.value.trim() === "" ? "" : ` (${input.value})`}: use a number from ${least} to ${most}`;
    }
    drafts.set(field, wrong);
    update();
  }
  const inputs = {};
  for (const field of Object.keys(LABELS)) {
    const [least, most] = field in SHOWN ? ends(field) : tables.limits[field];
    inputs[field] = numberField({
      id: `${id}-${field}`, label: LABELS[field], field, slider: SLIDERS[field], inputmode: "decimal", "aria-describedby": message.id,
      min: field === "block_size" ? 0 : least, max: most, step: field in SHOWN ? "any" : field === "block_size" ? 16 : 1,
    }, take);
  }
  const fields = make("div", { class: "rb-fields" }, ...Object.values(inputs).map(({ node }) => node));

  // --- the same in a table
  const table = tableBelow("The settings in a table", ["layout", "tokens of a block", "copies", "time of bytes", "time of copies", "estimated time"]);
  function fill(compared) {
    table.body.replaceChildren(...compared.map((one) => make("tr", {}, make("th", { scope: "row" }, one.kv_cache_layout),
      ...[thousands(one.block_size), thousands(one.count), spokenTime(one.bytes_s), spokenTime(one.copies_s), spokenTime(one.time_s)]
        .map((cell) => make("td", {}, cell)))));
  }

  // --- everything as the model has it now
  function show(result, now) {
    const whole = blockMajor(now.kv_cache_layout);
    frame.hidden = key.hidden = false;
    keysKey.hidden = now.num_indexer_layers === 0;
    drawing.draw(result, now, Math.max(frame.clientWidth, 200));
    heading.replaceChildren(make("strong", {}, `${thousands(now.tokens)} tokens`), `, ${thousands(now.num_hidden_layers)} layers, `,
      make("strong", {}, now.kv_cache_layout), `, blocks of ${thousands(now.block_size)} `, make("span", { class: "cc-badge" }, "formula"));
    stats.copies.value.textContent = thousands(result.count);
    stats.copies.detail.textContent = `${thousands(result.blocks)} blocks × ${thousands(result.regions)}`;
    stats.each.value.textContent = spokenBytes(result.piece_bytes);
    const keys = `${thousands(now.num_indexer_layers)} keys × ${thousands(now.indexer_bytes)}`;
    const row = whole ? `(${thousands(now.num_hidden_layers)} layers × ${thousands(now.row_bytes)}${now.num_indexer_layers ? ` + ${keys}` : ""})`
      : `${thousands(now.row_bytes)}${now.regions_per_layer > 1 ? ` / ${now.regions_per_layer}` : ""}`;
    const beside = result.indexer_piece_bytes ? `; of keys ${spokenBytes(result.indexer_piece_bytes)}` : "";
    stats.each.detail.textContent = `${thousands(now.block_size)} tokens × ${row}${beside}`;
    stats.moved.value.textContent = spokenBytes(result.nbytes);
    const waste = 100 * (1 - result.used_bytes / result.nbytes);
    stats.moved.detail.textContent = waste ? `${digits(waste)}\u00a0% of it the unfilled end of the last block` : "no block is partly filled";
    stats.time.value.textContent = spokenTime(result.time_s);
    stats.time.detail.textContent = `bytes ${spokenTime(result.bytes_s)}, copies ${spokenTime(result.copies_s)}`;
    merged.textContent = result.count === result.regions ? "One block alone: there is nothing to merge." :
      `Blocks that are neighbours on both sides merge: of ${thousands(result.count)} copies ${thousands(result.regions)} would be left if all blocks lay in a row, ` +
      `and the estimate would be ${spokenTime(result.merged_s)}.`;
    const own = SECONDS.some((field) => now[field] !== initial[field]);
    source.textContent = `${digits(1e-9 / now.byte_s)} GB/s and ${digits(1e6 * now.copy_s)} µs a copy: ` +
      `${own ? "as set here" : model.get("cost_source")}.`;
    live.textContent = `${thousands(result.count)} copies of ${spokenBytes(result.piece_bytes)}, ${spokenBytes(result.nbytes)} in all, about ${spokenTime(result.time_s)}.`;
    fill(result.compared);
  }
  function refuse(text) {
    message.textContent = text;
    for (const told of [live, merged, source]) told.textContent = "";
    heading.textContent = "Copies of one request";
    drawing.clear();
    frame.hidden = key.hidden = true;
    blank(stats);
    fill([]);
  }
  function update() {
    const now = state();
    layout.show(now.kv_cache_layout, tables.layouts);
    regions.show(String(now.regions_per_layer), tables.regions_per_layer.map(String));
    planes.show(String(now.num_indexer_layers), planeCounts.map(String));
    for (const [field, control] of Object.entries(inputs)) {
      if (field === "indexer_bytes") control.node.hidden = now.num_indexer_layers === 0;
      const typed = field in SHOWN && valueOf(field, control.input) === now[field]; // leave its digits as they were typed
      showNumber(control, typed ? Number(control.input.value) : SHOWN[field] ? SHOWN[field].show(now[field]) : now[field], drafts.has(field));
    }
    const draft = [...drafts].find(([field]) => !inputs[field].node.hidden);
    message.textContent = "";
    try {
      if (draft) throw new Error(draft[1]);
      show(numbers(now, tables), now);
    } catch (error) {
      refuse(error.message);
    }
  }

  root.append(make("div", { class: "rb-top" }, heading, resetButton()), frame, key, message,
    make("div", { class: "rb-stats" }, make("dl", {}, ...Object.values(stats).map((entry) => entry.node))), live, merged,
    make("div", { class: "rb-controls" }, layout.set, regions.set, planes.set, fields), source, terms, table.node);
  el.append(root);
  update();
  const stop = watch(frame);
  model.on("change:cost_source", update);
  return () => {
    stop();
    model.off("change:cost_source", update);
  };
}

export default { render, linked: FIELDS };

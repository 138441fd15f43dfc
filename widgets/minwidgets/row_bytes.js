// KV row bytes: the controls, the numbers, and the paste box around the drawing of a row.
import { FORMATS, LIMITS, complaint, fromConfig, nameOf, numbers } from "./row_formulas.js";
import { binding } from "./binding.js";
import { blank, choice, freshId, make, numberField, showNumber, stat, thousands } from "./controls.js";
import { rowDrawing } from "./row_drawing.js";

const GB = 1e9;
const SHAPE = { // fields that make the model; another kind of attention shows others
  mla: ["kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers", "num_indexer_layers", "index_head_dim"],
  gqa: ["num_key_value_heads", "head_dim", "num_hidden_layers"],
};
const LABELS = {
  kv_lora_rank: "Latent width", qk_rope_head_dim: "Rope width", num_hidden_layers: "Layers", num_indexer_layers: "Layers with an indexer",
  index_head_dim: "Indexer key width", num_key_value_heads: "Key/value heads", head_dim: "Head width",
  tokens: "Tokens in a session", kv_cache_memory_bytes: "Cache memory, GB",
};
const STEP = { kv_lora_rank: 16, head_dim: 16, index_head_dim: 16, qk_rope_head_dim: 16 };
const SLIDERS = { tokens: [1000, 1_000_000, 1000], kv_cache_memory_bytes: [1, 400, 1] }; // least, most, step, as shown
const ATTENTION = { mla: "MLA latent", gqa: "Grouped heads" };
const CLOSEST = { nvfp4_fp8_ds_mla: "nvfp4", fp8_ds_mla: "fp8", nvfp4: "nvfp4_fp8_ds_mla", q4_0: "nvfp4_fp8_ds_mla", q8_0: "fp8" };
const FIELDS = ["attention", "kv_cache_dtype", "model_name", ...Object.keys(LIMITS)];

const shownUnit = (field) => (field === "kv_cache_memory_bytes" ? GB : 1);

function short(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB", "PB", "EB", "ZB"];
  let value = Number(bytes);
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1000;
  return unit ? `${value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${units[unit]}` : `${value} bytes`;
}

function render({ model, el }) {
  const id = freshId("rb");
  const root = make("section", { class: "rb", "aria-label": "KV row bytes" });
  const { drafts, change, resetButton, watch } = binding(model, FIELDS, () => update());
  const state = () => Object.fromEntries(FIELDS.map((field) => [field, model.get(field)]));
  const reset = resetButton(() => {
    said.textContent = "";
  });

  // --- the drawing and the numbers
  const heading = make("p", { class: "rb-heading" });
  const frame = make("div", { class: "rb-drawing" });
  const drawing = rowDrawing(frame);
  const message = make("p", { class: "rb-message", role: "alert" });
  const stats = { row: stat("bytes a row"), token: stat("bytes a token"), session: stat("a session"), sessions: stat("sessions held") };
  const live = make("p", { class: "rb-hidden", "aria-live": "polite" });

  // --- the controls
  const attention = choice(`${id}-attention`, "Attention", ATTENTION, (kind) => change(ofKind(kind)));
  const names = Object.fromEntries([...FORMATS.mla, ...FORMATS.gqa].map((name) => [name, name]));
  const format = choice(`${id}-format`, "Format of a row (kv_cache_dtype)", names, (name) => change({ kv_cache_dtype: name }));

  /** Another kind of attention takes the format with it, or the closest that it has. */
  function ofKind(kind) {
    const now = model.get("kv_cache_dtype");
    const name = kind === model.get("attention") ? model.get("model_name") : "";
    return { attention: kind, model_name: name, kv_cache_dtype: FORMATS[kind].includes(now) ? now : CLOSEST[now] || "bfloat16" };
  }

  function take(field, input) {
    const given = input.value.trim() === "" ? NaN : Number(input.value);
    const value = shownUnit(field) === 1 ? given : Math.round(given * shownUnit(field));
    const wrong = complaint(field, value);
    if (!wrong) {
      change(SHAPE.mla.concat(SHAPE.gqa).includes(field) ? { [field]: value, model_name: "" } : { [field]: value });
      return;
    }
    drafts.set(field, Number.isNaN(value) ? wrong.replace("=NaN", "") : wrong);
    update();
  }

  const inputs = {};
  function number(field) {
    const [least, most] = LIMITS[field];
    const unit = shownUnit(field);
    inputs[field] = numberField({
      id: `${id}-${field}`, label: LABELS[field], field, slider: SLIDERS[field], inputmode: "decimal", "aria-describedby": `${id}-message`,
      min: STEP[field] || unit > 1 ? 0 : least, max: most / unit, step: STEP[field] || (unit > 1 ? "any" : 1), // steps count from min
    }, take);
    return inputs[field].node;
  }
  const shape = make("div", { class: "rb-fields" }, ...[...new Set([...SHAPE.mla.slice(0, 2), ...SHAPE.gqa, ...SHAPE.mla])].map(number));
  const load = make("div", { class: "rb-fields rb-wide" }, number("tokens"), number("kv_cache_memory_bytes"));

  // --- a pasted config.json
  const placeholder = '{ "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128, … }';
  const box = make("textarea", { id: `${id}-config`, rows: 5, spellcheck: "false", placeholder });
  const use = make("button", { type: "button", class: "rb-button" }, "Show its row");
  const said = make("p", { class: "rb-said", role: "status" });
  function read() {
    try {
      let config;
      try {
        config = JSON.parse(box.value);
      } catch (error) {
        throw new Error(`config.json: this is not JSON (${error.message}); paste the whole file, from { to }`);
      }
      if (config === null || typeof config !== "object" || Array.isArray(config)) throw new Error("config.json: paste one JSON object, from { to }");
      const fields = fromConfig(config);
      const next = { ...ofKind(fields.attention), ...fields, model_name: String(nameOf(config)) };
      numbers({ ...state(), ...next });
      drafts.clear();
      change(next);
      said.textContent = `Read ${next.model_name}: ${ATTENTION[fields.attention]}, ${fields.num_hidden_layers} layers.`;
      said.classList.remove("rb-bad");
    } catch (error) {
      said.textContent = `${error.message}. Nothing was changed.`;
      said.classList.add("rb-bad");
    }
  }
  use.addEventListener("click", read);
  box.addEventListener("input", (event) => event.inputType === "insertFromPaste" && read());
  const paste = make("details", { class: "rb-paste" }, make("summary", {}, "Paste a model’s config.json"),
    make("label", { for: box.id }, "The file’s text; it stays on this page"), box, use, said);

  // --- everything as the model has it now
  function show(result, now) {
    frame.hidden = false;
    drawing.draw(result, now.kv_cache_dtype, Math.max(frame.clientWidth, 200));
    const heads = now.attention === "gqa" ? ` × ${thousands(now.num_key_value_heads)} heads` : "";
    stats.row.value.textContent = thousands(result.row);
    stats.row.detail.textContent = result.parts.map((part) => thousands(part.bytes)).join(" + ");
    stats.token.value.textContent = thousands(result.token);
    const keys = result.indexer ? ` + ${thousands(now.num_indexer_layers)} indexer keys × ${thousands(result.indexer)}` : "";
    stats.token.detail.textContent = `${thousands(now.num_hidden_layers)} layers${heads} × ${thousands(result.row)}${keys}`;
    stats.session.value.textContent = short(result.session);
    const split = result.sessionIndexer ? `: rows ${short(result.sessionRows)}, indexer keys ${short(result.sessionIndexer)}` : "";
    stats.session.detail.textContent = `${thousands(result.session)} bytes${split}`;
    stats.sessions.value.textContent = thousands(result.sessions);
    stats.sessions.detail.textContent = `${thousands(result.held)} tokens in ${thousands(now.kv_cache_memory_bytes / GB)} GB`;
    live.textContent = `${thousands(result.row)} bytes a row, ${thousands(result.token)} a token, ${short(result.session)} a session, ` +
      `${thousands(result.sessions)} sessions held.`;
  }

  function update() {
    const now = state();
    const fields = SHAPE[now.attention] || SHAPE.mla;
    attention.show(now.attention, Object.keys(ATTENTION));
    format.show(now.kv_cache_dtype, FORMATS[now.attention] || FORMATS.mla);
    for (const [field, control] of Object.entries(inputs)) {
      control.node.hidden = !(field in SLIDERS) && !fields.includes(field);
      showNumber(control, now[field] / shownUnit(field), drafts.has(field));
    }
    const of = now.attention === "gqa" ? ", one layer, one head" : ", one layer";
    heading.replaceChildren("One row of ", make("strong", {}, now.model_name || "this model"), of);
    try {
      const draft = [...drafts].find(([field]) => !inputs[field].node.hidden);
      if (draft) throw new Error(draft[1]);
      const result = numbers(now);
      message.textContent = "";
      show(result, now);
    } catch (error) {
      message.textContent = error.message;
      live.textContent = "";
      drawing.clear();
      frame.hidden = true;
      blank(stats);
    }
  }

  message.id = `${id}-message`;
  root.append(make("div", { class: "rb-top" }, heading, reset), frame, message,
    make("div", { class: "rb-stats" }, make("dl", {}, ...Object.values(stats).map((entry) => entry.node))), live,
    make("div", { class: "rb-controls" }, attention.set, format.set, shape, load), paste);
  el.append(root);

  update();
  return watch(frame);
}

export default { render, linked: FIELDS };

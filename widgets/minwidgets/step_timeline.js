// Step timeline: the controls, the numbers and the table around the drawing. Every number comes from `answer`: who gives it,
// a kernel or the page's host, this file does not know.
import { choice, freshId, make, stat, thousands } from "./controls.js";
import { same } from "./same.js";
import { spokenTime, stepDrawing } from "./step_drawing.js";

const LABELS = {
  streams: "Streams", prompt_tokens: "Tokens of the prompt", max_num_batched_tokens: "Budget of a step",
  output_tokens: "Tokens of an answer", seed: "Seed",
};
const SLIDERS = { // least, most and step of the sliders; the boxes take all that the limits allow
  streams: [1, 24, 1], prompt_tokens: [32, 4096, 32], max_num_batched_tokens: [32, 2048, 32], output_tokens: [8, 256, 8],
};
const FIELDS = Object.keys(LABELS);
const NONE = "none: "; // how `engine` begins where no setting but the known ones can be answered

const times = (factor) => `${factor.toFixed(factor < 10 ? 1 : 0)} times`;

/** A cost in the unit that keeps it readable. */
function spokenCost(seconds) {
  const [value, unit] = seconds >= 0.0001 || seconds === 0 ? [1000 * seconds, "ms"] : [1e6 * seconds, "µs"];
  return `${Number(value.toPrecision(3))}\u00a0${unit}`;
}

function render({ model, el }) {
  const id = freshId("st");
  const root = make("section", { class: "rb st", "aria-label": "Step timeline, simulated" });
  const drafts = new Map(); // field -> the complaint about what stands in its box
  const settings = () => Object.fromEntries(model.get("takes").map((name) => [name, model.get(name)]));

  let own = false; // true while this view, and not the kernel or the address, changes the model
  function change(fields) {
    own = true;
    for (const [field, value] of Object.entries(fields)) {
      drafts.delete(field);
      model.set(field, value);
    }
    own = false;
    model.save_changes();
    update();
  }
  const reset = make("button", { type: "button", class: "rb-button" }, "Reset");
  reset.addEventListener("click", () => {
    drafts.clear();
    change(model.get("initial"));
  });

  const heading = make("p", { class: "rb-heading" });
  const frame = make("div", { class: "rb-drawing" });
  const drawing = stepDrawing(frame);
  const key = make("p", { class: "st-key" }, ...[["decode", "decode tokens"], ["prefill", "prefill tokens"], ["token", "a token comes out"],
    ["stall", "a gap that the prompt shares"]].map(([kind, text]) => make("span", {}, make("i", { class: `st-swatch-${kind}`, "aria-hidden": "true" }), text)));
  const message = make("p", { class: "rb-message", role: "alert", id: `${id}-message` });
  const stats = { gaps: stat("stalled gaps"), longest: stat("longest gap"), lost: stat("lost in all"), ttft: stat("first token of the prompt") };
  const live = make("p", { class: "rb-hidden", "aria-live": "polite" });
  const note = make("p", { class: "st-note-line", role: "status" });
  const cost = make("p", { class: "st-cost" });

  // --- the controls
  const initial = model.get("initial");
  const examples = model.get("known").filter((one, i, all) => all.findIndex((other) => same(other.settings, one.settings)) === i);
  const differing = FIELDS.filter((field) => examples.some((one) => one.settings[field] !== initial[field]));
  const named = (one) => differing.map((field) => `${LABELS[field].toLowerCase()}: ${thousands(one.settings[field])}`).join(", ");
  const order = [...examples].sort((a, b) => differing.reduce((sign, field) => sign || a.settings[field] - b.settings[field], 0));
  const picked = choice(`${id}-example`, "Settings to compare", Object.fromEntries(order.map((one, i) => [i, named(one)])),
    (i) => change(order[i].settings));
  picked.set.hidden = order.length < 2;

  function take(field, input) {
    const [least, most] = model.get("limits")[field];
    const value = input.value.trim() === "" ? NaN : Number(input.value);
    if (Number.isInteger(value) && value >= least && value <= most) {
      change({ [field]: value });
      return;
    }
    drafts.set(field, `${field}${Number.isNaN(value) ? "" : `=${value}`}: use a whole number from ${least} to ${most}`);
    update();
  }
  const inputs = {};
  for (const field of FIELDS) {
    const [least, most] = model.get("limits")[field];
    const input = make("input", { type: "number", id: `${id}-${field}`, inputmode: "numeric", min: least, max: most, step: 1, "aria-describedby": message.id });
    input.addEventListener("input", () => take(field, input));
    const node = make("div", { class: "rb-field" }, make("label", { for: input.id }, LABELS[field], " ", make("code", {}, field)), input);
    inputs[field] = { input, node };
    if (SLIDERS[field]) {
      const [low, high, step] = SLIDERS[field];
      const slider = make("input", { type: "range", min: low, max: high, step, "aria-label": `${LABELS[field]}, slider` });
      slider.addEventListener("input", () => take(field, slider));
      node.append(slider);
      inputs[field].slider = slider;
    }
  }
  const fields = make("div", { class: "rb-fields" }, ...FIELDS.map((field) => inputs[field].node));

  // --- the steps in a table, written when it is opened
  const body = make("tbody", {});
  const head = make("tr", {}, ...["step", "starts, ms", "lasts, ms", "decode tokens", "prefill tokens"].map((name) => make("th", { scope: "col" }, name)));
  const scroll = make("div", { class: "st-table", tabindex: 0, role: "region", "aria-label": "Steps as a table" }, make("table", {}, make("thead", {}, head), body));
  const table = make("details", {}, make("summary", {}, "Steps as a table"), scroll);
  table.addEventListener("toggle", () => fill());
  function fill() {
    const { value } = model.get("answer");
    const rows = table.open && value ? value.steps : [];
    body.replaceChildren(...rows.map(([start, end, decodes, prefill], i) => make("tr", {},
      ...[i + 1, (1000 * start).toFixed(1), (1000 * (end - start)).toFixed(1), decodes, prefill].map((cell) => make("td", {}, String(cell))))));
  }

  // --- everything as the model has it now
  function show(answer) {
    const { settings: asked, value } = answer;
    frame.hidden = key.hidden = false;
    drawing.draw(answer, Math.max(frame.clientWidth, 200));
    stats.gaps.value.textContent = thousands(value.stalled_gaps);
    stats.gaps.detail.textContent = "of each stream still running";
    stats.longest.value.textContent = spokenTime(value.longest_gap_s);
    stats.longest.detail.textContent = `${times(value.longest_gap_s / value.quiet_gap_s)} the quiet ${spokenTime(value.quiet_gap_s)}`;
    stats.lost.value.textContent = spokenTime(value.lost_s);
    stats.lost.detail.textContent = "beyond quiet gaps";
    stats.ttft.value.textContent = spokenTime(value.ttft_s);
    stats.ttft.detail.textContent = `${spokenTime(value.admitted_s - value.arrival_s)} of it until the next decision`;
    live.textContent = `${thousands(value.stalled_gaps)} stalled gaps, the longest ${spokenTime(value.longest_gap_s)}, ` +
      `${spokenTime(value.lost_s)} lost in all; first token of the prompt after ${spokenTime(value.ttft_s)}.`;
    heading.replaceChildren(make("strong", {}, `${asked.streams} ${asked.streams === 1 ? "stream" : "streams"}`),
      ` and a prompt of ${thousands(asked.prompt_tokens)} tokens `, make("span", { class: "st-badge" }, "simulated"));
  }

  function refuse(text) {
    message.textContent = text;
    live.textContent = "";
    frame.hidden = key.hidden = true;
    for (const { value, detail } of Object.values(stats)) {
      value.textContent = "–";
      detail.textContent = "\u00a0";
    }
  }

  function update() {
    const now = settings();
    const answer = model.get("answer");
    const engine = model.get("engine");
    const waiting = !same(answer.settings, now);
    for (const [field, { input, slider }] of Object.entries(inputs)) {
      const text = Number.isFinite(now[field]) ? String(now[field]) : ""; // an address may hold anything
      if (!drafts.has(field) && input.value !== text) input.value = text;
      if (slider && slider.value !== text) slider.value = text;
      input.setAttribute("aria-invalid", drafts.has(field));
      for (const control of [input, slider]) if (control) control.disabled = engine.startsWith(NONE);
    }
    picked.show(String(order.findIndex((one) => same(one.settings, now))), order.map((_, i) => String(i)));
    root.setAttribute("aria-busy", waiting);
    frame.classList.toggle("st-old", waiting);
    note.textContent = engine.startsWith(NONE) ? engine.slice(NONE.length) : waiting && engine === "loading" ? "Starting Python in the page, once…" : "";
    const { base_s, decode_s, prefill_s, attention_s } = now.cost;
    cost.textContent = `Simulated by minengine’s own scheduler. A step takes ${spokenCost(base_s)}, and ${spokenCost(decode_s)} a decode token, ` +
      `${spokenCost(prefill_s)} a prefill token, ${spokenCost(attention_s)} a pair of a token and a row that it attends to.`;
    const draft = [...drafts.values()][0];
    message.textContent = "";
    if (draft || answer.error) refuse(draft || answer.error);
    else show(answer);
    fill();
  }

  root.append(make("div", { class: "rb-top" }, heading, reset), frame, key, message,
    make("div", { class: "rb-stats" }, make("dl", {}, ...Object.values(stats).map((entry) => entry.node))), live,
    make("div", { class: "rb-controls" }, picked.set, note, fields), cost, table);
  el.append(root);

  let width = 0;
  const size = new ResizeObserver(() => {
    if (frame.clientWidth === width || frame.hidden) return;
    width = frame.clientWidth;
    update();
  });
  size.observe(frame);
  update();
  const outside = () => {
    if (own) return;
    drafts.clear();
    update();
  };
  const events = [["answer", update], ["engine", update], ...FIELDS.map((field) => [field, outside])];
  for (const [name, react] of events) model.on(`change:${name}`, react);
  return () => {
    size.disconnect();
    for (const [name, react] of events) model.off(`change:${name}`, react);
  };
}

export default { render, linked: FIELDS };

// Step timeline: the controls, the numbers and the table around the drawing. Every number comes from `answer`: who gives it,
// a kernel or the page's host, this file does not know.
import { binding } from "./binding.js";
import { blank, choice, freshId, make, numberField, showNumber, stat, tableBelow, thousands } from "./controls.js";
import { same } from "./same.js";
import { spokenTime, stepDrawing } from "./step_drawing.js";
import { spokenCost } from "./units.js";

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

function render({ model, el }) {
  const id = freshId("st");
  const root = make("section", { class: "rb st", "aria-label": "Step timeline, simulated" });
  const { drafts, change, resetButton, watch } = binding(model, FIELDS, () => update());
  const settings = () => Object.fromEntries(model.get("takes").map((name) => [name, model.get(name)]));
  const reset = resetButton();

  const heading = make("p", { class: "rb-heading" });
  const frame = make("div", { class: "rb-drawing" });
  const drawing = stepDrawing(frame);
  const key = make("p", { class: "rb-key" }, ...[["decode", "decode tokens"], ["prefill", "prefill tokens"], ["token", "a token comes out"],
    ["stall", "a gap that the prompt shares"]].map(([kind, text]) => make("span", {}, make("i", { class: `st-swatch-${kind}`, "aria-hidden": "true" }), text)));
  const message = make("p", { class: "rb-message", role: "alert", id: `${id}-message` });
  const stats = { gaps: stat("stalled gaps"), longest: stat("longest gap"), lost: stat("lost in all"), ttft: stat("first token of the prompt") };
  const live = make("p", { class: "rb-hidden", "aria-live": "polite" });
  const note = make("p", { class: "st-note-line", role: "status" });
  const cost = make("p", { class: "rb-fine" });

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
    inputs[field] = numberField({
      id: `${id}-${field}`, label: LABELS[field], field, slider: SLIDERS[field], inputmode: "numeric", min: least, max: most, step: 1,
      "aria-describedby": message.id,
    }, take);
  }
  const fields = make("div", { class: "rb-fields" }, ...FIELDS.map((field) => inputs[field].node));

  // --- the steps in a table, written when it is opened
  const { node: table, body } = tableBelow("Steps as a table", ["step", "starts, ms", "lasts, ms", "decode tokens", "prefill tokens"]);
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
    blank(stats);
  }

  function update() {
    const now = settings();
    const answer = model.get("answer");
    const engine = model.get("engine");
    const waiting = !same(answer.settings, now);
    for (const [field, control] of Object.entries(inputs)) {
      showNumber(control, now[field], drafts.has(field));
      for (const it of [control.input, control.slider]) if (it) it.disabled = engine.startsWith(NONE);
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

  update();
  const stop = watch(frame);
  for (const name of ["answer", "engine"]) model.on(`change:${name}`, update);
  return () => {
    stop();
    for (const name of ["answer", "engine"]) model.off(`change:${name}`, update);
  };
}

export default { render, linked: FIELDS };

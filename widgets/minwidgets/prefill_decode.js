// Prefill and decode: the controls and the numbers around three timelines. Every number comes from `answer`: who gives it, a kernel
// or the page's host, this file does not know.
import { binding } from "./binding.js";
import { choice, freshId, make, numberField, showNumber, tableBelow, thousands } from "./controls.js";
import { timelinesDrawing } from "./pd_drawing.js";
import { same } from "./same.js";
import { spokenTime } from "./step_drawing.js";
import { spokenCost } from "./units.js";

const LABELS = {
  streams: "Streams", prompt_tokens: "Tokens of the prompt", large_budget: "Large budget", small_budget: "Small budget",
  transfer_gb_s: "Transfer, GB/s", pd_slowdown: "Slowdown of each, apart", seed: "Seed",
};
const SHORT = { streams: "streams", prompt_tokens: "prompt", large_budget: "large", small_budget: "small", transfer_gb_s: "GB/s", pd_slowdown: "slowdown", seed: "seed" };
const SLIDERS = { // least, most and step of the sliders; the boxes take all that the limits allow
  streams: [1, 24, 1], prompt_tokens: [32, 4096, 32], large_budget: [64, 2048, 32], small_budget: [32, 512, 16], transfer_gb_s: [0.05, 4, 0.05],
  pd_slowdown: [1, 4, 0.1],
};
const AMOUNTS = ["transfer_gb_s", "pd_slowdown"]; // any number; the others are counts
const FIELDS = [...Object.keys(LABELS), "load_admission", "token_bytes"];
const MEASURES = [ // what is said of each timeline
  ["p90 gap of a stream", (one) => spokenTime(one.p90_gap_s)], ["longest gap", (one) => spokenTime(one.longest_gap_s)],
  ["lost by a stream in all", (one) => (one.lost_s ? spokenTime(one.lost_s) : "nothing")], ["first token of the prompt", (one) => spokenTime(one.ttft_s)],
  ["its second token, later by", (one) => spokenTime(one.second_gap_s)],
];
const COLUMNS = { large: "large chunks", small: "small chunks", apart: "apart" };
const NONE = "none: "; // how `engine` begins where no setting but the known ones can be answered

function render({ model, el }) {
  const id = freshId("pd");
  const root = make("section", { class: "rb st pd", "aria-label": "Prefill and decode, simulated" });
  const { drafts, change, resetButton, watch } = binding(model, FIELDS, () => update());
  const settings = () => Object.fromEntries(model.get("takes").map((name) => [name, model.get(name)]));

  const heading = make("p", { class: "rb-heading" });
  const frame = make("div", { class: "rb-drawing" });
  const drawing = timelinesDrawing(frame);
  const key = make("p", { class: "rb-key" }, ...[["decode", "decode tokens"], ["prefill", "prefill tokens"], ["token", "a token comes out"],
    ["stall", "a gap that the prompt shares"], ["transfer", "its KV travels"]].map(([kind, text]) => make("span", {}, make("i", { class: `st-swatch-${kind}`, "aria-hidden": "true" }), text)));
  const message = make("p", { class: "rb-message", role: "alert", id: `${id}-message` });
  const cells = MEASURES.map(() => Object.keys(COLUMNS).map(() => make("td", {})));
  const numbers = make("div", { class: "rb-table pd-numbers", tabindex: 0, role: "region", "aria-label": "The three timelines in numbers" }, make("table", {},
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "simulated"), ...Object.values(COLUMNS).map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...MEASURES.map(([name], i) => make("tr", {}, make("th", { scope: "row" }, name), ...cells[i])))));
  const live = make("p", { class: "rb-hidden", "aria-live": "polite" });
  const note = make("p", { class: "st-note-line", role: "status" });
  const bill = make("p", { class: "rb-fine" });
  const terms = make("p", { class: "rb-fine" }, "Apart there are two engines. Where each is as fast as the one above (a slowdown of 1) they are twice its hardware; where they " +
    "share it, their steps take longer: up to twice as long with half of it each, if nothing but arithmetic counts.");

  // --- the controls
  const initial = model.get("initial");
  const examples = model.get("known").filter((one, i, all) => all.findIndex((other) => same(other.settings, one.settings)) === i);
  const differing = Object.keys(SHORT).filter((field) => examples.some((one) => one.settings[field] !== initial[field]));
  const named = (one) => differing.map((field) => `${SHORT[field]} ${thousands(one.settings[field])}`).join(", ");
  const order = [...examples].sort((a, b) => differing.reduce((sign, field) => sign || a.settings[field] - b.settings[field], 0));
  const picked = choice(`${id}-example`, "Settings to compare", Object.fromEntries(order.map((one, i) => [i, named(one)])), (i) => change(order[i].settings));
  picked.set.hidden = order.length < 2;
  const admission = choice(`${id}-admission`, "The decoder hears of a landing (load_admission)", { event: "at once: event", poll: "between its steps: poll" },
    (name) => change({ load_admission: name }));

  function take(field, input) {
    const [least, most] = model.get("limits")[field];
    const value = input.value.trim() === "" ? NaN : Number(input.value);
    const whole = !AMOUNTS.includes(field);
    if ((whole ? Number.isInteger(value) : Number.isFinite(value)) && value >= least && value <= most) {
      change({ [field]: value });
      return;
    }
    drafts.set(field, `${field}${Number.isNaN(value) ? "" : `=${value}`}: use a ${whole ? "whole number" : "number"} from ${least} to ${most}`);
    update();
  }
  const inputs = {};
  for (const field of Object.keys(LABELS)) {
    const [least, most] = model.get("limits")[field];
    inputs[field] = numberField({
      id: `${id}-${field}`, label: LABELS[field], field, slider: SLIDERS[field], inputmode: "decimal", min: least, max: most,
      step: AMOUNTS.includes(field) ? "any" : 1, "aria-describedby": message.id,
    }, take);
  }
  const fields = make("div", { class: "rb-fields" }, ...Object.values(inputs).map(({ node }) => node));

  // --- the steps in a table, written when it is opened
  const { node: table, body } = tableBelow("Steps as a table", ["timeline", "engine", "starts, ms", "lasts, ms", "decode tokens", "prefill tokens"]);
  table.addEventListener("toggle", () => fill());
  function fill() {
    const { value } = model.get("answer");
    const rows = table.open && value ? Object.entries(value).flatMap(([name, one]) => [["prefill", one.prefill_steps], [one.prefill_steps.length ? "decode" : "one", one.steps]]
      .flatMap(([role, steps]) => steps.map(([start, end, decodes, prefill]) => [COLUMNS[name], role, (1000 * start).toFixed(1), (1000 * (end - start)).toFixed(1), decodes, prefill]))) : [];
    body.replaceChildren(...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, String(cell))))));
  }

  // --- everything as the model has it now
  function show(answer) {
    const { settings: asked, value } = answer;
    frame.hidden = key.hidden = false;
    drawing.draw(answer, Math.max(frame.clientWidth, 200));
    MEASURES.forEach(([, say], i) => Object.keys(COLUMNS).forEach((name, j) => {
      cells[i][j].textContent = say(value[name]);
    }));
    const of = (say) => Object.entries(COLUMNS).map(([name, text]) => `${text} ${say(value[name])}`).join(", ");
    live.textContent = `p90 gap: ${of(MEASURES[0][1])}. First token of the prompt: ${of(MEASURES[3][1])}.`;
    heading.replaceChildren(make("strong", {}, `${asked.streams} ${asked.streams === 1 ? "stream" : "streams"}`),
      ` and a prompt of ${thousands(asked.prompt_tokens)} tokens `, make("span", { class: "st-badge" }, "simulated"));
    const rows = asked.prompt_tokens * asked.token_bytes;
    const { base_s, decode_s, prefill_s, attention_s } = asked.cost;
    bill.textContent = `Simulated by minengine’s own scheduler. A step takes ${spokenCost(base_s)}, and ${spokenCost(decode_s)} a decode token, ` +
      `${spokenCost(prefill_s)} a prefill token, ${spokenCost(attention_s)} a pair of a token and a row that it attends to. The prompt’s rows are ` +
      `${(rows / 1e6).toPrecision(3)} MB (${thousands(asked.token_bytes)} bytes a token).`;
  }
  function refuse(text) {
    message.textContent = text;
    live.textContent = "";
    frame.hidden = key.hidden = true;
    for (const cell of cells.flat()) cell.textContent = "–";
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
    admission.show(now.load_admission, ["event", "poll"]);
    admission.set.disabled = engine.startsWith(NONE);
    root.setAttribute("aria-busy", waiting);
    frame.classList.toggle("st-old", waiting);
    note.textContent = engine.startsWith(NONE) ? engine.slice(NONE.length) : waiting && engine === "loading" ? "Starting Python in the page, once…" : "";
    const draft = [...drafts.values()][0];
    message.textContent = "";
    if (draft || answer.error) refuse(draft || answer.error);
    else show(answer);
    fill();
  }

  root.append(make("div", { class: "rb-top" }, heading, resetButton()), frame, key, message, numbers, live,
    make("div", { class: "rb-controls" }, picked.set, note, admission.set, fields), bill, terms, table);
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

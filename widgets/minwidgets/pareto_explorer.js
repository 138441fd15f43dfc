// Pareto explorer: controls and words around the drawing. Points come as answers: those that were simulated ahead, and any other one
// when a reader asks for it. Who answers, a kernel or the page's host, this file does not know.
import { binding } from "./binding.js";
import { choice, freshId, make, numberField, showNumber, thousands } from "./controls.js";
import { STYLES, keyMark, paretoDrawing } from "./pareto_drawing.js";
import { curvesOf } from "./pareto_formulas.js";
import { pointStats, pointsTable } from "./pareto_stats.js";
import { inWords, standings, verdictTable } from "./pareto_verdict.js";
import { same } from "./same.js";
import { digits } from "./units.js";

const CHOICES = { // a curve's points share them: legend, and name in the key
  prefill: ["Prefill engines", "prefill"], decode: ["Decode engines", "decode"], kv_cache_dtype: ["Rows of the cache", "rows of"],
  max_num_batched_tokens: ["Tokens of a prefill step and rank", "budget"], gap_cap_s: ["Longest gap that is replayed, s", "gaps up to"],
};
const COUNTS = { sessions: "Sessions", prefills: "Prefill engines", decoders: "Decode engines" };
const OWN = { slo_tok_s: "SLO, tok/s per user", gpu_hour_price: "Price of a GPU-hour" }; // need no simulation
const SIMULATED = [...Object.keys(CHOICES), ...Object.keys(COUNTS), "seed"];
const FIELDS = [...SIMULATED, ...Object.keys(OWN)];
const NONE = "none: "; // how `engine` begins where nothing but the known answers can be had

const ratioName = ({ prefills, decoders }) => `${prefills}:${decoders}`;
const share = (name) => name.split(":")[1] / name.split(":")[0];

function render({ model, el }) {
  const id = freshId("pe");
  const root = make("section", { class: "rb pe", "aria-label": "Pareto explorer, simulated" });
  const [tables, initial] = [model.get("tables"), model.get("initial")];
  let pending = {}; // what is set and not asked for yet: a simulation takes its time, so a reader starts it
  const { drafts, change, resetButton, watch } = binding(model, FIELDS, () => update());
  const asked = () => Object.fromEntries(model.get("takes").map((name) => [name, model.get(name)]));
  const now = () => ({ ...asked(), ...pending });
  const find = (settings) => model.get("known").find((one) => same(one.settings, settings));
  const alike = (one, other) => SIMULATED.every((name) => name in COUNTS || same(one[name], other[name]));
  const spoken = (value) => tables.names[value] || (typeof value === "number" ? thousands(value) : value);

  const heading = make("p", { class: "rb-heading" });
  const frame = make("div", { class: "rb-drawing" });
  const drawing = paretoDrawing(frame, (settings) => set(settings));
  const key = make("p", { class: "rb-key" });
  const message = make("p", { class: "rb-message", role: "alert", id: `${id}-message` });
  const words = make("p", { class: "pe-words" });
  const [verdict, stats, table] = [verdictTable(), pointStats(), pointsTable()];
  const live = make("p", { class: "rb-hidden", "aria-live": "polite" });
  const note = make("p", { class: "pe-status", role: "status" });
  const clock = make("span", { "aria-hidden": "true" });
  const ask = make("button", { type: "button", class: "rb-button" }, "Simulate it here");
  const asking = make("div", { class: "pe-ask" }, note, clock, ask);
  const source = make("p", { class: "rb-fine" });
  const terms = make("p", { class: "rb-fine" }, "All of it is simulated but the star. E2E tok/s per user: a request’s output tokens over its whole time, " +
    "queue and first token included; the mean over requests. Output tok/s per GPU: over all GPUs, those of prefill too. Between two points a curve is " +
    "taken for a straight line. A session is not a request in flight: between its requests its tools run.");

  // --- setting, and asking
  /** Set some of the settings: at once where the answer is there, or with `near` where one is near in the rest; else they wait to be asked for. */
  function set(values, near = false) {
    const jump = near && !Object.keys(pending).length;
    pending = { ...pending, ...values };
    const wanted = now();
    const found = find(wanted) || (jump && nearest(wanted, "decoders" in values));
    if (found) commit(found.settings);
    else if (same(wanted, asked())) commit({});
    else update();
  }
  /** A known point like `wanted` but for its sessions; or, unless `ratio` is to stay, but for its ratio, near in GPUs. */
  function nearest(wanted, ratio) {
    const gpus = model.get("answer").value?.gpus || 0;
    const others = model.get("known").filter(({ settings, value }) => value && alike(settings, wanted));
    const kept = others.filter(({ settings }) => ratioName(settings) === ratioName(wanted));
    const away = ({ settings, value }) => 1e4 * Math.abs(value.gpus - gpus) + Math.abs(settings.sessions - wanted.sessions);
    return (kept.length || ratio ? kept : others).sort((one, other) => away(one) - away(other))[0];
  }
  function commit(values) {
    pending = {};
    for (const name of SIMULATED) drafts.delete(name);
    change(values);
  }
  ask.addEventListener("click", () => commit(now()));
  function take(field, input) {
    const [least, most] = model.get("limits")[field];
    const value = input.value.trim() === "" ? NaN : Number(input.value);
    const whole = field in COUNTS;
    if (!((whole ? Number.isInteger(value) : Number.isFinite(value)) && value >= least && value <= most)) {
      drafts.set(field, `${field}${Number.isNaN(value) ? "" : `=${value}`}: use a ${whole ? "whole number" : "number"} from ${least} to ${most}`);
      update();
      return;
    }
    drafts.delete(field);
    if (field in OWN) change({ [field]: value });
    else set({ [field]: value });
  }

  // --- the controls
  const ahead = model.get("known").map(({ settings }) => settings);
  const ratios = [...new Set([...tables.ratios, ...ahead.map(ratioName)])].sort((one, other) => share(one) - share(other));
  const counts = [...new Set(ahead.map(({ sessions }) => sessions))].sort((one, other) => one - other);
  const offered = (options) => Object.fromEntries(options.map((option) => [option, spoken(option)]));
  const ratio = choice(`${id}-ratio`, "P/D ratio: prefill engines to decode engines (prefills, decoders)", offered(ratios), (name) => {
    const [prefills, decoders] = name.split(":").map(Number);
    set({ prefills, decoders }, true);
  });
  const stored = choice(`${id}-stored`, "Sessions simulated ahead (sessions)", offered(counts), (count) => set({ sessions: Number(count) }));
  const choices = Object.fromEntries(Object.entries(CHOICES).map(([field, [label]]) => {
    const value = (text) => tables[field].find((option) => String(option) === text);
    return [field, choice(`${id}-${field}`, `${label} (${field})`, offered(tables[field]), (text) => set({ [field]: value(text) }, true))];
  }));
  const inputs = Object.fromEntries(Object.entries({ ...OWN, ...COUNTS }).map(([field, label]) => {
    const [min, max] = model.get("limits")[field];
    const slider = field === "slo_tok_s" ? tables.slo : undefined;
    const attributes = { inputmode: "decimal", min, max, step: field in COUNTS ? 1 : "any", "aria-describedby": message.id };
    return [field, numberField({ id: `${id}-${field}`, label, field, slider, ...attributes }, take)];
  }));
  const fields = (names) => make("div", { class: "rb-fields" }, ...names.map((name) => inputs[name].node));

  // --- curves, the words about them, and their key
  const styleOf = (name) => (tables.ratios.indexOf(name) + STYLES) % STYLES; // of those that are not listed, the last
  function dressed(settings) {
    const here = ({ value }) => value.window_s < tables.window_s;
    return curvesOf(model.get("known"), settings, alike).map((one) => ({
      ...one, style: styleOf(one.name), points: one.points.map((point) => ({ ...point, here: here(point) })),
    }));
  }
  function drawAll(settings) {
    const [bar, price] = [model.get("slo_tok_s"), model.get("gpu_hour_price")];
    const curves = dressed(settings);
    const changed = Object.keys(CHOICES).filter((field) => !same(settings[field], initial[field]));
    const before = changed.length ? dressed(initial) : [];
    const chosen = curves.flatMap(({ points }) => points).find((point) => same(point.settings, settings)) || null;
    const standing = standings(curves, bar);
    const told = inWords(standing, bar, price);
    const { user, gpu, sessions } = tables.reported;
    const listed = curves.map(({ name, points }) => `${name} with ${points.map((point) => point.sessions).join(", ")} sessions`).join("; ") || "no curve";
    drawing.draw({ curves, before, chosen, reported: { user, gpu, label: `reported ${sessions}` }, bar }, Math.max(frame.clientWidth, 240),
      `Output tokens a second per GPU over tokens a second per user: ${listed}. ${told} Reported with ${sessions} sessions: ${user} and ${gpu}.`);
    words.textContent = told;
    verdict.fill(standing, price);
    table.fill(curves);
    const part = (mark, text) => make("span", {}, mark, text);
    const swatch = (kind) => make("i", { class: `pe-swatch-${kind}`, "aria-hidden": "true" });
    key.replaceChildren(...curves.map(({ name, style, gpus }) => part(keyMark(style), `${name}, ${gpus} GPUs`)), part(swatch("frontier"), "frontier"),
      part("★ ", `reported: 1:4, ${sessions} sessions`),
      ...(changed.length ? [part(swatch("before"), changed.map((field) => `${CHOICES[field][1]} ${spoken(initial[field])}`).join(", "))] : []),
      ...(curves.some(({ points }) => points.some(({ here }) => here)) ? [make("span", {}, "hollow: simulated here")] : []));
    return told;
  }

  // --- everything as the model has it now
  let begun = 0; // when the simulation that is under way was asked for; 0: none is
  const ticking = setInterval(() => {
    clock.textContent = begun ? `${Math.round((performance.now() - begun) / 1000)}\u00a0s` : "";
  }, 1000);
  /** What is to be said of a point that is not there. */
  function status(unasked, waiting, engine) {
    if (waiting) return engine === "loading" ? "Starting Python in the page, once; then simulating…" : "Simulating…";
    if (engine.startsWith(NONE)) return engine.slice(NONE.length);
    const less = tables.here_s < tables.window_s ? ` instead of ${thousands(tables.window_s)}` : "";
    return unasked ? `Not simulated ahead. It can be here: ${thousands(tables.here_s)} simulated seconds${less}, in about a minute.` : "";
  }
  function update() {
    const [settings, answer, engine] = [now(), model.get("answer"), model.get("engine")];
    if (answer.value && !find(answer.settings)) model.set("known", [...model.get("known"), answer]);
    const unasked = !same(settings, asked());
    const waiting = !unasked && !same(answer.settings, settings);
    const draft = [...drafts.values()][0];
    const told = drawAll(settings);
    const shown = draft || unasked || waiting ? null : answer.value;
    heading.replaceChildren(`${settings.prefills} × ${settings.prefill} → ${settings.decoders} × ${settings.decode}, `,
      make("strong", {}, `${thousands(settings.sessions)} sessions`), " ", make("span", { class: "pe-badge" }, "simulated"));
    message.textContent = draft || (!unasked && !waiting && answer.error) || "";
    if (shown) stats.show(shown, settings.sessions, model.get("gpu_hour_price"));
    else stats.clear();
    live.textContent = shown ? `${digits(shown.e2e_tok_s_user)} tok/s per user, ${digits(shown.output_tok_s_gpu)} tok/s per GPU. ${told}` : "";
    begun = waiting ? begun || performance.now() : 0;
    if (!waiting) clock.textContent = "";
    note.textContent = draft ? "" : status(unasked, waiting, engine);
    ask.hidden = !unasked || engine.startsWith(NONE) || Boolean(draft);
    asking.hidden = !note.textContent && ask.hidden;
    root.setAttribute("aria-busy", waiting);
    const there = counts.filter((sessions) => find({ ...settings, sessions })).map(String);
    ratio.show(ratioName(settings), ratios);
    stored.show(String(settings.sessions), there);
    stored.set.hidden = !there.length;
    for (const [field, control] of Object.entries(choices)) control.show(String(settings[field]), tables[field].map(String));
    for (const [field, control] of Object.entries(inputs)) showNumber(control, field in OWN ? model.get(field) : settings[field], drafts.has(field));
    const span = shown ? `This point: ${thousands(shown.window_s)} simulated seconds, after ${thousands(shown.warm_s)} of warming up.` : "";
    source.textContent = `${tables.source} ${span}`;
  }

  const leave = () => { // what a reader had set and not asked for
    pending = {};
  };
  root.append(make("div", { class: "rb-top" }, heading, resetButton(() => {
    leave();
    update();
  })), frame, key, message, words, verdict.node, live,
  make("div", { class: "rb-controls" }, fields(Object.keys(OWN)), ratio.set, stored.set), asking, stats.node,
  make("div", { class: "rb-controls" }, make("div", { class: "rb-controls rb-wide" }, ...Object.values(choices).map(({ set: node }) => node)),
    fields(Object.keys(COUNTS))),
  source, terms, table.node);
  el.append(root);
  update();
  for (const field of SIMULATED) model.on(`change:${field}`, leave);
  const stop = watch(frame);
  for (const name of ["answer", "engine", "known"]) model.on(`change:${name}`, update);
  return () => {
    clearInterval(ticking);
    stop();
    for (const field of SIMULATED) model.off(`change:${field}`, leave);
    for (const name of ["answer", "engine", "known"]) model.off(`change:${name}`, update);
  };
}

export default { render, linked: FIELDS };

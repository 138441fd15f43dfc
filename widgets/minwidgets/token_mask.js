// Token mask: the call as far as it is written, the tokens that may come next as buttons, and the tool's schema. Every count comes from
// `answer`: who gives it, a kernel or the page's host, this file does not know.
import { binding } from "./binding.js";
import { blank, choice, freshId, make, stat, tableBelow, thousands } from "./controls.js";
import { same } from "./same.js";
import { callDrawing, seen, spoken } from "./token_mask_drawing.js";
import { nextStep } from "./token_mask_step.js";

const FIELDS = ["format", "tool_name", "schema", "tokens", "text"];
const FORMAT_NAMES = { glm: "GLM’s tags", llama: "Llama’s JSON" };
const NONE = "none: "; // how `engine` begins where no state but the known ones can be answered
const TYPING = 300; // ms without a key before a schema that is being typed is asked about
const PACE = 350; // ms between two steps that the widget takes by itself

const tokenCount = (count) => `${thousands(count)} ${count === 1 ? "token" : "tokens"}`;
const beginning = (text) => ([...text].length > 40 ? `${[...text].slice(0, 40).join("")}…` : text);

function render({ model, el }) {
  const id = freshId("tm");
  const root = make("section", { class: "rb tm", "aria-label": "Token mask" });
  const { drafts, change, resetButton, watch } = binding(model, FIELDS, () => update());
  const settings = () => Object.fromEntries(model.get("takes").map((name) => [name, model.get(name)]));
  const value = () => model.get("answer").value;
  const waiting = () => !same(model.get("answer").settings, settings());
  const written = () => (value() ? value().pieces.map(([token]) => token) : []);
  let timer = null; // of the steps that the widget takes by itself
  const reset = resetButton(() => play(false));

  // --- what is written, and the numbers
  const heading = make("p", { class: "rb-heading" });
  const frame = make("div", { class: "rb-drawing" });
  const drawing = callDrawing(frame);
  const message = make("p", { class: "rb-message", role: "alert", id: `${id}-message` });
  const stats = { allowed: stat("tokens allowed next"), masked: stat("masked"), forced: stat("text that must come"), written: stat("tokens written") };
  stats.forced.value.classList.add("tm-text");
  const live = make("p", { class: "rb-hidden", "aria-live": "polite" });
  const note = make("p", { class: "tm-note", role: "status" });

  // --- going on
  const button = (text, act) => {
    const node = make("button", { type: "button", class: "rb-button" }, text);
    node.addEventListener("click", () => !node.hasAttribute("aria-disabled") && act());
    return node;
  };
  const enable = (node, able) => (able ? node.removeAttribute("aria-disabled") : node.setAttribute("aria-disabled", "true")); // it keeps the focus
  const go = (tokens, text = "") => change({ tokens: tokens.join("."), text });
  const choose = (token) => {
    play(false);
    go([...written(), token]);
  };
  const stepOnce = () => {
    const next = waiting() ? null : nextStep(value(), { known: model.get("known"), settings: settings(), stop: model.get("stop_token") });
    if (next) go(next.tokens, next.text);
    return next !== null;
  };
  const steps = {
    step: button("Step", () => stepOnce()),
    play: button("Play", () => play(timer === null)),
    jump: button("Jump", () => go([...written(), ...value().forced_tokens])),
    back: button("Back", () => go(written().slice(0, value().refused ? undefined : -1))),
    over: button("Start over", () => go([])),
  };
  steps.back.addEventListener("click", () => play(false));
  steps.over.addEventListener("click", () => play(false));
  const bar = make("div", { class: "tm-bar" }, ...Object.values(steps));
  const tokensTitle = make("p", { class: "tm-title", id: `${id}-next` });
  const list = make("div", { class: "tm-tokens", role: "group", "aria-labelledby": tokensTitle.id });

  function play(on) {
    clearTimeout(timer);
    timer = null;
    if (on && (waiting() || stepOnce())) timer = setTimeout(() => play(true), PACE);
    steps.play.textContent = timer === null ? "Play" : "Pause";
    if (timer === null && on) update();
  }

  // --- what a model would write
  const typed = make("input", { type: "text", id: `${id}-typed`, autocomplete: "off", spellcheck: "false", autocapitalize: "off" });
  const write = make("button", { type: "submit", class: "rb-button" }, "Write");
  const typing = make("form", { class: "tm-typing" }, make("label", { for: typed.id }, "What the model would write"), typed, write);
  typing.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!typed.value || waiting() || !value()) return;
    play(false);
    const text = typed.value;
    typed.value = "";
    go(written(), text);
  });

  // --- the tool and its format
  const format = choice(`${id}-format`, "Format of the call", Object.fromEntries(model.get("formats").map((name) => [name, FORMAT_NAMES[name] || name])),
    (name) => change({ format: name, tokens: "", text: "" }));
  const name = make("input", { type: "text", id: `${id}-name`, autocomplete: "off", spellcheck: "false", autocapitalize: "off", "aria-describedby": message.id });
  name.addEventListener("change", () => change({ tool_name: name.value, tokens: "", text: "" }));
  const schema = make("textarea", { id: `${id}-schema`, rows: 9, spellcheck: "false", "aria-describedby": message.id });
  let pause;
  schema.addEventListener("input", () => {
    clearTimeout(pause);
    drafts.set("schema", ""); // until the reader pauses
    pause = setTimeout(() => {
      try {
        JSON.parse(schema.value);
      } catch {
        drafts.set("schema", "schema: this is not JSON yet; write one object, from { to }");
        update();
        return;
      }
      const kept = value() ? value().pieces.map(([, text]) => text).join("").split("\ufffd")[0] + value().refused : model.get("text");
      change({ schema: schema.value, tokens: "", text: kept }); // as much of the call as the new schema allows
    }, TYPING);
  });
  const tool = make("div", { class: "tm-tool" }, format.set,
    make("div", { class: "rb-field" }, make("label", { for: name.id }, "Tool"), name),
    make("div", { class: "rb-field" }, make("label", { for: schema.id }, "JSON schema of its parameters"), schema));

  // --- the tokens that are written, in a table
  const { node: table, body } = tableBelow("The call as a table", ["place", "token", "text", "allowed there", "text forced there"]);
  table.addEventListener("toggle", () => fill());
  function fill() {
    const rows = table.open && value() ? value().pieces : [];
    body.replaceChildren(...rows.map(([token, text, allowed, forced], i) => make("tr", {},
      ...[i + 1, token, seen(text), thousands(allowed), forced ? "yes" : "no"].map((cell) => make("td", {}, String(cell))))));
  }

  // --- everything as the model has it now
  function show(now) {
    frame.hidden = false;
    drawing.draw(now, Math.max(frame.clientWidth, 200));
    stats.allowed.value.textContent = thousands(now.allowed);
    stats.allowed.detail.textContent = `of ${thousands(now.vocab_size)} in ${model.get("model_name")}’s vocabulary`;
    stats.masked.value.textContent = `${(100 * (1 - now.allowed / now.vocab_size)).toFixed(now.allowed < now.vocab_size / 10 ? 2 : 1)}%`;
    stats.masked.detail.textContent = `${thousands(now.vocab_size - now.allowed)} tokens`;
    stats.forced.value.textContent = now.forced ? seen(now.forced) : "none";
    stats.forced.detail.textContent = now.forced_tokens.length ? `Jump writes ${tokenCount(now.forced_tokens.length)} without a step of the model` : "\u00a0";
    stats.written.value.textContent = thousands(now.pieces.length);
    stats.written.detail.textContent = `${thousands(now.pieces.filter(([, , , forced]) => forced).length)} of them where a text was forced`;
    message.textContent = now.refused ? `Masked here: ${seen(beginning(now.refused))}. No allowed token is how this text begins.` : "";
    live.textContent = now.ended ? "The call is complete." : `${tokenCount(now.allowed)} ${now.allowed === 1 ? "is" : "are"} allowed next${now.forced ? `; ${spoken(now.forced)} must come` : ""}.`;
  }

  function showTokens(now) {
    const focused = [...list.children].indexOf(document.activeElement);
    const able = !model.get("engine").startsWith(NONE);
    const nodes = now.shown.map(([token, text, behind]) => {
      const node = make("button", { type: "button", class: "tm-token", "aria-label": `${spoken(text)}, then ${thousands(behind)} allowed` },
        make("span", { class: "tm-text" }, seen(text)), make("small", {}, `${thousands(behind)}`));
      node.disabled = !able;
      node.addEventListener("click", () => choose(token));
      return node;
    });
    if (now.stop) {
      const node = make("button", { type: "button", class: "tm-token tm-stop" }, make("span", { class: "tm-text" }, "end of the answer"));
      node.disabled = !able && !model.get("known").some((one) => same(one.settings, { ...settings(), tokens: [...written(), model.get("stop_token")].join("."), text: "" }));
      node.addEventListener("click", () => choose(model.get("stop_token")));
      nodes.push(node);
    }
    list.replaceChildren(...nodes);
    if (focused >= 0 && nodes.length) nodes[Math.min(focused, nodes.length - 1)].focus();
    const rest = now.allowed - now.shown.length - (now.stop ? 1 : 0);
    tokensTitle.textContent = now.ended ? "The call is complete: nothing may come behind it." :
      rest > 0 ? `Allowed next: these, and ${thousands(rest)} more; below each, how many tokens are allowed behind it` :
        "Allowed next; below each, how many tokens are allowed behind it";
  }

  function update() {
    const now = settings();
    const answer = model.get("answer");
    const engine = model.get("engine");
    const none = engine.startsWith(NONE);
    format.show(now.format, model.get("formats"));
    if (document.activeElement !== name) name.value = now.tool_name;
    if (!drafts.has("schema") && schema.value !== now.schema) schema.value = now.schema;
    for (const control of [name, schema, typed, write]) control.disabled = none;
    root.setAttribute("aria-busy", waiting());
    frame.classList.toggle("tm-old", waiting());
    note.textContent = none ? engine.slice(NONE.length) : waiting() && engine === "loading" ? "Loading the grammars into the page, once…" : "";
    heading.replaceChildren("A call of ", make("strong", {}, now.tool_name), `, ${FORMAT_NAMES[now.format] || now.format}`);
    const wrong = drafts.get("schema") || answer.error;
    root.classList.toggle("tm-wrong", Boolean(wrong));
    if (wrong) {
      message.textContent = wrong;
      live.textContent = "";
      frame.hidden = true;
      blank(stats);
      list.replaceChildren();
      tokensTitle.textContent = "";
    } else {
      show(answer.value);
      showTokens(answer.value);
    }
    const it = wrong ? null : answer.value;
    enable(steps.step, it && !it.ended && !it.refused);
    enable(steps.play, timer !== null || (it && !it.ended && !it.refused));
    enable(steps.jump, it && it.forced_tokens.length > 0 && !none);
    enable(steps.back, it && (it.pieces.length > 0 || it.refused));
    enable(steps.over, !it || it.pieces.length > 0 || it.refused);
    fill();
  }

  root.append(make("div", { class: "rb-top" }, heading, reset), frame, message, bar,
    tokensTitle, list, typing, note,
    make("div", { class: "rb-stats" }, make("dl", {}, ...Object.values(stats).map((entry) => entry.node))), live,
    make("div", { class: "rb-controls" }, tool), table);
  el.append(root);

  update();
  const stop = watch(frame);
  for (const trait of ["answer", "engine"]) model.on(`change:${trait}`, update);
  return () => {
    stop();
    clearTimeout(timer);
    clearTimeout(pause);
    for (const trait of ["answer", "engine"]) model.off(`change:${trait}`, update);
  };
}

export default { render, linked: FIELDS };

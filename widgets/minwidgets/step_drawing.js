// The timeline in SVG: steps as bars (wide as they last, high as their tokens), under them each stream's tokens and the prompt's way.
import { thousands } from "./controls.js";

const NS = "http://www.w3.org/2000/svg";
const BARS = 104; // px: height of a full budget
const TOP = 24; // px above it, for its label
const LEAST = 3; // px that a few tokens of a large budget still get
const AFTER = 20; // px between bars and streams
const ROWS = [5, 15, 96]; // px of a stream's row: least, most, and of all together
const PROMPT = 34; // px of the prompt's row
const AXIS = 34;
const CHARACTER = 7; // px
let drawings = 0; // keeps the patterns of two drawings apart

/** A duration as a reader says it; number and unit stay on one line. */
export function spokenTime(seconds) {
  const ms = 1000 * seconds;
  if (ms >= 10_000) return `${seconds.toFixed(1)}\u00a0s`;
  return ms >= 1000 ? `${seconds.toFixed(2)}\u00a0s` : `${ms.toFixed(ms < 10 ? 1 : 0)}\u00a0ms`;
}

/** The smallest of 1, 2, 5, 10, ... that is at least `least`. */
export function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least * 0.999);
}

/** Prefill's hatching, as a pattern of the drawing that fills by `url(#id)`. */
export function addHatch(svg, id) {
  const defs = svg.appendChild(document.createElementNS(NS, "defs"));
  const tile = defs.appendChild(document.createElementNS(NS, "pattern"));
  for (const [name, value] of Object.entries({ id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" })) {
    tile.setAttribute(name, value);
  }
  for (const [kind, wide] of [["st-prefill-ground", 6], ["st-prefill-line", 2.4]]) {
    const rect = tile.appendChild(document.createElementNS(NS, "rect"));
    rect.setAttribute("class", kind);
    rect.setAttribute("width", wide);
    rect.setAttribute("height", 6);
  }
}

export function stepDrawing(frame) {
  const hatch = `st-hatch-${++drawings}`;
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("role", "img");
  frame.append(svg);

  function add(tag, kind, attributes, content) {
    const node = svg.appendChild(document.createElementNS(NS, tag));
    if (kind) node.setAttribute("class", kind);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (content !== undefined) node.textContent = content;
    return node;
  }
  const label = (kind, x, y, content, anchor = "start") => add("text", kind, { x, y, "text-anchor": anchor }, content);
  const box = (x, y, wide, high) => `M${x.toFixed(2)} ${y.toFixed(2)}h${wide.toFixed(2)}v${high.toFixed(2)}h${(-wide).toFixed(2)}z`;

  /** `settings` and `value` as answered; all of it in `width` px. */
  function draw({ settings, value }, width) {
    svg.replaceChildren();
    addHatch(svg, hatch);
    const { steps } = value;
    const left = width < 480 ? 56 : 62;
    const end = steps.at(-1)[1];
    const x = (seconds) => left + (seconds / end) * (width - left - 6);
    const budget = settings.max_num_batched_tokens;
    const high = (tokens) => (tokens ? Math.max(LEAST, (tokens / budget) * BARS) : 0);
    const base = TOP + BARS;

    // steps
    add("line", "st-budget", { x1: left, x2: width - 6, y1: TOP, y2: TOP });
    label("st-note", left, TOP - 8, `budget: ${thousands(budget)} tokens a step`);
    label("st-side", 0, base - 4, "steps");
    let decode = "";
    let prefill = "";
    for (const [start, stop, decodes, filled] of steps) {
      const wide = Math.max(x(stop) - x(start) - Math.min(1, (x(stop) - x(start)) / 4), 0.4);
      const low = high(decodes);
      if (decodes) decode += box(x(start), base - low, wide, low);
      if (filled) prefill += box(x(start), base - low - high(filled), wide, high(filled));
    }
    add("path", "st-prefill", { d: prefill, fill: `url(#${hatch})` });
    add("path", "st-decode", { d: decode });
    add("line", "st-line", { x1: left, x2: width - 6, y1: base + 0.5, y2: base + 0.5 });

    // streams: a mark for each token; a gap that has prompt tokens in it is filled
    const row = Math.min(ROWS[1], Math.max(ROWS[0], ROWS[2] / value.streams.length));
    const size = row * 0.62;
    let y = base + AFTER;
    label("st-side", 0, y + 8, "streams");
    let ticks = "";
    let stalls = "";
    let lines = "";
    for (const marks of value.streams) {
      const middle = y + row / 2;
      lines += `M${x(steps[marks[0]][1]).toFixed(2)} ${middle.toFixed(2)}H${x(steps[marks.at(-1)][1]).toFixed(2)}`;
      for (const i of marks) {
        const at = x(steps[i][1]);
        ticks += `M${at.toFixed(2)} ${(middle - size / 2).toFixed(2)}v${size.toFixed(2)}`;
        if (steps[i][3] && steps[i][0] >= value.admitted_s && i !== marks[0]) stalls += box(x(steps[i][0]), middle - size / 4, at - x(steps[i][0]), size / 2);
      }
      y += row;
    }
    add("path", "st-thread", { d: lines });
    add("path", "st-stall", { d: stalls });
    add("path", "st-token", { d: ticks });

    // the prompt: waiting, prefill, first token, tokens
    y += 12;
    const middle = y + 8;
    const first = value.first_token_s;
    label("st-side", 0, middle + 4, "prompt");
    add("line", "st-arrival", { x1: x(value.arrival_s), x2: x(value.arrival_s), y1: TOP, y2: middle + 7 });
    add("line", "st-wait", { x1: x(value.arrival_s), x2: x(value.admitted_s), y1: middle, y2: middle });
    add("path", "st-prefill", { d: box(x(value.admitted_s), middle - 5, x(first) - x(value.admitted_s), 10), fill: `url(#${hatch})` });
    const after = value.prompt.slice(1).map((i) => `M${x(steps[i][1]).toFixed(2)} ${middle - 5}v10`).join("");
    add("path", "st-thread", { d: `M${x(first).toFixed(2)} ${middle}H${x(steps[value.prompt.at(-1)][1]).toFixed(2)}` });
    add("path", "st-token", { d: after });
    add("circle", "st-first", { cx: x(first), cy: middle, r: 5 });
    const told = `arrives; first token after ${spokenTime(value.ttft_s)}`;
    const room = left + told.length * CHARACTER;
    const anchor = x(value.arrival_s) + told.length * CHARACTER > width ? "end" : "start";
    label("st-note", anchor === "end" ? Math.max(room, x(first)) : x(value.arrival_s), middle + 22, told, anchor);

    // axis
    y += PROMPT + 8;
    add("line", "st-line", { x1: left, x2: width - 6, y1: y, y2: y });
    const tick = roundStep((end * 70) / (width - left));
    const unit = end < 2 ? ["ms", 1000] : ["s", 1];
    const digits = Math.max(0, -Math.floor(Math.log10(tick * unit[1] * 1.001)));
    for (let i = 0; i * tick <= end; i++) {
      const at = x(i * tick);
      add("line", "st-line", { x1: at, x2: at, y1: y, y2: y + 5 });
      if (at < width - 34 || i === 0) label("st-note", at, y + 19, (i * tick * unit[1]).toFixed(digits), i ? "middle" : "start");
    }
    label("st-note", width, y + 19, unit[0], "end");
    svg.setAttribute("viewBox", `0 0 ${width} ${y + AXIS - 8}`);
    svg.setAttribute("height", y + AXIS - 8);
    svg.setAttribute("aria-label", `${steps.length} steps on a time axis of ${spokenTime(end)}. ${value.streams.length} streams get a token in each step. ` +
      `The prompt arrives at ${spokenTime(value.arrival_s)} and is computed in ${value.stalled_gaps} steps that the streams share; ` +
      `its first token comes at ${spokenTime(first)}.`);
  }
  return { draw };
}

// Three timelines on one time axis that begins where the prompt arrives: steps as bars, each stream's tokens, the prompt's way.
import { thousands } from "./controls.js";
import { addHatch, roundStep, spokenTime } from "./step_drawing.js";

const SVG = "http://www.w3.org/2000/svg";
const HEAD = 22; // px: of a timeline's title
const TALL = 46; // of the bars of one engine, at the large budget
const LOW = 28; // of each of two engines' bars
const LANE = 20; // of the streams', and of the prompt's way
const BETWEEN = 20; // timelines
const SCALE = 30; // of the axis
const LEAST_BAR = 3; // px that a few tokens of a large budget still get
const BEFORE = 5; // gaps that are shown before the prompt arrives
const LETTER = 6.4; // px
let drawn = 0; // keeps the patterns of two drawings apart

export const TITLES = { large: "One engine, large chunks", small: "One engine, small chunks", apart: "Prefill and decode apart" };

export function timelinesDrawing(frame) {
  const hatch = `pd-hatch-${++drawn}`;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("role", "img");
  frame.append(svg);

  function add(tag, kind, attributes, content) {
    const node = svg.appendChild(document.createElementNS(SVG, tag));
    if (kind) node.setAttribute("class", kind);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (content !== undefined) node.textContent = content;
    return node;
  }
  const label = (kind, x, y, content, anchor = "start") => add("text", kind, { x, y, "text-anchor": anchor }, content);
  const bar = (x, y, wide, high) => `M${x.toFixed(2)} ${y.toFixed(2)}h${wide.toFixed(2)}v${high.toFixed(2)}h${(-wide).toFixed(2)}z`;

  /** `settings` and `value` as answered; all of it in `width` px. */
  function draw({ settings, value }, width) {
    svg.replaceChildren();
    addHatch(svg, hatch);
    const [left, right] = [width < 480 ? 58 : 74, width - 6];
    const begin = -BEFORE * value.large.quiet_gap_s;
    const end = Math.max(...Object.values(value).map(({ steps }) => steps.at(-1)[1]));
    const x = (seconds) => left + ((Math.max(seconds, begin) - begin) / (end - begin)) * (right - left);
    let y = 0;

    function bars(steps, top, most) {
      const high = (tokens) => (tokens ? Math.max(LEAST_BAR, (tokens / settings.large_budget) * most) : 0);
      const base = top + most;
      let [decode, prefill] = ["", ""];
      for (const [start, stop, decodes, filled] of steps) {
        if (stop <= begin) continue;
        const wide = Math.max(x(stop) - x(start) - Math.min(1, (x(stop) - x(start)) / 4), 0.4);
        const low = high(decodes);
        if (decodes) decode += bar(x(start), base - low, wide, low);
        if (filled) prefill += bar(x(start), base - Math.min(low + high(filled), most), wide, Math.min(high(filled), most - low));
      }
      add("path", "st-prefill", { d: prefill, fill: `url(#${hatch})` });
      add("path", "st-decode", { d: decode });
      add("line", "st-line", { x1: left, x2: right, y1: base + 0.5, y2: base + 0.5 });
    }

    /** A mark for each token that every stream got at a step's end; a gap that has prompt tokens in it is filled. */
    function streamsLane({ steps, streams }, middle) {
      const first = Math.max(...streams.map(([start]) => start));
      let [ticks, stalls] = ["", ""];
      steps.forEach(([start, stop, , filled], i) => {
        if (i < first || stop <= begin) return;
        ticks += `M${x(stop).toFixed(2)} ${middle - 5}v10`;
        if (filled && start >= 0 && i > first) stalls += bar(x(start), middle - 2.5, x(stop) - x(start), 5);
      });
      add("path", "st-thread", { d: `M${left} ${middle}H${x(steps.at(-1)[1]).toFixed(2)}` });
      add("path", "st-stall", { d: stalls });
      add("path", "st-token", { d: ticks });
    }

    function promptLane({ prompt, admitted_s: admitted, transfer_s: transfer, decode_admitted_s: joined }, middle) {
      add("line", "st-wait", { x1: x(0), x2: x(admitted), y1: middle, y2: middle });
      add("path", "st-prefill", { d: bar(x(admitted), middle - 5, x(prompt[0]) - x(admitted), 10), fill: `url(#${hatch})` });
      add("path", "st-thread", { d: `M${x(prompt[0]).toFixed(2)} ${middle}H${x(prompt.at(-1)).toFixed(2)}` });
      if (transfer.length) {
        add("line", "st-wait", { x1: x(prompt[0]), x2: x(joined), y1: middle, y2: middle });
        add("path", "pd-transfer", { d: bar(x(transfer[0]), middle - 3.5, Math.max(x(transfer[1]) - x(transfer[0]), 1.5), 7) });
      }
      add("path", "st-token", { d: prompt.slice(1).map((at) => `M${x(at).toFixed(2)} ${middle - 5}v10`).join("") });
      add("circle", "st-first", { cx: x(prompt[0]), cy: middle, r: 5 });
    }

    for (const [name, one] of Object.entries(value)) {
      label("pd-title", 0, y + 13, TITLES[name]);
      const told = name === "apart" ? `${thousands(settings.transfer_gb_s)} GB/s` : `budget ${thousands(one.budget)}`;
      label("st-note", right, y + 13, told, "end");
      y += HEAD;
      const top = y - 2;
      if (one.prefill_steps.length) {
        label("st-side", 0, y + LOW - 2, "prefill");
        bars(one.prefill_steps, y, LOW);
        const [from, to] = [y + LOW, y + LOW + 26];
        const at = x(one.transfer_s[1]);
        add("path", "pd-way", { d: `M${x(one.transfer_s[0])} ${from + 3}L${at} ${to}` });
        const room = (right - at) > 12 * LETTER;
        label("st-note", room ? at + 7 : x(one.transfer_s[0]) - 7, from + 18, "KV travels", room ? "start" : "end");
        y = to;
      }
      const high = one.prefill_steps.length ? LOW : TALL;
      label("st-side", 0, y + high - 2, one.prefill_steps.length ? "decode" : "steps");
      bars(one.steps, y, high);
      y += high;
      label("st-side", 0, y + 16, width < 480 ? "stream" : "each stream");
      streamsLane(one, y + 12);
      y += LANE;
      label("st-side", 0, y + 16, "prompt");
      add("line", "st-arrival", { x1: x(0), x2: x(0), y1: top, y2: y + 20 });
      promptLane(one, y + 12);
      y += LANE + BETWEEN;
    }

    y += 4 - BETWEEN + 8;
    add("line", "st-line", { x1: left, x2: right, y1: y, y2: y });
    const tick = roundStep(((end - begin) * 70) / (right - left));
    const unit = end < 2 ? ["ms", 1000] : ["s", 1];
    const digits = Math.max(0, -Math.floor(Math.log10(tick * unit[1] * 1.001)));
    for (let i = 0; i * tick <= end; i++) {
      const at = x(i * tick);
      add("line", "st-line", { x1: at, x2: at, y1: y, y2: y + 5 });
      if (at < right - 34 || i === 0) label("st-note", at, y + 19, (i * tick * unit[1]).toFixed(digits), "middle");
    }
    label("st-note", width, y + 19, unit[0], "end");
    const high = y + SCALE;
    svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
    svg.setAttribute("height", high);
    svg.setAttribute("aria-label", "Three timelines from the arrival of a prompt on. " + Object.entries(value).map(([name, one]) =>
      `${TITLES[name]}: ${one.stalled_gaps} stalled gaps, the longest gap ${spokenTime(one.longest_gap_s)}; first token of the prompt after ${spokenTime(one.ttft_s)}.`).join(" "));
  }
  return { draw };
}

// A request's way through the engine as a small drawing, with the same said in words; and how numbers are written.

const NS = "http://www.w3.org/2000/svg";
const WIDE = 10_000; // units of the marks' own scale, stretched to the page's width
const HIGH = 22; // px
let drawings = 0; // tells the captions of two drawings apart

/** A duration as a reader says it; number and unit stay on one line. */
export function duration(seconds) {
  const ms = 1000 * seconds;
  if (ms >= 10_000) return `${seconds.toFixed(1)}\u00a0s`;
  return ms >= 1000 ? `${seconds.toFixed(2)}\u00a0s` : `${ms.toFixed(ms < 10 ? 1 : 0)}\u00a0ms`;
}

/** "1 token", "1,024 tokens": number and noun stay on one line. */
export const counted = (count, noun) => `${count.toLocaleString("en")}\u00a0${noun}${count === 1 ? "" : "s"}`;

/** Tokens a second between the first and the last; null where no time passed between them. */
export function speed({ token_s: tokens }) {
  const lasted = tokens.at(-1) - tokens[0];
  return lasted > 0 ? (tokens.length - 1) / lasted : null;
}

/** [kind, words] of each part of the drawing, in its order. */
export function parts({ queue_s: queued, ttft_s: first, token_s: tokens, num_preemptions: preemptions }) {
  const told = [["queue", `queue ${duration(queued)}`], ["prefill", `prefill ${duration(first - queued)}`]];
  const gaps = tokens.slice(1).map((at, i) => at - tokens[i]);
  const longest = gaps.length ? `, at most ${duration(Math.max(...gaps))} apart` : "";
  told.push(["token", `${counted(tokens.length, "token")} until ${duration(tokens.at(-1))}${longest}`]);
  if (preemptions) told.push(["preemption", `preempted ${preemptions === 1 ? "once" : `${preemptions} times`}: blocks ran out`]);
  return told;
}

function node(tag, attributes) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** A figure: waiting as a dashed line, prefill as a hatched bar, a tick for each token; its caption says the same. */
export function timelineFigure(timeline) {
  const { queue_s: queued, ttft_s: first, token_s: tokens } = timeline;
  const end = tokens.at(-1);
  const x = (seconds) => `${((100 * seconds) / end).toFixed(3)}%`;
  const id = ++drawings;
  const figure = document.createElement("figure");
  figure.className = "timeline";
  const svg = node("svg", { role: "img", "aria-label": "The request's timeline", "aria-describedby": `timeline-${id}`, height: HIGH });

  const hatch = node("pattern", { id: `hatch-${id}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  hatch.append(node("rect", { class: "prefill-ground", width: 6, height: 6 }), node("rect", { class: "prefill-line", width: 2.4, height: 6 }));
  const middle = HIGH / 2;
  const ticks = tokens.map((at) => `M${((WIDE * at) / end).toFixed(1)} 0V${HIGH}`).join("");
  const marks = node("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", width: "100%", height: HIGH, overflow: "visible" });
  marks.append(node("path", { class: "ticks", d: ticks, "vector-effect": "non-scaling-stroke" }));
  svg.append(
    hatch,
    node("line", { class: "thread", x1: x(first), x2: "100%", y1: middle, y2: middle }),
    node("line", { class: "queue", x1: 0, x2: x(queued), y1: middle, y2: middle }),
    node("rect", { class: "prefill", x: x(queued), width: x(first - queued), y: 4, height: HIGH - 8, fill: `url(#hatch-${id})` }),
    marks,
  );

  const caption = document.createElement("figcaption");
  caption.id = `timeline-${id}`;
  for (const [kind, words] of parts(timeline)) {
    const part = caption.appendChild(document.createElement("span"));
    part.className = `key key-${kind}`;
    part.textContent = words;
    caption.append(" ");
  }
  figure.append(svg, caption);
  return figure;
}

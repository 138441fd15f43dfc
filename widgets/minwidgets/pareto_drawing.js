// Throughput per GPU against speed per user: a curve a P/D ratio with its sessions as labels, the bar, the frontier, what was reported.
import { frontier } from "./pareto_formulas.js";
import { roundStep } from "./step_drawing.js";

const SPACE = "http://www.w3.org/2000/svg";
const LETTER = 7.6; // px: of a bold digit
const LINE = 14; // px of a line of text
const MARKS = [ // circle, square, diamond, two triangles, cross
  "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z", "M-4.5-4.5h9v9h-9z", "M0-6.2L6.2 0L0 6.2L-6.2 0z", "M0-6L5.8 4.6H-5.8z", "M-5.8-4.6H5.8L0 6z",
  "M-5.5-1.8h3.7v-3.7h3.6v3.7h3.7v3.6h-3.7v3.7h-3.6v-3.7h-3.7z",
];
const STAR = "M0-8L2.3-2.6L8-2.4L3.6 1.4L5 7L0 4L-5 7L-3.6 1.4L-8-2.4L-2.3-2.6z";
export const STYLES = MARKS.length;

/** A mark for a key: the shape of curve number `style`. */
export function keyMark(style) {
  const svg = document.createElementNS(SPACE, "svg");
  const attributes = { viewBox: "-8 -8 16 16", width: 16, height: 16, "aria-hidden": "true", class: `pe-mark pe-r${style}` };
  for (const [name, value] of Object.entries(attributes)) svg.setAttribute(name, value);
  svg.appendChild(document.createElementNS(SPACE, "path")).setAttribute("d", MARKS[style]);
  return svg;
}

/** A drawing inside `frame`; a click on a point calls `pick` with its settings. */
export function paretoDrawing(frame, pick) {
  const svg = document.createElementNS(SPACE, "svg");
  svg.setAttribute("role", "img");
  frame.append(svg);

  function add(tag, kind, attributes, content) {
    const node = svg.appendChild(document.createElementNS(SPACE, tag));
    node.setAttribute("class", kind);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (content !== undefined) node.textContent = content;
    return node;
  }
  const moved = (x, y) => `translate(${x.toFixed(1)} ${y.toFixed(1)})`;
  const text = (kind, x, y, content, anchor = "start") => add("text", kind, { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor }, content);

  /** Where texts and marks stand already, so that no label hides another. */
  function places() {
    const taken = [];
    const free = (box) => taken.every((other) => box.right <= other.left || other.right <= box.left || box.bottom <= other.top || other.bottom <= box.top);
    const take = (box) => taken.push(box);
    return { free, take };
  }
  const boxOf = (x, y, content, anchor) => {
    const wide = content.length * LETTER;
    const left = x - (anchor === "middle" ? wide / 2 : anchor === "end" ? wide : 0);
    return { left, right: left + wide, top: y - LINE + 3, bottom: y + 3 };
  };

  /**
   * All of it in `width` px.
   *
   * @param shown {curves, before, chosen, reported, bar}: curves with a `style` each; `before`: those of the setting to compare with;
   *   chosen: a point of a curve, or null; reported: {user, gpu, label}; bar: tok/s per user.
   */
  function draw({ curves, before, chosen, reported, bar }, width, spoken) {
    svg.replaceChildren();
    const high = width < 480 ? 330 : 390;
    const [left, right, top, bottom] = [40, width - 10, 30, high - 42];
    const points = [...curves, ...before].flatMap((one) => one.points);
    const all = reported ? [...points, reported] : points;
    const range = (values, room) => {
      const [least, most] = [Math.min(...values), Math.max(...values)];
      const pad = Math.max((most - least) * room, most * 0.02, 1e-9);
      return [Math.max(0, least - pad), most + pad];
    };
    const [x0, x1] = range([...all.map(({ user }) => user), bar], 0.07);
    const [y0, y1] = range(all.length ? all.map(({ gpu }) => gpu) : [0, 1], 0.1);
    const x = (user) => left + ((user - x0) / (x1 - x0)) * (right - left);
    const y = (gpu) => bottom - ((gpu - y0) / (y1 - y0)) * (bottom - top);
    const line = (list) => list.map(({ user, gpu }, i) => `${i ? "L" : "M"}${x(user).toFixed(1)} ${y(gpu).toFixed(1)}`).join("");
    const { free, take } = places();

    // --- the axes
    const ticks = (least, most, room, gap) => {
      const step = roundStep(((most - least) * gap) / room);
      return Array.from({ length: Math.floor(most / step) - Math.ceil(least / step) + 1 }, (_, i) => (Math.ceil(least / step) + i) * step);
    };
    const rounded = (value) => String(Number(value.toPrecision(6)));
    for (const at of ticks(y0, y1, bottom - top, 46)) {
      add("path", "pe-grid", { d: `M${left} ${y(at).toFixed(1)}H${right}` });
      text("pe-note", left - 6, y(at) + 4, rounded(at), "end");
    }
    for (const at of ticks(x0, x1, right - left, 62)) {
      add("path", "pe-grid", { d: `M${x(at).toFixed(1)} ${top}V${bottom}` });
      text("pe-note", x(at), bottom + 16, rounded(at), "middle");
    }
    add("path", "pe-axis", { d: `M${left} ${top}V${bottom}H${right}` });
    text("pe-title", 0, 12, "output tok/s per GPU, prefill’s included");
    text("pe-title", right, high - 6, width < 480 ? "tok/s per user, queue included" : "E2E tok/s per user, mean, queue and first token included", "end");

    // --- the bar
    add("path", "pe-bar", { d: `M${x(bar).toFixed(1)} ${top - 6}V${bottom}` });
    const told = `SLO ${rounded(bar)}`;
    const side = x(bar) + told.length * LETTER + 6 < right ? "start" : "end";
    const at = x(bar) + (side === "start" ? 5 : -5);
    text("pe-note pe-bar-name", at, top + 4, told, side);
    take(boxOf(at, top + 4, told, side));

    // --- curves: those to compare with below, then the frontier, then what is set
    for (const one of before) {
      add("path", "pe-before", { d: line(one.points) });
      for (const point of one.points) add("path", "pe-before-mark", { d: MARKS[one.style], transform: moved(x(point.user), y(point.gpu)) });
    }
    const best = frontier(curves.flatMap((one) => one.points));
    if (best.length > 1) add("path", "pe-frontier", { d: line(best) });
    for (const one of curves) add("path", `pe-curve pe-r${one.style}`, { d: line(one.points) });
    const marked = (kind, point, shape, settings) => {
      const [px, py] = [x(point.user), y(point.gpu)];
      const mark = add("path", kind, { d: shape, transform: moved(px, py) });
      take({ left: px - 6, right: px + 6, top: py - 6, bottom: py + 6 });
      if (settings) mark.addEventListener("click", () => pick(settings));
      return [px, py];
    };
    if (chosen) add("circle", "pe-chosen", { cx: x(chosen.user).toFixed(1), cy: y(chosen.gpu).toFixed(1), r: 10 });
    const labelled = [];
    for (const one of curves) {
      for (const point of one.points) {
        const [px, py] = marked(`pe-mark pe-r${one.style}${point.here ? " pe-here" : ""}`, point, MARKS[one.style], point.settings);
        labelled.push([px, py, String(point.sessions), `pe-label pe-r${one.style}${point === chosen ? " pe-label-chosen" : ""}`]);
      }
    }
    if (reported) {
      const [px, py] = marked("pe-reported", reported, STAR);
      labelled.unshift([px, py, reported.label, "pe-label pe-reported-name"]);
    }
    labelled.sort((one, other) => other[3].includes("chosen") - one[3].includes("chosen") || other[3].includes("reported") - one[3].includes("reported"));
    for (const [px, py, content, kind] of labelled) { // where there is room; what finds none is in the table
      const spots = [
        [px + 9, py - 5, "start"], [px + 9, py + 14, "start"], [px - 9, py + 14, "end"], [px - 9, py - 5, "end"],
        [px, py - 12, "middle"], [px, py + 21, "middle"],
      ];
      const spot = spots.find((it) => {
        const box = boxOf(it[0], it[1], content, it[2]);
        return box.left >= left && box.right <= width && box.top >= 14 && box.bottom <= bottom && free(box);
      });
      if (!spot) continue;
      take(boxOf(spot[0], spot[1], content, spot[2]));
      text(kind, spot[0], spot[1], content, spot[2]);
    }

    svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
    svg.setAttribute("height", high);
    svg.setAttribute("aria-label", spoken);
  }
  return { draw };
}

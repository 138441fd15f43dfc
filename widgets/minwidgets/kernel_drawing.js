// Two panels: what each path moves, to one scale, and the time that its bytes and its operations need at least.
import { keptNodes } from "./kept_nodes.js";

const TITLE = 20; // px: of a panel's title
const PITCH = 46; // from one path to the next
const BAR = 17;
const NAME = 15; // baseline of a path's name, from the top of its row
const BAR_TOP = 21;
const GAP = 40; // between the panels
const SIDE_BY_SIDE = 620; // px of room that two panels in a row take

export const NAMES = { native: "native", staged: "staged", fp8: "fp8", bfloat16: "16-bit" };
/** Parts of a launch as the drawing tells them apart: the last three are of one colour. */
export const PARTS = [
  ["rows", "rows read"], ["copy_written", "copy written"], ["copy_read", "copy read"], ["io", "queries, outputs, slot lists"],
];

/** A path's bytes by the drawing's parts. */
export function split({ launches }) {
  const of = (name) => launches.reduce((sum, { parts }) => sum + (parts[name] || 0), 0);
  return { rows: of("rows"), copy_written: of("copy_written"), copy_read: of("copy_read"), io: of("queries") + of("outputs") + of("slots") };
}

/** A drawing inside `parent`; `say` gives the words for an amount of bytes, a time, and what bounds a path. */
export function floorDrawing(parent, say) {
  const { start, node, box, text, finish, clear } = keptNodes(parent, "No floors: see the message below");

  function bytesPanel(paths, left, top, width) {
    const scale = width / Math.max(...paths.map(({ nbytes }) => nbytes));
    text("bytes-title", "kf-title", left, top + 12, "Bytes through memory");
    paths.forEach((one, i) => {
      const y = top + TITLE + i * PITCH;
      text(`${one.path}-bytes-name`, "kf-name", left, y + NAME, NAMES[one.path]);
      text(`${one.path}-bytes-value`, "kf-value", left + width, y + NAME, say.bytes(one.nbytes), "end");
      let before = 0;
      for (const [part, bytes] of Object.entries(split(one))) {
        if (!bytes) continue;
        box(`${one.path}-${part}`, `kf-bar kf-${part}`, left + before * scale, y + BAR_TOP, bytes * scale, BAR);
        before += bytes;
      }
    });
  }

  function timePanel({ paths, reported, card }, left, top, width) {
    const scale = width / Math.max(...paths.map(({ time_s }) => time_s), ...Object.values(reported).map((us) => us / 1e6));
    text("time-title", "kf-title", left, top + 12, `Least time, ${card.name}`);
    for (const one of paths) {
      const y = top + TITLE + paths.indexOf(one) * PITCH;
      text(`${one.path}-time-name`, "kf-name", left, y + NAME, NAMES[one.path]);
      text(`${one.path}-time-value`, "kf-value", left + width, y + NAME, `${say.time(one.time_s)}, ${say.bound(one)}`, "end");
      const high = (BAR - 1) / 2;
      let before = 0;
      const ends = one.launches.map(({ name, memory_s, compute_s, time_s }) => {
        const x = left + before * scale;
        box(`${one.path}-${name}-memory`, "kf-bar kf-memory", x, y + BAR_TOP, memory_s * scale, high);
        box(`${one.path}-${name}-compute`, "kf-bar kf-compute", x, y + BAR_TOP + high + 1, compute_s * scale, high);
        before += time_s;
        return left + before * scale;
      });
      ends.forEach((x, i) => box(`${one.path}-${i}-floor`, "kf-floor", x - 1, y + BAR_TOP - 3, 2, BAR + 6)); // over the bars
      const us = reported[one.path];
      if (!us) continue;
      const [x, middle] = [left + (us / 1e6) * scale, y + BAR_TOP + BAR / 2];
      node(`${one.path}-way`, "path", "kf-way").setAttribute("d", `M${left + before * scale + 4} ${middle}H${x - 10}`);
      node(`${one.path}-reported`, "path", "kf-reported").setAttribute("d", `M${x - 9} ${middle}l5 -5l5 5l-5 5z`);
    }
  }

  function draw(result, width) {
    start();
    const high = TITLE + result.paths.length * PITCH;
    const beside = width >= SIDE_BY_SIDE;
    const wide = beside ? (width - GAP) / 2 : width;
    bytesPanel(result.paths, 0, 0, wide);
    timePanel(result, beside ? wide + GAP : 0, beside ? 0 : high + GAP / 2, wide);
    const told = result.paths.map((one) => `${NAMES[one.path]} moves ${say.bytes(one.nbytes)} and takes at least ${say.time(one.time_s)}, ${say.bound(one)}` +
      (result.reported[one.path] ? `, reported ${result.reported[one.path]} µs` : ""));
    finish(width, beside ? high : 2 * high + GAP / 2, `Bytes and least time of each path on ${result.card.name}: ${told.join("; ")}.`);
  }
  return { draw, clear };
}

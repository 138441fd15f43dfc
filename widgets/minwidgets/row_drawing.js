// The row to scale, in SVG: a faint 16-bit row above for comparison, the parts with their names below.
import { thousands } from "./controls.js";
import { keptNodes } from "./kept_nodes.js";

const TOP = 26; // px: where the faint row starts
const FAINT = 12;
const ROW_Y = 74;
const ROW_HEIGHT = 44;
const LABEL_Y = 150; // baseline of the parts' names
const LINE = 17;
const GAP = 12; // px between two names
const CHARACTER = 7.1; // px a character of a label may take
const DRAWING_HEIGHT = LABEL_Y + 2 * LINE + 6;

const spoken = (name) => name.replace("_", " ");

/** Left edges for labels of these widths, each as near to its anchor as the others allow, all inside `room`. */
export function spread(anchors, widths, room) {
  const left = [];
  anchors.forEach((anchor, i) => {
    const least = i ? left[i - 1] + widths[i - 1] + GAP : 0;
    left.push(Math.max(anchor - widths[i] / 2, least));
  });
  let limit = room;
  for (let i = left.length - 1; i >= 0; i--) {
    left[i] = Math.max(0, Math.min(left[i], limit - widths[i]));
    limit = left[i] - GAP;
  }
  return left;
}

/** A drawing inside `parent`; `show(result, title, format, width)` brings it up to date, `clear()` empties it. */
export function rowDrawing(parent) {
  const { start, node, box, text, finish, clear } = keptNodes(parent, "No row: see the message below");

  function draw(result, format, width) {
    start();
    const part = (key, kind, x, y, wide, high) => box(key, `rb-part ${kind}`, x, y, Math.max(wide, 0.75), high);
    const plain = result.plain.reduce((sum, part) => sum + part.bytes, 0);
    const row = Number(result.row);
    const scale = width / Math.max(plain, row);

    text("plain", "rb-note", 0, TOP - 9, `bfloat16, for comparison: ${thousands(plain)} bytes`);
    let before = 0;
    for (const { name, bytes } of result.plain) {
      part(`plain-${name}`, `rb-faint rb-${name}`, before * scale, TOP, bytes * scale, FAINT);
      before += bytes;
    }
    text("title", "rb-title", 0, ROW_Y - 11, `${format}: ${thousands(row)} bytes`);
    const widths = result.parts.map(({ name, bytes, holds }) => CHARACTER * Math.max(spoken(name).length, holds.length, thousands(bytes).length + 6));
    let end = 0;
    const centres = result.parts.map(({ bytes }) => {
      end += bytes;
      return (end - bytes / 2) * scale;
    });
    const lefts = spread(centres, widths, width);
    result.parts.forEach(({ name, bytes, holds }, i) => {
      const wide = bytes * scale;
      part(name, `rb-${name.split("_").pop()}`, centres[i] - wide / 2, ROW_Y, wide, ROW_HEIGHT);
      const anchor = Math.min(Math.max(centres[i], lefts[i] + 4), lefts[i] + widths[i] - 4); // where the line meets the label
      const leader = node(`${name}-line`, "path", "rb-leader");
      leader.setAttribute("d", `M${centres[i]} ${ROW_Y + ROW_HEIGHT + 2}V${ROW_Y + ROW_HEIGHT + 6}L${anchor} ${LABEL_Y - 19}V${LABEL_Y - 15}`);
      text(`${name}-name`, "rb-name", lefts[i], LABEL_Y, spoken(name));
      text(`${name}-bytes`, "rb-value", lefts[i], LABEL_Y + LINE, `${thousands(bytes)} bytes`);
      text(`${name}-holds`, "rb-note", lefts[i], LABEL_Y + 2 * LINE, holds);
    });
    const parts = result.parts.map(({ name, bytes, holds }) => `${spoken(name)} ${bytes} bytes (${holds})`).join(", ");
    finish(width, DRAWING_HEIGHT, `One row to scale, ${row} bytes: ${parts}. The same row in bfloat16 has ${plain} bytes.`);
  }
  return { draw, clear };
}

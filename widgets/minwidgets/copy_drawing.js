// Two panels: where one block lies in memory, and what the copies and the bytes of the request take at each setting.
import { blockMajor } from "./copy_formulas.js";
import { keptNodes } from "./kept_nodes.js";
import { thousands } from "./controls.js";

const TITLE = 22; // px: of a panel's title
const AREA = 150; // of the memory
const FOOT = 22; // the line below it
const SIDE = 62; // the lanes' names
const CELLS = 8; // blocks drawn; the one that is picked out is the third
const PICKED = 2;
const PITCH = 66; // from one setting's bar to the next
const BAR_TOP = 23;
const BAR = 17;
const GAP = 44; // between the panels
const SIDE_BY_SIDE = 640; // px of room that two panels in a row take

export const settingName = ({ kv_cache_layout: layout, block_size: size }) => `${layout}, blocks of ${thousands(size)}`;

/** The lanes of a layer-major pool as they are drawn: the first ones, a gap, the last. */
function lanes({ num_hidden_layers: layers, num_indexer_layers: planes, regions_per_layer: split }) {
  const some = (count, kind, name, first) => {
    const one = (i) => ({ kind, name: `${name} ${thousands(i)}`, key: `${kind}-${i}`, parts: kind === "rows" ? split : 1 });
    if (count <= first + 2) return Array.from({ length: count }, (_, i) => one(i + 1));
    return [...Array.from({ length: first }, (_, i) => one(i + 1)), { kind: "gap", key: `${kind}-gap` }, one(count)];
  };
  return [...some(layers, "rows", "layer", planes ? 2 : 3), ...(planes ? some(planes, "keys", "keys", 1) : [])];
}

/** A drawing inside `parent`; `say` gives the words for an amount of bytes and for a time. */
export function copyDrawing(parent, say) {
  const { start, node, box, text, finish, clear } = keptNodes(parent, "No copies: see the message below");
  const pieces = (count) => (count === 1 ? "1 piece" : `${thousands(count)} pieces`);

  function layerMajor(result, state, left, top, width) {
    const all = lanes(state);
    const weight = all.map(({ kind, parts }) => (kind === "gap" ? 0.6 : kind === "keys" ? 0.8 : parts === 2 ? 1.5 : 1));
    const unit = Math.min(AREA / weight.reduce((sum, it) => sum + it, 0), 30);
    const cell = (width - SIDE) / CELLS;
    let y = top;
    all.forEach(({ kind, key, name, parts }, i) => {
      const high = weight[i] * unit;
      if (kind === "gap") text(key, "cc-note", left + SIDE + (PICKED + 0.5) * cell, y + high / 2 + 4, "⋮", "middle");
      else {
        text(`${key}-name`, "cc-note", left, y + high / 2 + 2, name);
        const each = (high - 4) / parts;
        for (let part = 0; part < parts; part++) {
          const at = y + part * each;
          box(`${key}-${part}-lane`, "cc-lane", left + SIDE, at, CELLS * cell, each - 2);
          box(`${key}-${part}-piece`, `cc-piece cc-${kind}`, left + SIDE + PICKED * cell, at, cell, each - 2);
          node(`${key}-${part}-marks`, "path", "cc-marks").setAttribute("d",
            Array.from({ length: CELLS - 1 }, (_, c) => `M${left + SIDE + (c + 1) * cell} ${at}v${each - 2}`).join(""));
        }
      }
      y += high;
    });
  }

  function blockColumns(result, state, left, top, width) {
    const { num_hidden_layers: layers, row_bytes: row, num_indexer_layers: planes, indexer_bytes: key } = state;
    const rows = AREA * ((layers * row) / (layers * row + planes * key));
    const cell = width / CELLS;
    const lines = Math.min(layers, 13);
    for (let c = 0; c < CELLS; c++) {
      const [x, wide] = [left + c * cell, cell - 5];
      box(`column-${c}`, "cc-lane", x, top, wide, AREA);
      if (c !== PICKED) continue;
      box("column-rows", "cc-piece cc-rows", x, top, wide, rows);
      if (planes) box("column-keys", "cc-piece cc-keys", x, top + rows, wide, AREA - rows);
    }
    node("column-marks", "path", "cc-marks").setAttribute("d", Array.from({ length: CELLS }, (_, c) =>
      Array.from({ length: lines - 1 }, (__, i) => `M${left + c * cell} ${(top + (rows * (i + 1)) / lines).toFixed(1)}h${cell - 5}`).join("")).join(""));
    box("column-whole", "cc-whole", left + PICKED * cell - 2, top - 2, cell - 1, AREA + 4);
  }

  function memoryPanel(result, state, left, top, width) {
    const whole = blockMajor(state.kv_cache_layout);
    text("memory-title", "cc-title", left, top + 12, whole ? "Memory, block after block" : "Memory, layer after layer");
    (whole ? blockColumns : layerMajor)(result, state, left, top + TITLE, width);
    const keys = result.indexer_piece_bytes ? ` or ${say.bytes(result.indexer_piece_bytes)}` : "";
    text("memory-foot", "cc-name", left, top + TITLE + AREA + 18, `One block: ${pieces(result.regions)} of ${say.bytes(result.piece_bytes)}${keys}`);
  }

  function timePanel({ compared }, left, top, width) {
    const scale = width / Math.max(...compared.map(({ time_s }) => time_s), 1e-12);
    text("time-title", "cc-title", left, top + 12, "Estimated time of the request’s transfer");
    compared.forEach((one, i) => {
      const y = top + TITLE + i * PITCH;
      const key = settingName(one);
      text(`${key}-name`, one.set ? "cc-name" : "cc-other", left, y + 15, key);
      text(`${key}-value`, one.set ? "cc-name" : "cc-other", left + width, y + 15, say.time(one.time_s), "end");
      box(`${key}-bytes`, "cc-bar cc-bytes", left, y + BAR_TOP, one.bytes_s * scale, BAR);
      box(`${key}-copies`, "cc-bar cc-copies", left + one.bytes_s * scale, y + BAR_TOP, one.copies_s * scale, BAR);
      const keys = one.indexer_piece_bytes ? `, of keys ${say.bytes(one.indexer_piece_bytes)}` : "";
      text(`${key}-count`, "cc-note", left, y + BAR_TOP + BAR + 14, `${thousands(one.count)} ${one.count === 1 ? "copy" : "copies"} of ${say.bytes(one.piece_bytes)}${keys}`);
    });
  }

  function draw(result, state, width) {
    start();
    const beside = width >= SIDE_BY_SIDE;
    const wide = beside ? (width - GAP) / 2 : width;
    const memory = TITLE + AREA + FOOT;
    const bars = TITLE + result.compared.length * PITCH;
    memoryPanel(result, state, 0, 0, wide);
    timePanel(result, beside ? wide + GAP : 0, beside ? 0 : memory + 14, wide);
    const told = result.compared.map((one) => `${settingName(one)}: ${thousands(one.count)} copies, ${say.time(one.time_s)}`);
    finish(width, beside ? Math.max(memory, bars) : memory + 14 + bars, `One block is in ${pieces(result.regions)} of ${say.bytes(result.piece_bytes)}. ` +
      `Estimated times: ${told.join("; ")}.`);
  }
  return { draw, clear };
}

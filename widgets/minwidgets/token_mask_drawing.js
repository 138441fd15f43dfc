// The call as it is written, token by token, and below it at each place how many tokens were allowed, on a logarithmic scale.
import { keptNodes } from "./kept_nodes.js";
import { make, thousands } from "./controls.js";

const HIGH = 46; // of the bars
const FOOT = 16;

/** A token's text with its white space made visible. */
export const seen = (text) => text.replace(/ /g, "\u2423").replace(/\n/g, "\u21b5").replace(/\r/g, "\u240d").replace(/\t/g, "\u21e5");

/** A token's text as a screen reader should say it. */
export const spoken = (text) => text.replace(/^ /, "blank, ").replace(/\n/g, "line break ").replace(/\t/g, "tab ") || "nothing";

export function callDrawing(frame) {
  const call = make("p", { class: "tm-call", role: "group", "aria-label": "The call so far", tabindex: 0 });
  frame.append(call);
  const { start, box, text, finish } = keptNodes(frame, "Tokens allowed at each place");

  function draw({ pieces, refused, allowed, vocab_size: all, ended }, width) {
    call.replaceChildren(...pieces.map(([, piece, count, forced]) => make("span", { class: forced ? "tm-piece tm-forced" : "tm-piece", title: `${thousands(count)} allowed here` }, seen(piece))),
      ...(refused ? [make("s", { class: "tm-refused" }, seen(refused))] : []),
      ...(pieces.length || refused ? [] : [make("span", { class: "tm-nothing" }, "nothing is written yet")]));
    call.scrollTop = call.scrollHeight;
    start();
    const counts = [...pieces.map(([, , count, forced]) => [count, forced ? "tm-bar-forced" : "tm-bar-free"]), ...(ended ? [] : [[allowed, "tm-bar-next"]])];
    const wide = Math.min(14, (width - 2) / Math.max(counts.length, 1));
    for (const [i, [count, kind]] of counts.entries()) {
      const high = Math.max(2, (HIGH * Math.log(Math.max(count, 1))) / Math.log(all));
      box(`bar${i}`, kind, i * wide, HIGH - high, Math.max(wide - 1.5, 0.75), high);
    }
    text("foot", "tm-foot", 0, HIGH + FOOT - 3, "tokens allowed at each place, logarithmic");
    finish(width, HIGH + FOOT, `Tokens allowed at each of ${counts.length} places, the last ${thousands(allowed)}; the table below has all.`);
  }
  return { draw };
}

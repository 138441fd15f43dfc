// Two panels: a card's memory, part after part down to the cache, and the tokens that a group caches in each topology.
import { keptNodes } from "./kept_nodes.js";

const TITLE = 22; // px: of a panel's title
const RUNG = 43; // from one rung to the next
const TOPOLOGY = 56; // from one topology to the next
const NAME = 14; // baseline of a name, from the top of its row
const BAR_TOP = 20;
const BAR = 14;
const SEEN = 1.5; // least width of a rung
const GAP = 44; // between the panels
const SIDE_BY_SIDE = 640; // px of room that two panels in a row take

export const GROUPS = { experts: "experts", attention: "attention and indexers", rest: "other weights" };

/** The rungs of a card: what each takes, from the top, without those that take nothing. */
export function rungs({ weights, buffers, beside }) {
  const parts = Object.entries(GROUPS).map(([group, name]) => [group, name, weights[group]]);
  return [...parts, ["buffers", "buffers for a step’s experts", buffers], ["beside", "everything else", beside]].filter(([, , nbytes]) => nbytes);
}

export const copiesOf = ({ copies }) => (copies === 1 ? "1 copy" : `${copies} copies`);
export const cardsOf = ({ gpus }) => (gpus === 1 ? "1 GPU" : `${gpus} GPUs`);

/** A drawing inside `parent`; `say` gives the words for bytes, for tokens, for a topology and for the time of a token. */
export function ladderDrawing(parent, say) {
  const { start, node, box, text, finish, clear } = keptNodes(parent, "No ladder: see the message below");

  function cardPanel({ card, now }, left, top, width) {
    const over = Math.max(0, -now.left); // what does not fit stands left of nothing
    const scale = width / (card.hbm_bytes + over);
    const zero = left + over * scale;
    text("card-title", "ml-title", left, top + 12, over ? "One card: more than it has" : "One card, from its memory down to the cache");
    let y = top + TITLE;
    const row = (kind, name, nbytes, from) => {
      text(`${kind}-name`, "ml-name", left, y + NAME, name);
      text(`${kind}-value`, "ml-value", left + width, y + NAME, say.bytes(nbytes), "end");
      box(`${kind}-bar`, `ml-bar ml-${kind}`, zero + from * scale, y + BAR_TOP, Math.max(nbytes * scale, SEEN), BAR);
      y += RUNG;
    };
    row("memory", `memory, ${card.name}`, card.hbm_bytes, 0);
    let rest = card.hbm_bytes;
    for (const [kind, name, nbytes] of rungs(now)) {
      rest -= nbytes;
      row(kind, name, nbytes, rest);
    }
    if (over) row("missing", "missing", over, -over);
    else row("cache", "left for the cache", rest, 0);
    return y - top;
  }

  function groupPanel({ compared }, chosen, reported, left, top, width) {
    const scale = width / Math.max(1, ...compared.map(({ tokens }) => tokens), ...Object.values(reported));
    text("group-title", "ml-title", left, top + 12, "Tokens cached by the group; time of a token");
    compared.forEach((one, i) => {
      const y = top + TITLE + i * TOPOLOGY;
      const kind = one.name === chosen ? "ml-name" : "ml-other";
      text(`${one.name}-name`, kind, left, y + NAME, say.topology(one.name));
      text(`${one.name}-value`, kind, left + width, y + NAME, one.left < 0 ? "does not fit" : say.tokens(one.tokens), "end");
      box(`${one.name}-bar`, `ml-bar ml-tokens${one.name === chosen ? " ml-chosen" : ""}`, left, y + BAR_TOP, one.tokens * scale, BAR);
      text(`${one.name}-note`, "ml-note", left, y + BAR_TOP + BAR + 14, `${cardsOf(one)}, ${copiesOf(one)}`);
      text(`${one.name}-itl`, "ml-note", left + width, y + BAR_TOP + BAR + 14, say.token(one.name), "end");
      const stated = reported[one.name];
      if (!stated) return;
      node(`${one.name}-reported`, "path", "ml-reported").setAttribute("d", `M${left + stated * scale - 5} ${y + BAR_TOP + BAR / 2}l5 -5l5 5l-5 5z`);
    });
    return TITLE + compared.length * TOPOLOGY;
  }

  /** `reported`: tokens by topology where the source states them for this setting. */
  function draw(result, reported, width) {
    start();
    const beside = width >= SIDE_BY_SIDE;
    const wide = beside ? (width - GAP) / 2 : width;
    const high = cardPanel(result, 0, 0, wide);
    const more = groupPanel(result, result.now.name, reported, beside ? wide + GAP : 0, beside ? 0 : high + 12, wide);
    const parts = rungs(result.now).map(([, name, nbytes]) => `${name} ${say.bytes(nbytes)}`);
    const left = result.now.left < 0 ? `${say.bytes(-result.now.left)} are missing` : `${say.bytes(result.now.left)} are left for the cache`;
    const told = result.compared.map((one) => `${say.topology(one.name)} ${one.left < 0 ? "does not fit" : say.tokens(one.tokens)}`);
    finish(width, beside ? Math.max(high, more) : high + 12 + more,
      `${result.card.name}, ${say.bytes(result.card.hbm_bytes)}: ${parts.join(", ")}; ${left}. Cached by the group: ${told.join("; ")}.`);
  }
  return { draw, clear };
}

// Which token comes next where nobody chooses: the example's, else the forced text, else a word and then the way out.

const CLOSERS = { glm: "</arg_value>", llama: '"' }; // what ends a free text
const FREE = 1000; // tokens allowed next that make a place free text

/** {tokens, text} of the next state, or null where the call ends or waits for a choice. */
export function nextStep(now, { known, settings, stop }) {
  if (!now || now.ended || now.refused) return null;
  const written = now.pieces.map(([token]) => token);
  const on = (token) => ({ tokens: [...written, token], text: "" });
  const before = written.join(".");
  const example = known.find(({ settings: other }) => ["format", "tool_name", "schema"].every((name) => other[name] === settings[name]) &&
    !other.text && other.tokens.split(".").length === written.length + 1 && other.tokens.startsWith(before && `${before}.`) && other.tokens !== before);
  if (example) return { tokens: example.settings.tokens.split("."), text: "" };
  if (now.stop) return on(stop);
  if (now.forced) {
    const begin = now.shown.filter(([, text]) => now.forced.startsWith(text)).sort(([, a], [, b]) => b.length - a.length)[0];
    return begin ? on(begin[0]) : { tokens: written, text: now.forced };
  }
  const [, last = ""] = now.pieces.at(-1) || [];
  if (now.allowed > FREE) {
    const words = now.shown.filter(([, text]) => /^ ?[a-z]{2,}$/i.test(text));
    if (words.length && !/^ ?[a-z]{2,}$/i.test(last)) return on(words[written.length % words.length][0]);
    return { tokens: written, text: CLOSERS[settings.format] };
  }
  const out = [...now.shown].filter(([, text]) => text.trim()).sort(([, , a], [, , b]) => a - b)[0] || now.shown[0];
  return out ? on(out[0]) : null;
}

// Grammar masks in the page: xgrammar in WebAssembly over smollm2's own vocabulary, both from this site. A classic script, not a module:
// so it runs in a page that was opened from a file as well. What it answers is minwidgets.masked_step's, key for key.
(() => {
  "use strict";
  const HERE = document.currentScript.src;
  const LIMITS = { schema: 8000, text: 4000, tokens: 1000 };
  const SHOWN = [["word", 6], ["mark", 8], ["other", 4]]; // of the allowed tokens, where there are more than these: the first in the vocabulary
  const kindOf = (token) => (/^\u0120?[A-Za-z]{2,}$/.test(token) ? "word" : /["<>{}[\],:/]/.test(token) ? "mark" : "other"); // U+0120 is a space
  const NAME = /^[A-Za-z0-9_-]{1,64}$/;

  const script = (name) => new Promise((resolve, reject) => {
    const node = document.createElement("script");
    node.src = new URL(name, HERE);
    node.onload = resolve;
    node.onerror = () => reject(new Error(`${name} did not load`));
    document.head.append(node);
  });

  // --- the vocabulary: a token is bytes, written one character a byte
  const printable = (byte) => (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte < 0xad) || byte > 0xad;
  const characters = [];
  for (let byte = 0, other = 256; byte < 256; byte++) characters.push(String.fromCharCode(printable(byte) ? byte : other++));
  const byteOf = new Map(characters.map((character, byte) => [character, byte]));
  const written = (text) => [...new TextEncoder().encode(text)].map((byte) => characters[byte]).join("");
  const bytesOf = (token) => Uint8Array.from(token, (character) => byteOf.get(character));
  const read = (token) => new TextDecoder().decode(bytesOf(token));

  // How smollm2's tokenizer cuts a text: digits alone, then GPT-2's pieces, then in each piece the pair that was merged first.
  const PIECES = /\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+/gu;
  function encode(it, text) {
    const found = [...it.special].map(([id, name]) => [text.indexOf(name), id, name]).filter(([at]) => at >= 0).sort(([a], [b]) => a - b)[0];
    if (found) return [...encode(it, text.slice(0, found[0])), found[1], ...encode(it, text.slice(found[0] + found[2].length))];
    return (text.match(PIECES) || []).flatMap((piece) => merged(it, [...written(piece)]));
  }
  function merged(it, parts) {
    for (;;) {
      const pairs = parts.slice(1).map((part, i) => it.ids.get(parts[i] + part) ?? Infinity);
      const best = Math.min(...pairs);
      if (best === Infinity) return parts.map((part) => it.ids.get(part));
      const at = pairs.indexOf(best);
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  async function load() {
    await Promise.all([script("vendor/xgrammar.js"), script("grammar-data.js"), script("grammar-schema.js")]);
    const { xgrammar, minGrammarData: data } = globalThis;
    const info = await xgrammar.TokenizerInfo.createTokenizerInfo(data.tokens, "byte_level", false, data.tokens.length, data.stop);
    const compiler = await xgrammar.GrammarCompiler.createGrammarCompiler(info);
    const stop = new Set(data.stop);
    const special = new Map(Object.entries(data.control).map(([id, name]) => [Number(id), name]));
    const ids = new Map(data.tokens.map((token, id) => [token, id]).filter(([, id]) => !special.has(id)));
    const longest = Math.max(...[...ids.keys()].map((token) => token.length));
    const textOf = (id) => special.get(id) ?? read(data.tokens[id]);
    return { ...data, xgrammar, compiler, special, stop, ids, longest, textOf, compiled: new Map() };
  }
  let loaded;

  async function compiledFor(it, { format, tool_name, schema }) {
    if (!Object.hasOwn(it.wire, format)) throw new Error(`format='${format}': use one of ${Object.keys(it.wire).join(", ")}`);
    if (typeof tool_name !== "string" || !NAME.test(tool_name)) throw new Error(`tool_name='${tool_name}': use 1 to 64 letters, digits, _ or -`);
    if (typeof schema !== "string" || schema.length > LIMITS.schema) throw new Error(`schema: use a text of up to ${LIMITS.schema} characters`);
    const key = JSON.stringify([format, tool_name, schema]);
    if (!it.compiled.has(key)) {
      const wire = { before: it.wire[format].before.replace(it.tool, tool_name), after: it.wire[format].after };
      const text = await globalThis.minGrammarSchema.callGrammar(it.xgrammar, format, wire, globalThis.minGrammarSchema.read(schema));
      for (const old of it.compiled.values()) old.dispose();
      it.compiled.clear();
      const grammar = await it.xgrammar.Grammar.fromEBNF(text);
      it.compiled.set(key, await it.compiler.compileGrammar(grammar));
      grammar.dispose();
    }
    return it.compiled.get(key);
  }

  // --- one state of a call
  class Call {
    constructor(it, matcher) {
      Object.assign(this, { it, matcher, pieces: [] });
    }
    async look() {
      this.mask = this.matcher.isTerminated() ? null : await this.matcher.getNextTokenBitmask();
    }
    allows(id) {
      return this.mask !== null && ((this.mask[id >> 5] >>> (id & 31)) & 1) === 1;
    }
    count() {
      let count = 0;
      for (let word of this.mask || []) for (; word; word &= word - 1) count++;
      return count;
    }
    async take(id) {
      this.pieces.push([id, this.count(), this.forced()]);
      this.matcher.acceptToken(id);
      await this.look();
    }
    async back(count) {
      if (!count) return;
      this.matcher.rollBack(count);
      this.pieces.length -= count;
      await this.look();
    }
    /** Takes the longest tokens that are allowed for as much of `text` as there are; gives what is left. */
    async write(text) {
      let rest = written(text);
      while (rest) {
        let size = Math.min(this.it.longest, rest.length);
        let id;
        for (; size; size--) {
          id = this.it.ids.get(rest.slice(0, size));
          if (id !== undefined && this.allows(id)) break;
        }
        if (!size) break;
        await this.take(id);
        rest = rest.slice(size);
      }
      return read(rest);
    }
    /** The text that must come next; none where it starts or ends within a character, which only shows when it is tried. */
    forced() {
      const text = this.matcher.isTerminated() ? "" : this.matcher.findJumpForwardString();
      const given = [...text];
      const wrong = given.findIndex((character) => !this.matcher._acceptString(character));
      const taken = wrong < 0 ? given.length : wrong;
      if (taken) this.matcher.rollBack(taken);
      return wrong < 0 ? text : "";
    }
    /** The tokens of it that the engine takes at once: those that its text is cut into by itself, but the last. */
    jump() {
      const taken = [];
      for (const id of encode(this.it, this.forced()).slice(0, -1)) {
        if (this.it.special.has(id) || !this.matcher.acceptToken(id)) break;
        taken.push(id);
      }
      if (taken.length) this.matcher.rollBack(taken.length);
      return taken;
    }
    async shown() {
      const { tokens, special, stop } = this.it;
      const most = SHOWN.reduce((sum, [, count]) => sum + count, 0);
      const first = Object.fromEntries(SHOWN.map(([kind]) => [kind, []]));
      const all = [];
      for (let id = 0; id < tokens.length; id++) {
        if (!this.allows(id) || special.has(id) || stop.has(id)) continue;
        all.push(id);
        first[kindOf(tokens[id])].push(id);
      }
      const chosen = all.length <= most ? all : SHOWN.flatMap(([kind, count]) => first[kind].slice(0, count));
      const shown = [];
      for (const id of chosen) {
        await this.take(id);
        shown.push([id, read(tokens[id]), this.count()]);
        await this.back(1);
      }
      return shown;
    }
  }

  /** The call with these settings, and what of their text the grammar refuses; its matcher is the caller's to dispose of. */
  async function at(settings) {
    const it = await (loaded ||= load());
    const compiled = await compiledFor(it, settings);
    const { tokens, text } = settings;
    if (typeof tokens !== "string" || !/^([0-9]+(\.[0-9]+)*)?$/.test(tokens)) throw new Error(`tokens='${tokens}': write ids with dots between them`);
    const ids = tokens ? tokens.split(".").map(Number) : [];
    if (ids.length > LIMITS.tokens) throw new Error(`tokens: use up to ${LIMITS.tokens}`);
    if (typeof text !== "string" || text.length > LIMITS.text) throw new Error(`text: use up to ${LIMITS.text} characters`);
    const call = new Call(it, await it.xgrammar.GrammarMatcher.createGrammarMatcher(compiled));
    await call.look();
    for (const [place, id] of ids.entries()) {
      if (!call.allows(id)) {
        call.matcher.dispose();
        throw new Error(`tokens: the grammar masks token ${id} at place ${place + 1}; start over or go back`);
      }
      await call.take(id);
    }
    return { call, refused: await call.write(text) };
  }

  async function step(settings) {
    const { call, refused } = await at(settings);
    const { it, matcher } = call;
    const value = {
      pieces: call.pieces.map(([id, allowed, forced]) => [id, it.textOf(id), allowed, forced !== ""]), refused, forced: call.forced(),
      forced_tokens: call.jump(), vocab_size: it.tokens.length, allowed: call.count(), shown: await call.shown(),
      stop: [...it.stop].some((id) => call.allows(id)), ended: matcher.isTerminated(),
    };
    matcher.dispose();
    return value;
  }

  /** What minengine.simulate.answer gives for the function at `call` and these settings. */
  async function ask(call, settings) {
    await (loaded ||= load()); // its failure is the page's, not the settings'
    try {
      return { settings, value: await step(settings) };
    } catch (error) {
      return { settings, error: error.message || "schema: no grammar can be made of it; simplify it" };
    }
  }

  globalThis.minGrammar = { ask, at };
})();

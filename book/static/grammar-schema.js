// The grammar of one tool call, for the xgrammar that a page can run: it is older than the engine's and knows JSON Schema, but not
// the arguments of GLM's format. Keywords on which the two might differ are refused; a test compares the rest token by token.
(() => {
  "use strict";
  const NOTES = ["title", "description", "default", "examples", "$schema", "$comment"]; // they constrain nothing
  const OF_TYPE = {
    string: [], integer: ["minimum", "maximum"], number: ["minimum", "maximum"], boolean: [], null: [], array: ["items", "minItems", "maxItems"],
    object: ["properties", "required", "additionalProperties"],
  };
  const CLOSE = "</arg_value>";
  const ELSEWHERE = "in JupyterLab the engine itself takes it";
  const isObject = (it) => it !== null && typeof it === "object" && !Array.isArray(it);
  const has = (it, name) => Object.hasOwn(it, name);

  /** The schema that this text is, if this page's grammars and the engine's agree on every keyword in it; else an error of one sentence. */
  function read(text) {
    let schema;
    try {
      schema = JSON.parse(text);
    } catch (error) {
      throw new Error(`schema: this is not JSON (${error.message}); write one object, from { to }`);
    }
    check(schema, "schema");
    if (JSON.stringify(schema).includes(CLOSE)) throw new Error(`schema: ${CLOSE} ends an argument of GLM's format, so no value here may hold it; leave it out`);
    if (schema.type !== "object" || !has(schema, "properties")) throw new Error('schema: the parameters of a tool are an object; write {"type": "object", "properties": {…}}');
    return schema;
  }

  function check(schema, path) {
    const refuse = (why) => {
      throw new Error(`${path}${why}`);
    };
    if (!isObject(schema)) refuse(`: write an object such as {"type": "string"}`);
    const values = has(schema, "enum") ? schema.enum : has(schema, "const") ? [schema.const] : null;
    if (values) {
      if (!Array.isArray(values) || !values.length) refuse(".enum: list at least one value");
      if (values.some((it) => !(typeof it === "string" || typeof it === "boolean" || it === null || Number.isSafeInteger(it)))) {
        refuse(`: this page knows strings, whole numbers, true, false and null as values of enum and const; ${ELSEWHERE}`);
      }
    } else if (has(schema, "anyOf")) {
      if (!Array.isArray(schema.anyOf) || !schema.anyOf.length) refuse(".anyOf: list at least one schema");
      schema.anyOf.forEach((one, i) => check(one, `${path}.anyOf[${i}]`));
    } else if (typeof schema.type !== "string" || !has(OF_TYPE, schema.type)) {
      refuse(`.type: give one of ${Object.keys(OF_TYPE).join(", ")}, or an enum, a const or anyOf`);
    }
    if (values && has(schema, "type") && !values.every((it) => typeof it === (schema.type === "integer" ? "number" : schema.type))) {
      refuse(".type: beside enum or const, write the type of all their values, or none");
    }
    const known = values ? [has(schema, "enum") ? "enum" : "const", "type"] : has(schema, "anyOf") ? ["anyOf"] : ["type", ...OF_TYPE[schema.type]];
    const other = Object.keys(schema).find((name) => !known.includes(name) && !NOTES.includes(name));
    if (other) refuse(`.${other}: this page's grammars leave that keyword out here; ${ELSEWHERE}`);
    for (const name of ["minimum", "maximum", "minItems", "maxItems"]) {
      if (has(schema, name) && !Number.isSafeInteger(schema[name])) refuse(`.${name}: write a whole number`);
    }
    const bounded = has(schema, "minimum") || has(schema, "maximum");
    if (schema.type === "number" && bounded && !(schema.minimum >= 0)) refuse(`.minimum: of a number, this page knows bounds from 0 upwards; ${ELSEWHERE}`);
    if (schema.minimum > schema.maximum) refuse(".minimum: it is above the maximum");
    if (has(schema, "minItems") && schema.minItems < 0) refuse(".minItems: write a whole number from 0");
    if ((schema.minItems || 0) > schema.maxItems) refuse(".minItems: it is above maxItems");
    if (schema.type === "array" && !values) {
      if (!has(schema, "items")) refuse(".items: say what the array holds");
      check(schema.items, `${path}.items`);
    }
    if (schema.type !== "object" || values) return;
    if (has(schema, "additionalProperties") && schema.additionalProperties !== false) refuse(`.additionalProperties: this page knows only false; ${ELSEWHERE}`);
    const properties = has(schema, "properties") ? schema.properties : refuse(".properties: name at least one");
    if (!isObject(properties)) refuse('.properties: write an object, {"name": {"type": "string"}}');
    const required = has(schema, "required") ? schema.required : [];
    if (!Array.isArray(required)) refuse(".required: write a list of names");
    const unknown = required.find((name) => !has(properties, name));
    if (unknown !== undefined) refuse(`.required: there is no property ${JSON.stringify(unknown)}`);
    if (!Object.keys(properties).length) refuse(".properties: name at least one");
    const odd = Object.keys(properties).find((name) => /["\\\u0000-\u001f<]|^\s|\s$|^$/.test(name));
    if (odd !== undefined) refuse(`.properties: this page knows no quote, backslash, < or outer blank in a name such as ${JSON.stringify(odd)}; ${ELSEWHERE}`);
    for (const [name, property] of Object.entries(properties)) check(property, `${path}.properties.${name}`);
  }

  // --- text of grammars
  const MAX_WHITESPACE = 2;
  const valuesOf = (schema) => (has(schema, "enum") ? schema.enum : has(schema, "const") ? [schema.const] : null);
  const literal = (text) => `"${text.replace(/["\\]/g, "\\$&").replace(/\n/g, "\\n").replace(/\r/g, "\\r").replace(/\t/g, "\\t")}"`;

  /** Rules of a JSON value, by the xgrammar at hand; what it calls root is called `prefix`root. */
  async function jsonRules(xgrammar, schema, prefix) {
    const text = await xgrammar.Testings._jsonSchemaToEBNF(JSON.stringify(schema), true, undefined, undefined, true, MAX_WHITESPACE);
    const token = /"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|[A-Za-z_]\w*/g;
    return text.split("\n").filter((line) => line.trim()).map((line) => line.replace(token, (it) => {
      if (it === "[ \\n\\t]") return "[ \\n\\r\\t]"; // white space of the newer xgrammar
      if (it.startsWith('"')) return it.replace(/\\\\\\\\|\\\\\//g, (pair) => (pair.endsWith("/") ? "/" : pair)); // which does not write / as \/
      return /^root(_|$)/.test(it) ? prefix + it : it;
    }));
  }

  /** Rules of the inside of a JSON string that never spells `</arg_value>`, with its closing quote; one for each part of the tag that was read. */
  function untaggedStrings() {
    return [...CLOSE].map((next, read) => {
      const on = read === CLOSE.length - 1 ? [] : [`${literal(next)} untagged_${read + 1}`];
      const again = read && next !== "<" ? ['"<" untagged_1'] : [];
      const others = [...new Set(["<", next])].join("");
      return `untagged_${read} ::= ${['"\\""', '"\\\\" basic_escape untagged_0', ...on, ...again, `[^\\0-\\x1f\\"\\\\${others}] untagged_0`].join(" | ")}`;
    });
  }

  /** Rules of one argument of GLM's format from behind its opening tag to its end; the first is called `name`. */
  async function argumentRules(xgrammar, schema, name) {
    const cases = [];
    const collect = (one) => (has(one, "anyOf") && !valuesOf(one) ? one.anyOf.forEach(collect) : cases.push(one));
    collect(schema);
    if (cases.some((one) => one.type === "string" && !valuesOf(one))) return [`${name} ::= text_to_close`]; // any text is a string
    const rules = [];
    const starts = [];
    for (const [i, one] of cases.entries()) {
      const values = valuesOf(one);
      if (values) {
        starts.push(...values.map((it) => literal(typeof it === "string" ? it : JSON.stringify(it))));
      } else {
        rules.push(...(await jsonRules(xgrammar, one, `${name}_${i}_`)));
        starts.push(`${name}_${i}_root`);
      }
    }
    return [`${name} ::= (${starts.join(" | ")}) ${literal(CLOSE)}`, ...rules];
  }

  /** Rules of GLM's arguments: those of the schema in its order, the required ones always; the first is `arguments`. */
  async function glmRules(xgrammar, schema) {
    const required = new Set(schema.required || []);
    const rules = [];
    const order = [];
    for (const [i, [name, property]] of Object.entries(schema.properties).entries()) {
      rules.push(`argument_${i} ::= ${literal(`<arg_key>${name}</arg_key><arg_value>`)} value_${i}`);
      rules.push(...(await argumentRules(xgrammar, property, `value_${i}`)));
      order.push(`argument_${i}${required.has(name) ? "" : "?"}`);
    }
    const exact = rules.map((rule) => (rule.startsWith("basic_string_sub ::=") ? "basic_string_sub ::= untagged_0" : rule));
    return [`arguments ::= ${order.join(" ")}`, `text_to_close ::= TagDispatch(stop_eos=false, stop_str=(${literal(CLOSE)}), loop_after_dispatch=false)`,
      ...exact, ...(exact.some((rule) => rule.startsWith("basic_escape")) ? untaggedStrings() : [])];
  }

  /** The whole call's grammar, as text; `wire` is what stands before and behind the arguments of a tool. */
  async function callGrammar(xgrammar, format, { before, after }, schema) {
    const rules = format === "glm" ? await glmRules(xgrammar, schema) : await jsonRules(xgrammar, schema, "arguments_");
    const start = format === "glm" ? "arguments" : "arguments_root";
    return [`root ::= ${literal(before)} ${start} ${literal(after)}`, ...new Set(rules)].join("\n");
  }

  globalThis.minGrammarSchema = { read, callGrammar };
})();

// What the widgets' controls are made of.

let made = 0; // widgets on this page: keeps the ids of two apart
export const freshId = (prefix) => `${prefix}${++made}`;

export const thousands = (count) => count.toLocaleString("en-US");

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A number with its name and a line of detail, for a <dl>. */
export function stat(label) {
  const value = make("dd", { class: "rb-stat" });
  const detail = make("dd", { class: "rb-detail" });
  return { value, detail, node: make("div", {}, make("dt", {}, label), value, detail) };
}

/** One of several `options` (value -> text), as chips; `show` marks the chosen one and hides those that are not allowed. */
export function choice(id, legend, options, pick) {
  const inputs = Object.entries(options).map(([value, text]) => {
    const input = make("input", { type: "radio", name: id, value, id: `${id}-${value}` });
    input.addEventListener("change", () => pick(value));
    return [value, input, make("label", { class: "rb-chip" }, input, make("span", {}, text))];
  });
  const chips = make("div", { class: "rb-chips" }, ...inputs.map((entry) => entry[2]));
  const set = make("fieldset", { class: "rb-choice" }, make("legend", {}, legend), chips);
  const show = (chosen, allowed) => {
    for (const [value, input, chip] of inputs) {
      input.checked = value === chosen;
      chip.hidden = !allowed.includes(value);
    }
  };
  return { set, show };
}

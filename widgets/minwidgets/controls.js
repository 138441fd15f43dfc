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

/** A number under its label and trait's name, and a slider below it where `slider` gives least, most and step; both call `take(field, control)`. */
export function numberField({ id, label, field, slider, ...attributes }, take) {
  const input = make("input", { type: "number", id, ...attributes });
  input.addEventListener("input", () => take(field, input));
  const node = make("div", { class: "rb-field" }, make("label", { for: id }, label, " ", make("code", {}, field)), input);
  if (!slider) return { input, node };
  const [min, max, step] = slider;
  const range = make("input", { type: "range", min, max, step, "aria-label": `${label}, slider` });
  range.addEventListener("input", () => take(field, range));
  node.append(range);
  return { input, node, slider: range };
}

/** Brings a number field up to `value`, but leaves alone what a reader is typing. */
export function showNumber({ input, slider }, value, typing) {
  const text = Number.isFinite(value) ? String(value) : ""; // an address may hold anything
  if (!typing && Number(input.value || NaN) !== value) input.value = text;
  if (slider && slider.value !== text) slider.value = text;
  input.setAttribute("aria-invalid", typing);
}

/** Takes the numbers out of `stats`, where there are none to show. */
export function blank(stats) {
  for (const { value, detail } of Object.values(stats)) {
    value.textContent = "–";
    detail.textContent = "\u00a0";
  }
}

/** A table that is folded until asked for, wider than the page where it must; `body` takes its rows. */
export function tableBelow(title, columns) {
  const body = make("tbody", {});
  const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
  const scroll = make("div", { class: "rb-table", tabindex: 0, role: "region", "aria-label": title }, make("table", {}, make("thead", {}, head), body));
  return { node: make("details", { class: "rb-more" }, make("summary", {}, title), scroll), body };
}

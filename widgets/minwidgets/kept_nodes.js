// Elements of a drawing by name, kept from one state to the next, so that what moves can glide.

const SPACE = "http://www.w3.org/2000/svg";

/** An SVG inside `parent`, and how to draw in it: `start`, then `node`, `box` and `text` for each element, then `finish`, which drops the others. */
export function keptNodes(parent, label) {
  const svg = parent.appendChild(document.createElementNS(SPACE, "svg"));
  svg.setAttribute("role", "img");
  let nodes = new Map();
  let kept;
  const start = () => {
    kept = new Map();
  };
  const node = (key, tag, kind) => {
    const found = nodes.get(key) || svg.appendChild(document.createElementNS(SPACE, tag));
    found.setAttribute("class", kind);
    kept.set(key, found);
    return found;
  };
  const box = (key, kind, x, y, wide, high) => {
    const rect = node(key, "rect", kind);
    rect.style.cssText = `x:${x}px;width:${wide}px`;
    rect.setAttribute("y", y);
    rect.setAttribute("height", high);
  };
  const text = (key, kind, x, y, content, anchor = "start") => {
    const label = node(key, "text", kind);
    label.setAttribute("x", x);
    label.setAttribute("y", y);
    label.setAttribute("text-anchor", anchor);
    label.textContent = content;
  };
  const finish = (width, height, spoken) => {
    for (const [key, element] of nodes) if (!kept.has(key)) element.remove();
    nodes = kept;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.setAttribute("aria-label", spoken);
  };
  const clear = () => {
    svg.replaceChildren();
    nodes = new Map();
    svg.setAttribute("aria-label", label);
  };
  return { start, node, box, text, finish, clear };
}

// One message of the conversation as the page shows it. What a model wrote becomes text nodes, never markup.
import { counted, duration, speed, timelineFigure } from "./timeline.js";

const FENCE = /^ {0,3}```([^`]*)$/;

/** Text cut at its ``` lines: [{ language: null or the word after the opening fence, text }]. An open fence lasts to the end. */
export function segments(text) {
  const found = [{ language: null, lines: [] }];
  for (const line of text.split("\n")) {
    const fence = FENCE.exec(line);
    const open = found.at(-1).language !== null;
    if (fence && open && !fence[1].trim()) found.push({ language: null, lines: [] });
    else if (fence && !open) found.push({ language: fence[1].trim(), lines: [] });
    else found.at(-1).lines.push(line);
  }
  return found.map(({ language, lines }) => ({ language, text: lines.join("\n") }))
    .map((part) => (part.language === null ? { ...part, text: part.text.replace(/^\n+|\n+$/g, "") } : part))
    .filter((part) => part.language !== null || part.text);
}

/** Shows `text` in `box`; parts that stand there already are left alone, so that a growing text touches only its end. */
export function showText(box, text) {
  const parts = segments(text);
  parts.forEach(({ language, text: words }, i) => {
    const tag = language === null ? "P" : "PRE";
    let node = box.children[i];
    if (node?.tagName !== tag) {
      const made = document.createElement(tag);
      if (node) node.replaceWith(made);
      else box.append(made);
      node = made;
    }
    if (language) node.dataset.language = language;
    if (node.textContent !== words) node.textContent = words;
  });
  while (box.children.length > parts.length) box.lastChild.remove();
}

/** An empty message of `author` at the end of `list`. */
export function addMessage(list, author, kind) {
  const item = document.getElementById("message").content.firstElementChild.cloneNode(true);
  item.classList.add(kind);
  item.querySelector("h2").textContent = author;
  list.append(item);
  return item;
}

/** Brings what is shown of an answer up to its state. */
export function showAnswer(item, answer) {
  const reasoning = item.querySelector(".reasoning");
  reasoning.hidden = !answer.reasoning;
  showText(reasoning.querySelector(".text"), answer.reasoning);
  showText(item.querySelector(".words"), answer.content);
  const form = item.querySelector(".calls");
  form.hidden = !answer.calls.length;
  answer.calls.forEach((call, i) => showCall(form.querySelectorAll(".call")[i] ?? addCall(form), call));
}

function addCall(form) {
  const call = document.getElementById("call").content.firstElementChild.cloneNode(true);
  form.querySelector("button").before(call);
  return call;
}

function showCall(box, call) {
  box.querySelector(".name").textContent = call.name;
  box.querySelector(".arguments").textContent = call.arguments;
  const mark = box.querySelector(".mark");
  mark.hidden = !call.error;
  if (call.error) mark.textContent = `${call.error.code}: ${call.error.message}`;
}

/** A sentence under a message about how it ended. */
export function showNote(item, sentence) {
  const note = item.querySelector(".note");
  note.hidden = false;
  note.textContent = sentence;
}

/** What a finished answer cost. `seenAfter_s` is the page's own time to its first text; null if there was none. */
export function showFigures(item, { usage, timeline }, seenAfter_s) {
  const list = item.querySelector(".figures");
  const figures = [];
  const seen = seenAfter_s === null ? "" : `${duration(seenAfter_s)} here`;
  if (timeline) figures.push(["ttft", "First token", [`${duration(timeline.ttft_s)} at the server`, seen].filter(Boolean).join(", ")]);
  else if (seen) figures.push(["ttft", "First text", seen]);
  const rate = timeline && speed(timeline);
  if (rate) figures.push(["speed", "Speed", `${rate.toFixed(1)}\u00a0tok/s`]);
  if (usage) {
    figures.push(["cached", "Prompt", `${usage.prompt_tokens_details.cached_tokens.toLocaleString("en")} of ${counted(usage.prompt_tokens, "token")} cached`]);
    figures.push(["tokens", "Answer", counted(usage.completion_tokens, "token")]);
  }
  for (const [kind, name, value] of figures) {
    const pair = list.appendChild(document.createElement("div"));
    pair.className = kind;
    pair.appendChild(document.createElement("dt")).textContent = name;
    pair.appendChild(document.createElement("dd")).textContent = value;
  }
  list.hidden = !figures.length;
  if (timeline?.token_s.length) item.append(timelineFigure(timeline));
}

// The chat page: a conversation held against /v1/chat/completions of the server that served the page.
import { ServerError, ask, emptyAnswer, get, merge } from "./stream.js";
import { addMessage, showAnswer, showFigures, showNote, showText } from "./message.js";

const KEY = "minengine-api-key"; // in sessionStorage
const NEAR = 80; // px from the page's end within which a reader follows the answer
const EXAMPLE = {
  name: "get_weather",
  description: "The weather in a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
    required: ["city", "unit"],
    additionalProperties: false,
  },
  strict: true,
};
const NOTES = {
  length: "Cut off at the most tokens allowed.",
  stopped: "Stopped here. The server sends its figures with an answer's end, so there are none.",
};

const at = Object.fromEntries([...document.querySelectorAll("[id]")].map((node) => [node.id, node]));
let model = null; // its name; null until the server has told it
let conversation = newConversation();
let running = null; // the AbortController of the answer that is coming

function newConversation() {
  const id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, messages: [] };
}

// --- the server ---

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "X-Session-Id": conversation.id, ...(key && { Authorization: `Bearer ${key}` }) };
}

async function learnModel() {
  const { data } = await get("v1/models", headers());
  model = data[0].id;
  const room = data[0].max_model_len;
  at.model.textContent = room ? `${model}, up to ${room.toLocaleString("en")} tokens` : model;
}

/** Shows an error; one about the key brings its field. */
function complain(error) {
  at.error.textContent = error.message;
  if (error.status !== 401) return;
  at["key-form"].hidden = false;
  at.key.focus();
}

at["key-form"].addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = at.key.value.trim();
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  at.error.textContent = "";
  try {
    await learnModel();
    at.field.focus();
  } catch (error) {
    complain(error);
  }
});

// --- what is asked ---

/** The tools as the API takes them; a bare function is wrapped. */
function readTools() {
  const text = at.tools.value.trim();
  if (!text) return {};
  let tools;
  try {
    tools = [JSON.parse(text)].flat();
  } catch (error) {
    at["tools-panel"].open = at.settings.open = true;
    at.tools.focus();
    throw new ServerError(`tools: this is not JSON (${error.message}); give one definition or a list of them`, 0);
  }
  return { tools: tools.map((tool) => (tool?.name ? { type: "function", function: tool } : tool)), tool_choice: at.choice.value };
}

function body(messages) {
  const system = at.system.value.trim();
  const asked = {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    ...readTools(),
    stream: true,
    stream_options: { include_usage: true },
    return_timeline: true,
  };
  for (const [id, name] of [["temperature", "temperature"], ["max-tokens", "max_completion_tokens"], ["seed", "seed"]]) {
    if (at[id].value !== "") asked[name] = at[id].valueAsNumber;
  }
  return asked;
}

// --- one exchange ---

function setRunning(controller) {
  running = controller;
  at.stop.hidden = !controller;
  at.send.hidden = Boolean(controller);
}

/** Runs `change`; a reader who was at the page's end still is afterwards. */
function following(change) {
  const room = document.documentElement;
  const follows = room.scrollHeight - room.clientHeight - room.scrollTop < NEAR;
  change();
  if (follows) room.scrollTop = room.scrollHeight;
}

/** Sends the conversation with the messages `added`; true once something was answered. If nothing was, nothing is added. */
async function exchange(added) {
  const talk = conversation;
  const controller = new AbortController();
  at.error.textContent = "";
  at.welcome.hidden = true;
  const item = addMessage(at.messages, model ?? "Answer", "answer");
  item.setAttribute("aria-busy", "true");
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
  at.spoken.textContent = "Waiting for the answer.";
  setRunning(controller);

  const answer = emptyAnswer();
  const sent_s = performance.now() / 1000;
  let seenAfter_s = null;
  let frame = 0;
  let failure = null;
  try {
    if (!model) await learnModel();
    item.querySelector("h2").textContent = model;
    for await (const chunk of ask("v1/chat/completions", body([...talk.messages, ...added]), headers(), controller.signal)) {
      if (merge(answer, chunk)) seenAfter_s ??= performance.now() / 1000 - sent_s;
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        following(() => showAnswer(item, answer));
      });
    }
  } catch (error) {
    failure = error;
  }
  cancelAnimationFrame(frame);
  if (running === controller) setRunning(null);
  if (talk !== conversation) return true; // another conversation has begun; this one is gone from the page
  item.removeAttribute("aria-busy");
  return end({ item, talk, added, answer, failure, seenAfter_s });
}

function end({ item, talk, added, answer, failure, seenAfter_s }) {
  const stopped = failure?.name === "AbortError";
  if (failure && !stopped) complain(failure);
  if (failure && seenAfter_s === null) {
    item.remove();
    at.spoken.textContent = stopped ? "Stopped before the answer began." : "";
    return false;
  }
  const calls = failure ? [] : answer.calls; // one that broke off is no call
  following(() => {
    showAnswer(item, { ...answer, calls });
    if (stopped) showNote(item, NOTES.stopped);
    else if (failure) showNote(item, "Broken off.");
    else if (NOTES[answer.finish]) showNote(item, NOTES[answer.finish]);
    showFigures(item, answer, seenAfter_s);
  });
  at.spoken.textContent = [answer.content, ...calls.map((call) => `Calls ${call.name}.`), item.querySelector(".note").textContent].join(" ");
  const said = { role: "assistant", content: answer.content };
  if (answer.reasoning) said.reasoning_content = answer.reasoning; // without it the next prompt would begin differently, past the cache
  if (calls.length) {
    said.tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    awaitResults(item, calls);
  }
  talk.messages.push(...added, said);
  return true;
}

/** The form under an answer's calls sends what the reader, as the tool, gives back. */
function awaitResults(item, calls) {
  const form = item.querySelector(".calls");
  const fields = [...form.querySelectorAll("textarea")];
  const button = form.querySelector("button");
  const open = (yes) => {
    fields.forEach((field) => (field.readOnly = !yes));
    button.hidden = !yes;
  };
  open(true);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    open(false);
    at.field.focus();
    open(!(await exchange(fields.map((field, i) => ({ role: "tool", tool_call_id: calls[i].id, content: field.value })))));
  });
}

// --- what a reader does ---

at.composer.addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = at.field.value;
  if (running || !text.trim()) return;
  if (!at["settings-form"].checkValidity()) {
    at.settings.open = true; // a field that is folded away cannot say what it needs
    at["settings-form"].reportValidity();
    return;
  }
  const item = addMessage(at.messages, "You", "asked");
  showText(item.querySelector(".words"), text);
  at.field.value = "";
  at.field.focus();
  if (await exchange([{ role: "user", content: text }])) return;
  item.remove(); // unanswered: the words go back to their writer
  at.field.value = [text, at.field.value].filter(Boolean).join("\n");
});

at.field.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    at.composer.requestSubmit();
  } else if (event.key === "Escape") {
    running?.abort();
  }
});

at.stop.addEventListener("click", () => {
  running?.abort();
  at.field.focus();
});

at.reset.addEventListener("click", () => {
  conversation = newConversation();
  running?.abort();
  at.messages.replaceChildren();
  at.error.textContent = at.spoken.textContent = "";
  at.welcome.hidden = false;
  at.field.focus();
});

at.example.addEventListener("click", () => {
  at.tools.value = JSON.stringify(EXAMPLE, null, 2);
});

at["settings-form"].addEventListener("submit", (event) => event.preventDefault());
at.settings.open = matchMedia("(min-width: 60rem)").matches;
learnModel().catch(complain);

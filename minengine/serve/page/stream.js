// Talks to the server: server-sent events out of bytes in any pieces, and an answer put together from its chunks.

/** What the server says when it refuses or fails; `message` is its own sentence. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Finds the data of each event in a stream of bytes, whatever the pieces in which it comes: inside a character, a line's end, an event. */
export class EventData {
  #decoder = new TextDecoder();
  #line = ""; // its end has not come yet
  #data = []; // the lines of the event that is open
  #afterReturn = false; // the last character was a carriage return: a newline that comes next belongs to it

  /** The data of every event that these bytes complete. */
  feed(bytes) {
    let text = this.#decoder.decode(bytes, { stream: true });
    if (!text) return [];
    const returned = text.endsWith("\r");
    if (this.#afterReturn && text.startsWith("\n")) text = text.slice(1);
    this.#afterReturn = returned;
    const lines = (this.#line + text).split(/\r\n|\n|\r/);
    this.#line = lines.pop();
    return lines.flatMap((line) => this.#take(line));
  }

  #take(line) {
    if (line === "") return this.#data.length ? [this.#data.splice(0).join("\n")] : [];
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    if (name === "data") this.#data.push(colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, ""));
    return []; // a comment (no name), or a field that only an EventSource needs
  }
}

/** The server's JSON at `path`. Throws ServerError with the server's sentence, or with one that says what came instead. */
export async function get(path, headers) {
  return (await answered(path, { headers })).json();
}

async function answered(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("the server does not answer: is it still running?", 0);
  }
  if (response.ok) return response;
  const text = await response.text();
  let sentence;
  try {
    sentence = JSON.parse(text).error.message;
  } catch {
    sentence = `the server answered with status ${response.status} and no explanation`;
  }
  throw new ServerError(sentence, response.status);
}

/** The chunks of a streamed answer to `body`. An error inside the stream is thrown as the server's sentence. */
export async function* ask(path, body, headers, signal) {
  const response = await answered(path, {
    method: "POST", headers: { "Content-Type": "application/json", ...headers }, body: JSON.stringify(body), signal,
  });
  const reader = response.body.getReader();
  const events = new EventData();
  let whole = false;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      for (const data of events.feed(value)) {
        if (data === "[DONE]") {
          whole = true;
          return;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError(chunk.error.message, response.status);
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ServerError("the connection to the server broke before the answer's end", 0);
    throw error;
  } finally {
    const last = whole ? reader.read() : reader.cancel(); // a whole answer is left to end by itself: cancelling counts as a failed request
    last.catch(() => {}); // an aborted one has nothing left to read or cancel
  }
  throw new ServerError("the answer ended before its end: the server closed the connection", 0);
}

/** An answer of which nothing has come yet. */
export const emptyAnswer = () => ({ content: "", reasoning: "", calls: [], finish: null, usage: null, timeline: null });

/** Adds one chunk to an answer; true when it brought something that a reader sees. */
export function merge(answer, chunk) {
  if (chunk.usage) answer.usage = chunk.usage;
  if (chunk.timeline) answer.timeline = chunk.timeline;
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  const { content, reasoning_content: reasoning, tool_calls: calls = [] } = choice.delta;
  answer.content += content ?? "";
  answer.reasoning += reasoning ?? "";
  for (const part of calls) {
    const call = (answer.calls[part.index] ??= { id: "", name: "", arguments: "", error: null });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
    call.error = part.error ?? call.error;
  }
  return Boolean(content || reasoning || calls.length);
}

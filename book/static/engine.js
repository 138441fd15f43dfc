// The engine in the page: questions to a worker that runs its Python files. Importing this starts the worker.
const waiting = new Map(); // number of a question -> how to settle it
let asked = 0;
let failed = null; // why the worker will never answer

const worker = new Worker(new URL("engine-worker.js", import.meta.url), { type: "module" });
worker.addEventListener("message", ({ data: { number, answer, failure } }) => {
  const { resolve, reject } = waiting.get(number);
  waiting.delete(number);
  if (failure === undefined) resolve(JSON.parse(answer));
  else reject(new Error(failure));
});
worker.addEventListener("error", (event) => {
  event.preventDefault();
  failed = new Error(event.message || "its worker did not load");
  for (const { reject } of waiting.values()) reject(failed);
  waiting.clear();
});

/** What the Python function at the dotted path `call` gives for these settings: `minengine.simulate.answer`'s dict. */
export function ask(call, settings) {
  if (failed) return Promise.reject(failed);
  return new Promise((resolve, reject) => {
    waiting.set(++asked, { resolve, reject });
    worker.postMessage({ number: asked, call, settings: JSON.stringify(settings) });
  });
}

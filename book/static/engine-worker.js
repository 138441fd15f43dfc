// Python in WebAssembly with the engine's own files, all from this site. One question in, one answer out, both as JSON.
import { loadPyodide } from "./vendor/pyodide/pyodide.mjs";

const HOME = "/engine"; // in the worker's own memory
const ANSWER = `
import json
import sys

sys.path.insert(0, "${HOME}")
from minengine.simulate.answer import answer


def answer_json(call, settings):
    return json.dumps(answer(call, json.loads(settings)))


answer_json
`;

async function files() {
  const response = await fetch(new URL("minengine.json", import.meta.url), { cache: "no-cache" }); // a newer site's pages must not meet an older engine
  if (!response.ok) throw new Error(`minengine.json: ${response.status}`);
  return response.json();
}

// Pyodide waits for ever for a program that is not there or does not compile: here that ends the start.
const broken = new Promise((_, reject) => {
  const { instantiateStreaming } = WebAssembly;
  WebAssembly.instantiateStreaming = (...given) => {
    const made = instantiateStreaming.apply(WebAssembly, given);
    made.catch(reject);
    return made;
  };
});

async function start() {
  const python = Promise.race([loadPyodide({ indexURL: new URL("vendor/pyodide/", import.meta.url).href }), broken]);
  const [pyodide, texts] = await Promise.all([python, files()]);
  for (const [path, text] of Object.entries(texts)) {
    pyodide.FS.mkdirTree(`${HOME}/${path.slice(0, path.lastIndexOf("/"))}`);
    pyodide.FS.writeFile(`${HOME}/${path}`, text);
  }
  return pyodide.runPython(ANSWER);
}

const started = start();
addEventListener("message", async ({ data: { number, call, settings } }) => {
  try {
    postMessage({ number, answer: (await started)(call, settings) });
  } catch (error) {
    postMessage({ number, failure: error.message.trim().split("\n").at(-1) });
  }
});

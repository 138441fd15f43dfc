// Keeps the page's anywidgets alive without a kernel: their whole state, drawing included, is embedded in the page.
// A module sees the model that anywidget's contract promises, except `send`: nobody is there to answer.
//
// What a reader sets is written to the address, as #<Class>.<trait>=<value>&..., for the traits that the widget's
// module lists as `linked` and that differ from the embedded ones; a link with such an address opens at that setting.
//
// A widget with a `call` has its numbers from Python. Here the page answers it in the kernel's place: from the answers
// that are embedded, else from a source that is loaded when first needed: the engine's own files in a worker (engine.js),
// or, for a widget whose `page_source` is "grammar", xgrammar (grammar.js).
(() => {
  "use strict";
  const STATE = "application/vnd.jupyter.widget-state+json";
  const VIEW = "application/vnd.jupyter.widget-view+json";
  const HERE = document.currentScript.src;
  const SETTLED = 150; // ms without a change before the address follows: browsers limit how often it may

  const isObject = (it) => it !== null && typeof it === "object" && !Array.isArray(it);
  const sorted = (key, it) => (isObject(it) ? Object.fromEntries(Object.entries(it).sort()) : it); // stored notebooks reorder what they hold
  const same = (one, other) => JSON.stringify(one, sorted) === JSON.stringify(other, sorted);
  const parsed = (script) => JSON.parse(script.textContent);
  const entries = Object.assign({}, ...[...document.querySelectorAll(`script[type="${STATE}"]`)].map((script) => parsed(script).state));
  const modules = new Map(); // text of a module -> promise of what it exports
  const models = new Map(); // id -> promise of {model, widget, follow}
  const styles = new Set();
  const keys = []; // names in the address that are taken

  class Model {
    constructor(state) {
      this.state = state;
      this.listeners = new Map(); // event -> callbacks
    }
    get(name) {
      return this.state[name];
    }
    set(name, value) {
      const values = typeof name === "object" ? name : { [name]: value };
      const changed = Object.keys(values).filter((key) => !same(this.state[key], values[key]));
      Object.assign(this.state, values);
      for (const key of changed) this.emit(`change:${key}`, this.state[key]);
      if (changed.length) this.emit("change");
    }
    on(event, callback) {
      this.listeners.set(event, [...(this.listeners.get(event) || []), callback]);
    }
    off(event, callback) {
      if (event === undefined || event === null) this.listeners.clear();
      else this.listeners.set(event, callback ? (this.listeners.get(event) || []).filter((known) => known !== callback) : []);
    }
    emit(event, value) {
      for (const callback of this.listeners.get(event) || []) callback(this, value);
    }
    save_changes() {
      this.emit("saved");
    }
  }

  /** What the module with this text exports; imported once however many widgets have it. */
  function load(text) {
    if (!modules.has(text)) {
      const address = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
      modules.set(text, import(address).finally(() => URL.revokeObjectURL(address)));
    }
    return modules.get(text);
  }

  const inAddress = () => new URLSearchParams(location.hash.slice(1));

  /** Ties the `linked` traits of a model to the page's address under `key`. */
  function link(model, key, linked) {
    const embedded = Object.fromEntries(linked.map((name) => [name, model.get(name)]));
    const follow = () => {
      const address = inAddress();
      if (!linked.some((name) => address.has(`${key}.${name}`))) return false;
      for (const name of linked) {
        const text = address.get(`${key}.${name}`);
        const isNumber = typeof embedded[name] === "number" && text !== null && text.trim() !== "" && !Number.isNaN(Number(text));
        model.set(name, text === null ? embedded[name] : isNumber ? Number(text) : text);
      }
      model.emit("followed");
      return true;
    };
    const write = () => {
      const address = new URLSearchParams([...inAddress()].filter(([name]) => keys.some((known) => name.startsWith(`${known}.`))));
      for (const name of linked) {
        if (model.get(name) === embedded[name]) address.delete(`${key}.${name}`);
        else address.set(`${key}.${name}`, model.get(name));
      }
      const text = address.toString();
      history.replaceState(history.state, "", location.href.split("#")[0] + (text && `#${text}`));
    };
    let timer;
    model.on("saved", () => {
      clearTimeout(timer);
      timer = setTimeout(write, SETTLED);
    });
    addEventListener("hashchange", follow);
    return follow;
  }

  const FROM_FILE = "This page was opened from a file, where browsers run no workers. The settings above are computed; " +
    "from a web server, or in JupyterLab, every other one is too.";
  const NO_WASM = "This browser has no WebAssembly, so the page cannot run the engine. " +
    "The settings above are computed; in another browser, or in JupyterLab, every other one is too.";
  const NO_MASKS = "This browser has no WebAssembly, so the page cannot work out masks. " +
    "The steps of the example are computed; in another browser, or in JupyterLab, every other call is too.";

  /** What can answer in a kernel's place: why this page cannot run it (nothing where it can), how it is loaded, what to say if that fails. */
  const SOURCES = {
    engine: {
      obstacle: () => (location.protocol === "file:" ? FROM_FILE : typeof WebAssembly !== "object" || typeof Worker !== "function" ? NO_WASM : ""),
      load: () => import(new URL("engine.js", HERE)),
      failed: (why) => `Python could not be started in this page (${why}). The settings above are computed.`,
    },
    grammar: {
      obstacle: () => (typeof WebAssembly !== "object" ? NO_MASKS : ""),
      load: () => script("grammar.js").then(() => globalThis.minGrammar),
      failed: (why) => `Grammars could not be loaded into this page (${why}). The steps of the example are computed.`,
    },
  };

  /** A classic script of this site, once: unlike a module it may be loaded into a page that was opened from a file. */
  const scripts = new Map();
  function script(name) {
    if (!scripts.has(name)) {
      scripts.set(name, new Promise((resolve, reject) => {
        const node = Object.assign(document.createElement("script"), { src: new URL(name, HERE), onload: resolve });
        node.onerror = () => reject(new Error(`${name} did not load`));
        document.head.append(node);
      }));
    }
    return scripts.get(name);
  }

  /** Keeps the model's `answer` that of its settings, one question at a time: of several that came meanwhile only the last is asked. */
  function answering(model) {
    const settings = () => Object.fromEntries(model.get("takes").map((name) => [name, model.get(name)]));
    const known = () => model.get("known").find((one) => same(one.settings, settings()));
    const give = (answer) => model.set("answer", answer);
    const { obstacle, load: loaded, failed } = SOURCES[model.get("page_source") || "engine"];
    let asking = false;
    function cannot(reason) {
      model.set("engine", `none: ${reason}`);
      model.set(model.get("answer").settings); // what is shown and what is set agree again
    }
    async function ask() {
      if (known()) give(known());
      else if (model.get("engine").startsWith("none: ")) model.set(model.get("answer").settings);
      else if (!asking) {
        asking = true;
        try {
          if (model.get("engine") !== "ready") model.set("engine", "loading");
          const source = await loaded();
          while (!same(model.get("answer").settings, settings())) {
            const asked = settings(); // and what no setting changes, which need not be said again in each answer
            give(known() || { ...(await source.ask(model.get("call"), { ...model.get("given"), ...asked })), settings: asked });
          }
          model.set("engine", "ready");
        } catch (error) {
          cannot(failed(error.message));
        }
        asking = false;
      }
    }
    if (obstacle()) cannot(obstacle());
    model.on("saved", ask);
    model.on("followed", ask);
  }

  async function start(id) {
    const entry = entries[id];
    if (!entry) throw new Error("its state is not in the page");
    if (entry.model_module !== "anywidget") throw new Error(`${entry.model_module} ${entry.model_name} is no anywidget`);
    if (entry.buffers?.length) throw new Error("it has binary state");
    const { _esm, _css, _anywidget_id: name, ...state } = entry.state;
    const model = new Model(state);
    const exported = (await load(_esm)).default;
    const widget = typeof exported === "function" ? await exported() : exported;
    if (_css && !styles.has(_css)) {
      styles.add(_css);
      document.head.append(Object.assign(document.createElement("style"), { textContent: _css }));
    }
    if (state.call) answering(model);
    return { model, widget, follow: link(model, keyOf(id), widget.linked || []) };
  }

  /** Names the models in the order of the page: RowBytes, RowBytes-2, ... */
  function keyOf(id) {
    return keys[order.indexOf(id)];
  }

  async function show(place) {
    const view = document.createElement("div");
    try {
      const id = parsed(place.querySelector("script")).model_id;
      if (!models.has(id)) {
        models.set(id, start(id).then(async (started) => {
          started.linked = started.follow();
          await started.widget.initialize?.({ model: started.model });
          return started;
        }));
      }
      const { model, widget, linked } = await models.get(id);
      place.append(view);
      await widget.render({ model, el: view, signal: new AbortController().signal });
      place.querySelector("p").remove();
      place.dataset.state = "alive";
      if (linked) place.scrollIntoView({ block: "center" });
    } catch (error) {
      view.remove();
      place.dataset.state = "failed";
      const note = document.createElement("p");
      note.className = "minwidget-note";
      note.textContent = `This widget cannot be shown without a kernel (${error.message}). Download the notebook and open it in JupyterLab.`;
      place.append(note);
    }
  }

  const places = [...document.querySelectorAll(".minwidget")];
  const order = [...new Set(places.map((place) => parsed(place.querySelector("script")).model_id))];
  for (const id of order) {
    const name = (entries[id]?.state._anywidget_id || "widget").split(".").pop();
    const same = keys.filter((key) => key.replace(/-\d+$/, "") === name).length;
    keys.push(same ? `${name}-${same + 1}` : name);
  }
  places.forEach(show);
})();

// Draws every <figure class="minfigure"> with Plotly in the page's colours, fonts and width, when it comes near the
// window or at the reader's first key, touch or scroll, so that the text is there before 400 kB of library; and again when
// the theme or the width class changes. Chapters set data and axis titles; looks are decided here.
(() => {
  "use strict";
  const LIBRARY = new URL("vendor/plotly.js", document.currentScript.src);
  const NARROW = 520; // px: below this a chart gets smaller type, fewer ticks and its legend underneath
  const TITLE_CHARACTERS = 26; // of a y axis, when narrow
  const LEGEND_ROW = 19; // px that a narrow drawing grows for each series named below it
  const SERIES = {
    // Okabe and Ito's colours, lightened for dark pages: told apart with any colour vision.
    light: ["#0072b2", "#d55e00", "#009e73", "#b0538a", "#e69f00", "#56b4e9"],
    dark: ["#56b4e9", "#f0894a", "#2fc39a", "#e39cc6", "#f2c14e", "#9fb4ff"],
  };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const theme = () => (document.documentElement.dataset.theme === "dark" ? "dark" : "light");
  const isObject = (value) => value && typeof value === "object" && !Array.isArray(value);

  // Values of `own` win over those of `base`, level by level.
  function over(base, own) {
    const merged = { ...base };
    for (const [key, value] of Object.entries(own || {}))
      merged[key] = isObject(value) && isObject(base[key]) ? over(base[key], value) : value;
    return merged;
  }

  // A long title of a vertical axis in lines that a small drawing has room for.
  function wrapped(title) {
    const lines = [""];
    for (const word of title.split(" ")) {
      if (lines.at(-1) && (lines.at(-1) + word).length > TITLE_CHARACTERS) lines.push("");
      lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
    }
    return lines.join("<br>");
  }

  // A logarithmic axis is labelled at the values that were measured, if they are few: 1, 2, 4, 8 and not every digit.
  function logTicks(spec, name) {
    if (spec.layout[name].type !== "log") return {};
    const letter = name[0];
    const values = new Set();
    for (const trace of spec.data) {
      if ((trace[`${letter}axis`] || letter) !== name.replace("axis", "") || !Array.isArray(trace[letter])) continue;
      trace[letter].forEach((value) => values.add(value));
    }
    return values.size && values.size <= 8 ? { tickvals: [...values], ticktext: [...values].map(String) } : { dtick: 1 };
  }

  function layoutFor(spec, width) {
    const narrow = width < NARROW;
    const text = colour("--pst-color-text-base");
    const grid = colour("--pst-color-border");
    const axis = {
      gridcolor: grid, linecolor: grid, zerolinecolor: grid, zerolinewidth: 1, automargin: true, nticks: narrow ? 5 : 8,
      title: { standoff: narrow ? 6 : 10, font: { size: narrow ? 11 : 13 } }, fixedrange: true,
    };
    const own = structuredClone(spec.layout || {});
    delete own.width;
    delete own.height;
    for (const name of Object.keys(own)) {
      if (!/^[xy]axis\d*$/.test(name)) continue;
      if (typeof own[name].title === "string") own[name].title = { text: own[name].title };
      if (narrow && name[0] === "y" && own[name].title?.text) own[name].title.text = wrapped(own[name].title.text);
      own[name] = over(axis, { ...logTicks(spec, name), ...own[name] });
    }
    const base = {
      autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", colorway: SERIES[theme()],
      font: { family: colour("--pst-font-family-heading") || "sans-serif", size: narrow ? 11 : 13, color: text },
      margin: narrow ? { l: 8, r: 8, t: 16, b: 8 } : { l: 16, r: 16, t: 24, b: 16 },
      xaxis: axis, yaxis: axis, hovermode: "closest", dragmode: false,
      legend: { orientation: "h", x: 0, xanchor: "left", y: narrow ? -0.28 : 1.02, yanchor: narrow ? "top" : "bottom", bgcolor: "rgba(0,0,0,0)" },
      hoverlabel: { bgcolor: colour("--pst-color-surface"), bordercolor: grid, font: { color: text } },
    };
    return over(base, own);
  }

  const figures = new Map(); // drawing element -> {spec, height in px, state: what the last drawing was made for}

  function draw(plot) {
    const figure = figures.get(plot);
    const width = plot.clientWidth;
    if (!width) return; // inside a closed tab: the resize observer calls again when it opens
    const state = `${theme()} ${width < NARROW}`;
    if (state === figure.state) {
      Plotly.Plots.resize(plot);
      return;
    }
    figure.state = state;
    const named = figure.spec.data.filter((trace) => trace.name && trace.showlegend !== false).length;
    plot.style.height = `${figure.height + (width < NARROW && named > 2 ? named * LEGEND_ROW : 0)}px`;
    Plotly.react(plot, structuredClone(figure.spec.data), layoutFor(figure.spec, width), { responsive: false, displayModeBar: false, staticPlot: false });
  }

  let library; // promise of the loaded script
  function load() {
    library ??= new Promise((resolve, reject) => {
      document.head.append(Object.assign(document.createElement("script"), { src: LIBRARY, onload: resolve, onerror: reject }));
    });
    return library;
  }

  const sizes = new ResizeObserver((entries) => entries.forEach((entry) => draw(entry.target)));
  const near = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => begin(entry.target)),
    { rootMargin: "50% 0px" });

  async function begin(plot) {
    near.unobserve(plot);
    await load();
    sizes.observe(plot); // fires once at once: the first drawing
  }

  for (const node of document.querySelectorAll("figure.minfigure")) {
    const plot = node.querySelector(".minfigure-plot");
    figures.set(plot, { spec: JSON.parse(node.querySelector("script").textContent), height: parseFloat(plot.style.height), state: "" });
    near.observe(plot);
  }
  const all = () => figures.forEach((_, plot) => begin(plot)); // a reader is here, and may search the page or print it
  for (const sign of ["keydown", "pointerdown", "scroll"]) addEventListener(sign, all, { once: true, passive: true });
  new MutationObserver(() => figures.forEach(({ state }, plot) => state && draw(plot))).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
})();

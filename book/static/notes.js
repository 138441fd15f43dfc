// Shows a note beside the words that it explains. Any element with data-note="ID" has a note; its text is that of the
// element with this id, which the page holds hidden. Opens at pointing, at keyboard focus, and at the first tap (the
// second tap follows the link); closes at Escape, at leaving, and at a tap elsewhere. The pointer may rest on the note.
(() => {
  "use strict";
  const OPEN_AFTER = 120; // ms: a pointer that only crosses a word opens nothing
  const CLOSE_AFTER = 250; // ms: time to reach the note itself
  const GAP = 6; // px between the words and the note
  const MARGIN = 8; // px between the note and the edge of the window

  const note = Object.assign(document.createElement("div"), { className: "note", hidden: true });
  note.setAttribute("aria-hidden", "true"); // spoken already: the words are described by the hidden text
  document.body.append(note);
  let shown = null; // the element whose note is open
  let timer;

  function open(words) {
    clearTimeout(timer);
    const text = document.getElementById(words.dataset.note);
    if (shown === words || !text) return;
    note.replaceChildren(...[...text.childNodes].map((child) => child.cloneNode(true)));
    note.hidden = false;
    shown = words;
    place();
  }

  /** Under the first line of the words, or above it where there is no room; inside the window either way. */
  function place() {
    const line = shown.getClientRects()[0];
    const { width, height } = note.getBoundingClientRect();
    const right = document.documentElement.clientWidth - MARGIN - width;
    const below = line.bottom + GAP + height <= innerHeight || line.top < height + GAP;
    note.style.left = `${Math.max(MARGIN, Math.min(line.left, right)) + scrollX}px`;
    note.style.top = `${(below ? line.bottom + GAP : line.top - GAP - height) + scrollY}px`;
  }

  function close() {
    clearTimeout(timer);
    note.hidden = true;
    shown = null;
  }

  const soon = (action, delay) => {
    clearTimeout(timer);
    timer = setTimeout(action, delay);
  };

  for (const words of document.querySelectorAll("[data-note]")) {
    let touched = false;
    words.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && soon(() => open(words), OPEN_AFTER));
    words.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && soon(close, CLOSE_AFTER));
    words.addEventListener("pointerdown", (event) => {
      touched = event.pointerType !== "mouse";
    });
    words.addEventListener("click", (event) => {
      if (touched && shown !== words) {
        event.preventDefault();
        open(words);
      }
    });
    words.addEventListener("focus", () => !touched && words.matches(":focus-visible") && open(words));
    words.addEventListener("blur", () => soon(close, CLOSE_AFTER));
  }
  note.addEventListener("pointerenter", () => clearTimeout(timer));
  note.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && soon(close, CLOSE_AFTER));
  document.addEventListener("keydown", (event) => event.key === "Escape" && close());
  document.addEventListener("pointerdown", (event) => shown && !note.contains(event.target) && !shown.contains(event.target) && close());
  addEventListener("resize", close);
})();

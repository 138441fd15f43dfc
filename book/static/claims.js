// Numbers of others in the text: hover, keyboard focus or a tap shows where one comes from. The popover itself is the browser's own
// (`popovertarget`: Escape and a click elsewhere close it), so without this script a click still opens it.
(() => {
  "use strict";
  const SHOW_MS = 150, HIDE_MS = 250; // long enough to cross the gap between a number and its note
  const GAP = 8; // px from the number, and at least from the edge of the window

  let busy = false; // while this script opens, closes or moves focus: focus events of its own making are not a reader's

  function quietly(action) {
    busy = true;
    action();
    busy = false;
  }

  function place(note, button) {
    const at = button.getBoundingClientRect(), width = document.documentElement.clientWidth;
    const left = Math.max(GAP, Math.min(at.left + at.width / 2 - note.offsetWidth / 2, width - note.offsetWidth - GAP));
    const below = at.bottom + GAP + note.offsetHeight <= innerHeight || at.top < note.offsetHeight + GAP;
    note.style.left = `${left + scrollX}px`;
    note.style.top = `${(below ? at.bottom + GAP : at.top - GAP - note.offsetHeight) + scrollY}px`;
  }

  for (const button of document.querySelectorAll("button.claim")) {
    const note = document.getElementById(button.getAttribute("popovertarget"));
    if (!note?.showPopover) continue;
    button.title = ""; // the note says the same, and a tooltip would lie over it
    let timer = 0, kept = false; // kept: asked for by a click or a key, so leaving the number does not close it

    const isOpen = () => note.matches(":popover-open");
    const isMine = () => isOpen() && note.dataset.of === button.dataset.number;
    const show = () => {
      clearTimeout(timer);
      if (isMine()) return;
      quietly(() => {
        if (isOpen()) note.hidePopover();
        note.dataset.of = button.dataset.number;
        note.classList.add("placed");
        note.showPopover();
        place(note, button);
      });
    };
    const hide = () => {
      clearTimeout(timer);
      kept = false;
      if (isMine()) quietly(() => note.hidePopover());
    };
    const later = (action, ms) => {
      clearTimeout(timer);
      timer = setTimeout(action, ms);
    };
    const leave = (event) => {
      if (event.pointerType === "mouse" && !kept) later(hide, HIDE_MS);
    };

    button.dataset.number = String(document.querySelectorAll("button.claim[data-number]").length);
    button.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && later(show, SHOW_MS));
    button.addEventListener("pointerleave", leave);
    note.addEventListener("pointerenter", () => isMine() && clearTimeout(timer));
    note.addEventListener("pointerleave", (event) => isMine() && leave(event));
    button.addEventListener("focus", () => !busy && button.matches(":focus-visible") && show());
    button.addEventListener("blur", (event) => note.contains(event.relatedTarget) || kept || later(hide, HIDE_MS));
    button.addEventListener("click", (event) => {
      event.preventDefault(); // else the browser would close what hovering or focus has just opened
      if (isMine() && kept) return hide();
      show();
      kept = true;
      if (event.detail === 0) note.querySelector("a")?.focus(); // a key, not a pointer: on to what the note offers
    });
    note.addEventListener("toggle", (event) => {
      if (event.newState === "closed") kept = false;
    });
    note.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !isMine()) return;
      event.preventDefault();
      hide();
      quietly(() => button.focus());
    });
  }

  /** The ledger leads to the cell that recorded a value: its code is opened and stands below the page's header. */
  function openRecorded() {
    const cell = document.getElementById(location.hash.slice(1))?.closest(".cell:has(.claim-record)");
    cell?.querySelector("details")?.setAttribute("open", "");
    cell?.scrollIntoView();
  }
  addEventListener("hashchange", openRecorded);
  addEventListener("load", () => requestAnimationFrame(openRecorded)); // after the browser's own jump
})();

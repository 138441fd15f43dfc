// The ledger's filter: a button a status. Without this script the buttons are a legend with counts.
(() => {
  "use strict";
  for (const ledger of document.querySelectorAll(".ledger:has(.ledger-statuses)")) {
    const buttons = [...ledger.querySelectorAll(".ledger-statuses button")];
    const rows = [...ledger.querySelectorAll("tr[data-status]")];
    const shown = ledger.querySelector(".ledger-shown");

    function apply() {
      const wanted = buttons.filter((button) => button.getAttribute("aria-pressed") === "true").map((button) => button.dataset.status);
      for (const row of rows) row.hidden = wanted.length > 0 && !wanted.includes(row.dataset.status);
      for (const section of ledger.querySelectorAll("tbody")) section.hidden = !section.querySelector("tr[data-status]:not([hidden])");
      const count = rows.filter((row) => !row.hidden).length;
      shown.textContent = wanted.length ? `${count} of ${rows.length} claims: ${wanted.join(", ")}` : `${count} claims`;
    }

    function clear() {
      for (const button of buttons) button.setAttribute("aria-pressed", "false");
      apply();
    }

    for (const button of buttons) {
      button.disabled = false;
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
        apply();
      });
    }
    addEventListener("hashchange", clear); // a link to a row that the filter hides
  }
})();

// What stands between a model's traits and a widget's controls, the same for every widget.
import { make } from "./controls.js";

/**
 * The traits `fields` of a model as a reader changes them. `drafts` holds, by field, the complaint about what stands in an input
 * while that is no value the model may take; `change` writes traits; `watch` redraws whenever something else changed them
 * (the kernel, the address) or `frame` got another width, and returns how to stop.
 */
export function binding(model, fields, update) {
  const drafts = new Map();
  let own = false; // true while this view changes the model
  function change(values) {
    own = true;
    for (const [field, value] of Object.entries(values)) {
      drafts.delete(field);
      model.set(field, value);
    }
    own = false;
    model.save_changes();
    update();
  }
  function resetButton(after = () => {}) {
    const button = make("button", { type: "button", class: "rb-button" }, "Reset");
    button.addEventListener("click", () => {
      drafts.clear();
      change(model.get("initial"));
      after();
    });
    return button;
  }
  function watch(frame) {
    let width = 0;
    const size = new ResizeObserver(() => {
      if (frame.clientWidth === width || frame.hidden) return;
      width = frame.clientWidth;
      update();
    });
    size.observe(frame);
    const outside = () => {
      if (own) return;
      drafts.clear();
      update();
    };
    for (const field of fields) model.on(`change:${field}`, outside);
    return () => {
      size.disconnect();
      for (const field of fields) model.off(`change:${field}`, outside);
    };
  }
  return { drafts, change, resetButton, watch };
}

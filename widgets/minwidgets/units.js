// Amounts as a reader says them.
import { thousands } from "./controls.js";

/** Three digits that count, and all digits before the point. */
export const digits = (value) => (value < 999.5 ? Number(value.toPrecision(3)).toString() : thousands(Math.round(value)));

/** An amount in the largest of `units` that leaves something before the point; each is a thousand of the one before. */
export function inUnits(value, units) {
  let unit = 0;
  let amount = value;
  for (; amount >= 999.5 && unit < units.length - 1; unit++) amount /= 1000;
  const exact = unit === 0 && Number.isInteger(amount);
  return `${exact || amount >= 999.5 ? thousands(Math.round(amount)) : amount.toPrecision(3)}\u00a0${units[unit]}`;
}
export const spokenBytes = (bytes) => inUnits(bytes, ["bytes", "kB", "MB", "GB", "TB"]);
export const spokenShort = (seconds) => inUnits(1e9 * seconds, ["ns", "µs", "ms", "s"]);

/** A cost in the unit that keeps it readable. */
export function spokenCost(seconds) {
  const [value, unit] = seconds >= 0.0001 || seconds === 0 ? [1000 * seconds, "ms"] : [1e6 * seconds, "µs"];
  return `${Number(value.toPrecision(3))}\u00a0${unit}`;
}

// Who carries the most at the bar, and at what cost: in words, and in a table.
import { make, thousands } from "./controls.js";
import { atBar, gpuHoursPerMillion } from "./pareto_formulas.js";
import { digits } from "./units.js";

const RATIO = "P/D";

/** Each curve as it stands at the bar: {name, prefills, gpus, at: {sessions, gpu, open} or null, fastest}; who carries most per GPU first. */
export function standings(curves, bar) {
  const fastest = (points) => Math.max(...points.map(({ user }) => user));
  const found = curves.map(({ name, prefills, gpus, points }) => ({ name, prefills, gpus, at: atBar(points, bar), fastest: fastest(points) }));
  return found.sort((one, other) => (other.at?.gpu ?? -1) - (one.at?.gpu ?? -1));
}

/** What a million output tokens cost. */
export const spokenBill = (gpu, price) => digits(gpuHoursPerMillion(gpu) * price);
const spokenSessions = ({ sessions, open }) => `${open ? "" : "about "}${thousands(Math.round(sessions))}`;

export function inWords(standing, bar, price) {
  const meeting = standing.filter(({ at }) => at);
  const slow = standing.filter(({ at }) => !at).map(({ name }) => name);
  if (!standing.length) return "Of this setting no point was simulated ahead.";
  if (!meeting.length) {
    const fastest = Math.max(...standing.map((one) => one.fastest));
    return `At ${digits(bar)} tok/s per user nothing wins: no simulated point of this setting is so fast. The fastest has ${digits(fastest)}.`;
  }
  const [{ name, gpus, at }, ...rest] = meeting;
  const bill = price ? `, ${spokenBill(at.gpu, price)} at ${digits(price)} an hour` : "";
  const served = (one) => one.at.sessions / one.prefills;
  const most = [...meeting].sort((one, other) => served(other) - served(one))[0];
  const who = name === most.name ? "It also" : most.name;
  const group = `${who} serves the most sessions for one prefill engine: ${spokenSessions({ ...most.at, sessions: served(most) })}.`;
  const others = rest.map((one) => `${one.name} ${digits(one.at.gpu)} (${spokenSessions(one.at)} sessions${one.at.open ? " and perhaps more" : ""})`);
  return [
    `At ${digits(bar)} tok/s per user ${rest.length ? `${name} carries the most per GPU:` : `${name} carries`} ${digits(at.gpu)} tok/s, with ` +
      `${spokenSessions(at)} sessions on ${gpus} GPUs; a million output tokens take ${digits(gpuHoursPerMillion(at.gpu))} GPU-hours${bill}.`,
    at.open ? "It is the curve’s last point: with more sessions it may carry more." : "",
    others.length ? `Then ${others.join(", ")}. ${group}` : "",
    slow.length ? `Not so fast at any simulated number of sessions: ${slow.join(", ")}.` : "",
  ].filter(Boolean).join(" ");
}

/** The standings as a table; `fill(standing, price)` writes it. */
export function verdictTable() {
  const [body, head] = [make("tbody", {}), make("tr", {})];
  const table = make("table", {}, make("thead", {}, head), body);
  const node = make("div", { class: "rb-table pe-verdict", tabindex: 0, role: "region", "aria-label": "The ratios at the bar" }, table);
  function fill(standing, price) {
    const bills = price ? ["cost of a million tokens"] : [];
    const columns = [RATIO, "GPUs", "sessions at the SLO", "tok/s per GPU", "GPU-hours a million tokens", ...bills];
    const cells = ({ sessions, gpu, open }) => [`${spokenSessions({ sessions, open })}${open ? " or more" : ""}`, digits(gpu),
      digits(gpuHoursPerMillion(gpu)), ...bills.map(() => spokenBill(gpu, price))];
    head.replaceChildren(...columns.map((name) => make("th", { scope: "col" }, name)));
    body.replaceChildren(...standing.map(({ name, gpus, at }) => make("tr", {}, make("th", { scope: "row" }, name),
      ...[gpus, ...(at ? cells(at) : ["none", ...columns.slice(3).map(() => "–")])].map((cell) => make("td", {}, String(cell))))));
  }
  return { node, fill };
}

// One point in numbers, and all points in a table.
import { blank, make, stat, tableBelow, thousands } from "./controls.js";
import { gpuHoursPerMillion } from "./pareto_formulas.js";
import { spokenBill } from "./pareto_verdict.js";
import { spokenTime } from "./step_drawing.js";
import { digits } from "./units.js";

const TIERS = { device: "on the GPUs", host: "in the host’s memory" };
const percent = (part) => `${digits(100 * part)}\u00a0%`;

/** Eight numbers; `show(value, sessions, price)` fills them, `clear` takes them out. */
export function pointStats() {
  const stats = {
    user: stat("E2E tok/s per user"), gpu: stat("output tok/s per GPU"), flight: stat("requests in flight"), bill: stat("GPU-hours a million tokens"),
    ttft: stat("first token, median"), queue: stat("queue wait, median"), hits: stat("of the prompts was cached"), dummies: stat("dummy steps of idle ranks"),
  };
  const say = (name, text, detail) => {
    stats[name].value.textContent = text;
    stats[name].detail.textContent = detail;
  };
  const tail = (seconds) => `a tenth wait longer than ${spokenTime(seconds)}`;
  function show(value, sessions, price) {
    const { output_tok_s_gpu: gpu, in_flight_mean: flight, hit_rate_by_tier: tiers, counts } = value;
    say("user", digits(value.e2e_tok_s_user), `${digits(value.e2e_interactivity_p90)} if the P90 is taken first, then inverted`);
    say("gpu", digits(gpu), `${digits(value.output_tok_s)} tok/s on ${value.gpus} GPUs`);
    say("flight", digits(flight), `${percent(flight / sessions)} of the sessions`);
    say("bill", digits(gpuHoursPerMillion(gpu)), price ? `cost ${spokenBill(gpu, price)} at ${digits(price)} an hour` : "give a price to see their cost");
    say("ttft", spokenTime(value.ttft_s_p50), tail(value.ttft_s_p90));
    say("queue", spokenTime(value.queue_s_p50), tail(value.queue_s_p90));
    say("hits", percent(value.hit_rate), Object.entries(tiers).map(([tier, part]) => `${percent(part)} ${TIERS[tier] || tier}`).join(", "));
    // The simulator refuses a run in which less comes out than went in.
    say("dummies", thousands(counts.dummies), `of ${thousands(counts.steps)} steps; ${thousands(counts.tokens_out)} tokens out, as many as were asked for`);
  }
  return { node: make("div", { class: "rb-stats" }, make("dl", {}, ...Object.values(stats).map(({ node }) => node))), show, clear: () => blank(stats) };
}

const POINT_COLUMNS = {
  GPUs: ({ value }) => value.gpus, sessions: ({ sessions }) => thousands(sessions), "tok/s per user": ({ user }) => digits(user),
  "tok/s per GPU": ({ gpu }) => digits(gpu), "in flight": ({ value }) => digits(value.in_flight_mean),
  "first token p50": ({ value }) => spokenTime(value.ttft_s_p50), "first token p90": ({ value }) => spokenTime(value.ttft_s_p90),
  cached: ({ value }) => percent(value.hit_rate), "window, s": ({ value }) => thousands(value.window_s),
};

/** The curves' points in a table that is written when it is opened; `fill(curves)` tells it of others. */
export function pointsTable() {
  const { node, body } = tableBelow("All points in a table", ["P/D", ...Object.keys(POINT_COLUMNS)]);
  let now = [];
  const cells = (point) => Object.values(POINT_COLUMNS).map((say) => make("td", {}, String(say(point))));
  const row = (name, point) => make("tr", {}, make("th", { scope: "row" }, name), ...cells(point));
  const write = () => body.replaceChildren(...(node.open ? now : []).flatMap(({ name, points }) => points.map((point) => row(name, point))));
  node.addEventListener("toggle", write);
  const fill = (curves) => {
    now = curves;
    write();
  };
  return { node, fill };
}

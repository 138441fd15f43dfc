// Which deployment wins at a bar, and what its tokens cost: the closed formulas of minengine/arithmetic/serving.py, said again for the
// page. Tests hold the two equal. A point is {sessions, user, gpu}: tok/s per user and output tok/s per GPU.

/** GPU-hours that a million output tokens take. */
export const gpuHoursPerMillion = (gpu) => 1e6 / (3600 * gpu);

/** The most that a curve (points by rising sessions) carries with each user at `bar` or above: {sessions, gpu, open}, or null. */
export function atBar(curve, bar) {
  for (let i = curve.length - 1; i >= 0; i--) {
    const [point, after] = [curve[i], curve[i + 1]];
    if (point.user < bar) continue;
    if (!after) return { sessions: point.sessions, gpu: point.gpu, open: true };
    const way = (point.user - bar) / (point.user - after.user);
    return { sessions: point.sessions + way * (after.sessions - point.sessions), gpu: point.gpu + way * (after.gpu - point.gpu), open: false };
  }
  return null;
}

/** Those of the points that no other one beats in both, from the fastest for a user to the slowest. */
export function frontier(points) {
  const best = [];
  for (const point of [...points].sort((one, other) => other.user - one.user || other.gpu - one.gpu)) {
    if (!best.length || point.gpu > best.at(-1).gpu) best.push(point);
  }
  return best;
}

/** Curves of the points that share all settings but P/D ratio and sessions with `now`: [{prefills, decoders, points}], by ratio. */
export function curvesOf(known, now, sameButRatio) {
  const found = new Map();
  for (const { settings, value } of known) {
    if (!value || !sameButRatio(settings, now)) continue;
    const name = `${settings.prefills}:${settings.decoders}`;
    if (!found.has(name)) found.set(name, { name, prefills: settings.prefills, decoders: settings.decoders, gpus: value.gpus, points: [] });
    found.get(name).points.push({ sessions: settings.sessions, user: value.e2e_tok_s_user, gpu: value.output_tok_s_gpu, settings, value });
  }
  const all = [...found.values()].sort((one, other) => other.decoders / other.prefills - one.decoders / one.prefills);
  for (const one of all) one.points.sort((a, b) => a.sessions - b.sessions);
  return all;
}

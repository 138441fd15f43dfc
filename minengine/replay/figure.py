"""Replays drawn above each other: a lane a session, a bar a request, in the same seconds and the same order. An SVG, made without any library."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from ..config import ConfigError
from ..workload.report import Record

__all__ = ["timelines"]

WIDTH, LEFT, RIGHT, TOP, LANE, GAP, PANEL = 1120, 150, 16, 46, 14, 4, 44
PARTS = {"wait": "#c8c8c8", "prefill": "#e69f00", "decode": "#0072b2", "failed": "#d55e00"}  # told apart by lightness as well
STEPS = (1, 2, 5)


def timelines(replays: Mapping[str, Iterable[Record]], seconds: float, *, most: int = 24) -> str:
    """One panel a replay. A session's lane is as high as all others and is shared by its agents, each in a strip of its own.

    Args:
        replays: records by label, times in seconds since the beginning.
        seconds: of the axis.
        most: sessions that are shown: those that arrive first in the first replay, and in every panel the same.

    Raises:
        ConfigError: nothing to draw.
    """
    panels = {label: [r for r in records if r.arrival_s < seconds] for label, records in replays.items()}
    every = [r for records in panels.values() for r in records]
    if not every or not seconds > 0:
        raise ConfigError("plot: there is no request to draw; replay for a longer time")
    lanes = list(dict.fromkeys(r.session for records in panels.values() for r in sorted(records, key=lambda r: r.arrival_s)))[:most]
    agents = {lane: sorted({r.agent for r in every if r.session == lane}) for lane in lanes}
    height = TOP + len(panels) * (PANEL + len(lanes) * (LANE + GAP)) + 30
    scale = (WIDTH - LEFT - RIGHT) / seconds
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
           'font-family="sans-serif" font-size="11">',
           f"<title>{escape(' and '.join(panels))}: {len(lanes)} sessions over {seconds:g} s</title>",
           "<desc>A lane a session, a bar a request: waiting, then prefill, then decode. Every panel has the same sessions and seconds.</desc>",
           f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *_legend()]
    top = TOP
    for label, records in panels.items():
        hidden = len({r.session for r in records} - set(lanes))
        more = f", {hidden} more sessions not shown" if hidden else ""
        out.append(f'<text x="8" y="{top + 24}" font-size="14" font-weight="bold" fill="#222">{escape(label)}: {len(records)} requests{more}</text>')
        top += PANEL
        bottom = top + len(lanes) * (LANE + GAP)
        out += _grid(seconds, scale, top, bottom)
        for i, lane in enumerate(lanes):
            y = top + i * (LANE + GAP)
            out.append(f'<text x="{LEFT - 6}" y="{y + LANE - 3}" text-anchor="end" fill="#444">{escape(lane[-22:])}</text>')
            strip = LANE / len(agents[lane])
            for r in (r for r in records if r.session == lane):
                out += _bar(r, y + agents[lane].index(r.agent) * strip, strip, scale, seconds)
        top = bottom
    out.append(f'<text x="{LEFT}" y="{height - 8}" fill="#444">seconds since the beginning</text></svg>')
    return "\n".join(out) + "\n"


def _bar(r: Record, y: float, height: float, scale: float, seconds: float) -> list[str]:
    """The parts of one request, as far as it has come; where nobody says when it was computed first, the wait is told with the prefill."""
    end_s = seconds if r.end_s is None else min(r.end_s, seconds)
    if r.error is not None:
        parts = [("failed", r.arrival_s, end_s)]
    else:
        admitted_s = r.arrival_s if r.admitted_s is None and r.first_token_s is not None else r.admitted_s
        stamps = [r.arrival_s, *(end_s if stamp is None else min(stamp, end_s) for stamp in (admitted_s, r.first_token_s)), end_s]
        parts = list(zip(("wait", "prefill", "decode"), stamps, stamps[1:]))
    told = (f"{r.session}, agent {r.agent}, request {r.number}: {r.input_tokens} tokens in, {r.cached_tokens} of them cached, {r.output_tokens} out, "
            f"from {r.arrival_s:.3f} s to {'the end' if r.end_s is None else f'{r.end_s:.3f} s'}{f', failed: {r.error}' if r.error else ''}")
    bars = "".join(f'<rect x="{LEFT + begin * scale:.2f}" y="{y:.2f}" width="{max(0.4, (end - begin) * scale):.2f}" height="{height - 0.5:.2f}" '
                   f'fill="{PARTS[part]}"/>' for part, begin, end in parts if end > begin or part == "failed")
    return [f"<g><title>{escape(told)}</title>{bars}</g>"] if bars else []


def _legend() -> list[str]:
    out = []
    for i, (part, colour) in enumerate(PARTS.items()):
        out.append(f'<rect x="{LEFT + 100 * i}" y="14" width="14" height="10" fill="{colour}"/>'
                   f'<text x="{LEFT + 100 * i + 19}" y="23" fill="#222">{part}</text>')
    return out


def _grid(seconds: float, scale: float, top: float, bottom: float) -> list[str]:
    """Lines at round seconds, about ten of them."""
    step = next(s * 10**e for e in range(-6, 9) for s in STEPS if seconds / (s * 10**e) <= 12)
    out = []
    for i in range(int(seconds / step) + 1):
        x = LEFT + i * step * scale
        out.append(f'<line x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{bottom}" stroke="#e3e3e3"/>'
                   f'<text x="{x:.1f}" y="{top - 7}" text-anchor="middle" fill="#666">{i * step:g}</text>')
    return out

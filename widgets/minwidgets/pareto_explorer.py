"""The widget Pareto explorer: output tokens a second per GPU over tokens a second per user, for deployments that the simulator runs.

    ParetoExplorer()
    ParetoExplorer(sessions=96, decoders=3, slo_tok_s=80, gpu_hour_price=4.0)
    ParetoExplorer(machine="my-rack.yml", agents=fit(sessions).mapping(), known=[])      # one's own machine and workload

Nothing here simulates or counts: a point is what `minengine.simulate.sizing.point` gives. Those of the stored grid the page has at once.
Any other one is simulated when a reader asks for it: by Python where a kernel runs, on a static page by the page's own Python, of the same files
and with the same result.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import traitlets
from minengine.arithmetic import AtBar, at_bar, gpu_hours_per_million
from minengine.config import ConfigError
from minengine.simulate.answer import answer
from minengine.simulate.grid import Grid, stored
from minengine.simulate.machine import machine as read_machine
from minengine.simulate.sizing import COUNTS, DEFAULTS, DTYPES

from .modules import bundle, styles
from .page_widget import PageWidget, between, refuse_unknown, within

__all__ = ["ParetoExplorer"]

CALL = "minengine.simulate.sizing.point"
SETTINGS = tuple(DEFAULTS)
AMOUNTS = {"slo_tok_s": (1.0, 1000.0), "gpu_hour_price": (0.0, 1000.0)}
HERE = {"warm_s": 600, "window_s": 300}  # of a point that is asked for: warmed up as the grid’s are, in half of their time
REPORTED = {"sessions": 66, "user": 101, "gpu": 100}  # claims c66_sessions, c66_tok_s_user, c66_tok_s_gpu of book/claims.yml
TABLES: dict[str, Any] = {
    "ratios": ["1:4", "1:3", "1:2", "1:6", "1:1"],  # in the order of their marks
    "prefill": ["DEP8", "TEP8"],
    "decode": ["TP4", "TP8", "DEP8"],
    "kv_cache_dtype": list(DTYPES),
    "max_num_batched_tokens": [2048, 4096, 8192],
    "gap_cap_s": [10, 30, 60, 300],
    "names": {"nvfp4_fp8_ds_mla": "4 bits", "fp8": "8 bits"},
    "slo": [20, 200, 1],
    "reported": REPORTED,
}


class ParetoExplorer(PageWidget):
    """Curves of a P/D ratio each over sessions, the bar of an SLO, who wins there and at what cost.

    Every trait is two-way while a kernel runs; a setting that is in `known` is answered at once, any other one by a simulation, during which the
    kernel is busy. A value outside its limits is a TraitError that names the trait. Settings that do not fit together are refused by the
    constructor and by `point`; the page shows the same sentence.

    Args:
        machine: name, file or mapping of a machine of kind `model`; agents: the mapping of an `AgentModel`. Left out: those of the grid.
        known: points that the page has at once, as {settings, value}. Left out: the stored grid's, if machine and agents are its own.
    """

    _esm = bundle("pareto_explorer.js")
    _css = styles("controls.css", "pareto_explorer.css")

    prefill = traitlets.Unicode(DEFAULTS["prefill"], help="topology of a prefill engine").tag(sync=True)
    prefills = traitlets.Int(DEFAULTS["prefills"], help="prefill engines").tag(sync=True)
    decode = traitlets.Unicode(DEFAULTS["decode"], help="topology of a decode engine").tag(sync=True)
    decoders = traitlets.Int(DEFAULTS["decoders"], help="decode engines").tag(sync=True)
    kv_cache_dtype = traitlets.Enum(DTYPES, DEFAULTS["kv_cache_dtype"], help="of the cache's rows").tag(sync=True)
    max_num_batched_tokens = traitlets.Int(DEFAULTS["max_num_batched_tokens"], help="of a step of a prefill rank").tag(sync=True)
    sessions = traitlets.Int(DEFAULTS["sessions"], help="that are live at any time").tag(sync=True)
    gap_cap_s = traitlets.Int(DEFAULTS["gap_cap_s"], help="longest gap between requests that is replayed").tag(sync=True)
    seed = traitlets.Int(DEFAULTS["seed"], help="of all that is drawn").tag(sync=True)
    slo_tok_s = traitlets.Float(100.0, help="the bar: E2E tok/s per user").tag(sync=True)
    gpu_hour_price = traitlets.Float(0.0, help="in any currency; 0: GPU-hours alone are counted").tag(sync=True)
    answer = traitlets.Dict(help="{settings, value} or {settings, error}, of minengine.simulate.answer").tag(sync=True)
    known = traitlets.List(help="points that the page has without asking: the grid's, and those that were asked for").tag(sync=True)
    given = traitlets.Dict(help="arguments of the call that no setting changes: of the deployment, the loop, the agents, the window").tag(sync=True)
    initial = traitlets.Dict(help="what Reset goes back to: the settings as they were made").tag(sync=True)
    tables = traitlets.Dict(help="choices, and where the points come from, for the page").tag(sync=True)
    limits = traitlets.Dict({name: list(pair) for name, pair in {**COUNTS, **AMOUNTS}.items()}, read_only=True, help="least and most of each").tag(sync=True)
    call = traitlets.Unicode(CALL, read_only=True, help="the function that answers").tag(sync=True)
    takes = traitlets.List(list(SETTINGS), read_only=True, help="the traits that are its arguments").tag(sync=True)
    engine = traitlets.Unicode("", help="of a static page: whether its Python is loading, ready, or why there is none").tag(sync=True)

    def __init__(self, *, machine: Any = None, agents: Mapping[str, Any] | None = None, known: Sequence[Mapping[str, Any]] | None = None,
                 **settings: Any) -> None:
        options = (*SETTINGS, *AMOUNTS)
        refuse_unknown(settings, options, ("machine", "agents", "known"))
        grid = stored()
        own = machine is not None or agents is not None
        given = {**grid.given, **HERE}
        if machine is not None:
            given["deployment"] = {**given["deployment"], "machine": read_machine(machine).mapping()}  # a page has no files to look it up in
        if agents is not None:
            given["agents"] = agents
        points = known if known is not None else [] if own else grid.points
        super().__init__(given=given, known=[dict(point) for point in points], tables={**TABLES, **_told(grid, points)}, **settings)
        self.initial = {name: getattr(self, name) for name in options}
        self._ask(None)
        self.point  # an author's mistake is an error here, not a sentence in the page
        self.observe(self._ask, list(SETTINGS))

    @traitlets.validate(*COUNTS)
    def _within_limits(self, proposal: Any) -> int:
        name = proposal["trait"].name
        return within(COUNTS[name], name, proposal["value"])

    @traitlets.validate(*AMOUNTS)
    def _between(self, proposal: Any) -> float:
        name = proposal["trait"].name
        return between(AMOUNTS[name], name, proposal["value"])

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SETTINGS}

    def _ask(self, _: Any) -> None:
        now = self._settings()
        found = next((one for one in self.known if one["settings"] == now), None)
        if found is None:
            found = {**answer(CALL, {**self.given, **now}), "settings": now}
            if "value" in found:
                self.known = [*self.known, found]
        self.answer = found

    @property
    def point(self) -> dict[str, Any]:
        """What `minengine.simulate.sizing.point` gives for the traits as they are now.

        Raises:
            ConfigError: it refuses them.
        """
        if "error" in self.answer:
            raise ConfigError(self.answer["error"])
        return self.answer["value"]

    @property
    def standings(self) -> dict[str, AtBar | None]:
        """By P/D ratio, what its curve carries at the SLO with everything else as it is set: None where no point of it is so fast. The best first."""
        curves: dict[str, list[tuple[float, float, float]]] = {}
        free = ("prefills", "decoders", "sessions")
        now = self._settings()
        for one in self.known:
            if all(one["settings"][name] == now[name] for name in SETTINGS if name not in free):
                value, (prefills, decoders, sessions) = one["value"], (one["settings"][name] for name in free)
                curves.setdefault(f"{prefills}:{decoders}", []).append((sessions, value["e2e_tok_s_user"], value["output_tok_s_gpu"]))
        found = {name: at_bar(sorted(points), self.slo_tok_s) for name, points in curves.items()}
        return dict(sorted(found.items(), key=lambda one: -one[1].tok_s_gpu if one[1] else 0.0))

    def _in_words(self) -> str:
        what = (f"Pareto explorer (simulated): {self.prefills} x {self.prefill} to {self.decoders} x {self.decode}, rows {self.kv_cache_dtype}, "
                f"{self.sessions} sessions, gaps up to {self.gap_cap_s} s")
        try:
            now = self.point
        except ConfigError as error:
            return f"{what}: {error}"
        told = [f"{name} {at.tok_s_gpu:.1f} tok/s per GPU with {'' if at.open else 'about '}{at.sessions:.0f} sessions, "
                f"{gpu_hours_per_million(at.tok_s_gpu):.2f} GPU-hours a million output tokens" if at else f"{name} is not so fast"
                for name, at in self.standings.items()]
        return (f"{what}: {now['e2e_tok_s_user']:.1f} tok/s per user, {now['output_tok_s_gpu']:.1f} output tok/s per GPU, {now['in_flight_mean']:.1f} "
                f"requests in flight. At {self.slo_tok_s:g} tok/s per user: {'; '.join(told)}. Reported: 1:4 with {REPORTED['sessions']} sessions, "
                f"{REPORTED['user']} and {REPORTED['gpu']}.")


def _told(grid: Grid, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the page says of where its points come from."""
    from_grid = bool(points) and points is grid.points
    told = f"Points were simulated ahead by {grid.command}, {grid.date}. Agents are drawn from a model that was fitted to {grid.given['agents']['fitted']}."
    return {"source": told if from_grid else "",
            "window_s": grid.given["window_s"] if from_grid else HERE["window_s"], "here_s": HERE["window_s"]}

"""The Pareto explorer without a browser: what the traits take, that a kernel answers as the simulator does, and what is said of the curves."""
import re

import pytest

from minengine.arithmetic import at_bar, gpu_hours_per_million
from minengine.claims import read_claims
from minengine.config import ConfigError
from minengine.simulate.grid import stored
from minengine.simulate.machine import machine
from minengine.simulate.sizing import COUNTS, DEFAULTS, point

traitlets = pytest.importorskip("traitlets", reason="pip install -c constraints.txt -e .[book]")
pytest.importorskip("anywidget", reason="pip install -c constraints.txt -e .[book]")

from minwidgets import ParetoExplorer, pareto_explorer  # noqa: E402
from minwidgets.modules import bundle  # noqa: E402
from minwidgets.page_widget import VIEW_MIME  # noqa: E402
from minwidgets.pareto_explorer import AMOUNTS, HERE, REPORTED  # noqa: E402


@pytest.fixture
def grid():
    return stored()


@pytest.fixture
def short(monkeypatch):
    """What is asked for here takes few simulated seconds."""
    monkeypatch.setattr(pareto_explorer, "HERE", {"warm_s": 10, "window_s": 30})
    return {"warm_s": 10, "window_s": 30}


def test_it_opens_on_the_reported_deployment_with_the_stored_points(grid):
    widget = ParetoExplorer()
    assert widget.answer == next(one for one in grid.points if one["settings"] == DEFAULTS)
    assert widget.known == list(grid.points) and widget.given == {**grid.given, **HERE} and widget.initial["sessions"] == REPORTED["sessions"]
    assert widget.tables["window_s"] == grid.given["window_s"] and grid.date in widget.tables["source"]


def test_the_reported_point_is_the_registry_s():
    claims = read_claims()
    assert REPORTED == {"sessions": claims["c66_sessions"].value, "user": claims["c66_tok_s_user"].value, "gpu": claims["c66_tok_s_gpu"].value}


def test_a_setting_that_is_not_stored_is_simulated_once(grid, short):
    widget = ParetoExplorer(slo_tok_s=120)
    stood = len(widget.known)
    widget.sessions = 3
    asked = {**DEFAULTS, "sessions": 3}
    assert widget.point == point(**asked, **{**grid.given, **short}) and widget.answer["settings"] == asked
    assert len(widget.known) == stood + 1 and widget.known[-1] == widget.answer
    widget.sessions = 66
    widget.sessions = 3
    assert len(widget.known) == stood + 1 and widget.point["window_s"] == 30


def test_the_slo_and_the_price_ask_for_nothing(monkeypatch):
    widget = ParetoExplorer()
    monkeypatch.setattr(pareto_explorer, "answer", lambda *asked: pytest.fail(f"asked: {asked}"))
    widget.slo_tok_s, widget.gpu_hour_price = 80, 2.5
    widget.kv_cache_dtype = "fp8"  # is stored
    assert widget.answer["settings"]["kv_cache_dtype"] == "fp8"


@pytest.mark.parametrize("name", [*COUNTS, *AMOUNTS])
def test_values_outside_their_limits_are_refused_by_name_and_change_nothing(name):
    least, most = {**COUNTS, **AMOUNTS}[name]
    widget = ParetoExplorer()
    before = getattr(widget, name)
    for wrong in (least - 0.5 if name in AMOUNTS else least - 1, most + 1, "many", float("nan")):
        with pytest.raises(traitlets.TraitError, match=name):
            setattr(widget, name, wrong)
        with pytest.raises(traitlets.TraitError, match=name):
            ParetoExplorer(**{name: wrong})
    assert getattr(widget, name) == before


@pytest.mark.parametrize("traits, message", [
    ({"chunk": 3}, "unknown option 'chunk'; known options: machine, agents, known, prefill"), ({"decode": "DEP"}, "topology='DEP'"),
    ({"machine": "abacus"}, "machine='abacus'"), ({"agents": {"turns": 3}}, "agent model"),
])
def test_an_authors_mistake_is_an_error_at_once(traits, message, short):
    with pytest.raises(ValueError, match=re.escape(message)):
        ParetoExplorer(**traits)


def test_one_s_own_machine_has_no_stored_points(short):
    slow = machine("gb200-nvl72").but(launch_s=2 * machine("gb200-nvl72")["launch_s"])
    own, ours = (ParetoExplorer(machine=given, known=None if given else [], sessions=2, decoders=1) for given in (slow, None))
    assert len(own.known) == len(ours.known) == 1 and own.tables["source"] == ours.tables["source"] == ""
    assert own.point["itl_s_mean"] > ours.point["itl_s_mean"]


def test_who_carries_most_at_the_bar_comes_first(grid):
    widget = ParetoExplorer(slo_tok_s=90)
    curves = {}
    for one in grid.points:
        asked, value = one["settings"], one["value"]
        if {**asked, "decoders": 0, "sessions": 0} == {**DEFAULTS, "decoders": 0, "sessions": 0}:
            curves.setdefault(f"1:{asked['decoders']}", []).append((asked["sessions"], value["e2e_tok_s_user"], value["output_tok_s_gpu"]))
    wanted = {name: at_bar(sorted(points), 90) for name, points in curves.items()}
    assert widget.standings == wanted and len(wanted) > 2
    carried = [at.tok_s_gpu if at else 0 for at in widget.standings.values()]
    assert carried == sorted(carried, reverse=True)


def test_a_view_says_in_words_what_it_shows(short):
    widget = ParetoExplorer()
    data, metadata = widget._repr_mimebundle_()
    assert VIEW_MIME in data and metadata[VIEW_MIME]["minwidget"] == data["text/plain"]
    now, first = widget.point, next(iter(widget.standings.items()))
    assert f"66 sessions, gaps up to 10 s: {now['e2e_tok_s_user']:.1f} tok/s per user, {now['output_tok_s_gpu']:.1f} output tok/s per GPU" in data["text/plain"]
    assert f"{first[0]} {first[1].tok_s_gpu:.1f} tok/s per GPU" in data["text/plain"]
    assert f"{gpu_hours_per_million(first[1].tok_s_gpu):.2f} GPU-hours" in data["text/plain"]
    assert data["text/plain"].endswith("Reported: 1:4 with 66 sessions, 101 and 100.")
    widget.decode = "TP3"
    assert widget._in_words().endswith(widget.answer["error"])
    with pytest.raises(ConfigError):
        widget.point


def test_the_drawing_is_one_module_whose_names_differ():
    text = bundle("pareto_explorer.js")
    assert not re.search(r"^import ", text, re.MULTILINE) and text.count("export default") == 1
    names = re.findall(r"^(?:export )?(?:const|let|function) (\w+)", text, re.MULTILINE)
    assert len(set(names)) == len(names) and {"render", "paretoDrawing", "atBar", "binding"} <= set(names)
    assert ParetoExplorer()._esm == text and "</script" not in text

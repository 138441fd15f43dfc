"""The widget Prefill and decode without a browser: what the traits take, and that a kernel answers as the simulator does."""
import re

import pytest

from minengine.config import ConfigError
from minengine.simulate.cost import StepCost
from minengine.simulate.disagg import AMOUNTS, COUNTS, prefill_decode

traitlets = pytest.importorskip("traitlets", reason="pip install -c constraints.txt -e .[book]")
pytest.importorskip("anywidget", reason="pip install -c constraints.txt -e .[book]")

from minwidgets import PrefillDecode  # noqa: E402
from minwidgets.modules import bundle  # noqa: E402
from minwidgets.page_widget import VIEW_MIME  # noqa: E402
from minwidgets.prefill_decode import EXAMPLES  # noqa: E402


def test_every_change_is_answered_by_the_simulator():
    widget = PrefillDecode(cost=StepCost(base_s=0.01))
    cost = {name: getattr(StepCost(base_s=0.01), name) for name in ("base_s", "decode_s", "prefill_s", "attention_s")}
    assert widget.timelines == prefill_decode(cost=cost) and len(widget.known) == 1 + len(EXAMPLES)
    widget.pd_slowdown = 1.5
    widget.load_admission = "poll"
    widget.streams = 5
    assert widget.timelines == prefill_decode(streams=5, pd_slowdown=1.5, load_admission="poll", cost=cost)
    assert widget.answer["settings"]["streams"] == 5 and widget.initial["streams"] == 3


@pytest.mark.parametrize("name", [*COUNTS, *AMOUNTS])
def test_values_outside_their_limits_are_refused_by_name_and_change_nothing(name):
    least, most = {**COUNTS, **AMOUNTS}[name]
    widget = PrefillDecode(examples=())
    before = getattr(widget, name)
    for wrong in (least - 0.5 if name in AMOUNTS else least - 1, most + 1, "many", float("nan")):
        with pytest.raises(traitlets.TraitError, match=name):
            setattr(widget, name, wrong)
        with pytest.raises(traitlets.TraitError, match=name):
            PrefillDecode(**{name: wrong})
    assert getattr(widget, name) == before


@pytest.mark.parametrize("traits, message", [
    ({"small_budget": 600}, "small_budget=600: use at most large_budget, 512"),
    ({"streams": 24, "small_budget": 16}, "max_num_batched_tokens=16 is below max_num_seqs=25"),
    ({"chunk": 3}, "unknown option 'chunk'; known options: cost, examples, streams"),
])
def test_an_authors_mistake_is_an_error_at_once(traits, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        PrefillDecode(**traits)


def test_a_view_says_in_words_what_it_shows():
    widget = PrefillDecode(examples=())
    data, metadata = widget._repr_mimebundle_()
    assert VIEW_MIME in data and metadata[VIEW_MIME]["minwidget"] == data["text/plain"]
    now = prefill_decode()
    for name, text in (("large", "one engine, budget 512"), ("small", "one engine, budget 64"), ("apart", "apart, 1 GB/s, steps 1 times as long")):
        assert f"{text}: longest gap {1000 * now[name]['longest_gap_s']:,.0f} ms, p90 {1000 * now[name]['p90_gap_s']:,.0f} ms" in data["text/plain"]
    widget.small_budget = 600
    assert "use at most large_budget, 512" in widget._in_words()
    with pytest.raises(ConfigError, match="use at most large_budget, 512"):
        widget.timelines


def test_the_drawing_is_one_module_whose_names_differ():
    text = bundle("prefill_decode.js")
    assert not re.search(r"^import ", text, re.MULTILINE) and text.count("export default") == 1
    names = re.findall(r"^(?:export )?(?:const|let|function) (\w+)", text, re.MULTILINE)
    assert len(set(names)) == len(names) and {"render", "timelinesDrawing", "addHatch", "binding"} <= set(names)
    assert PrefillDecode(examples=())._esm == text and "</script" not in text

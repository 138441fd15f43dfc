"""The widget Kernel floor without a browser: what the traits take, what they amount to, and whose numbers it shows."""
import re
from pathlib import Path

import pytest
import yaml

from minengine.arithmetic import CARDS, DECODE_ROWS, decode_floor
from minengine.config import ConfigError

traitlets = pytest.importorskip("traitlets", reason="pip install -c constraints.txt -e .[book]")
pytest.importorskip("anywidget", reason="pip install -c constraints.txt -e .[book]")

from minwidgets import KernelFloor  # noqa: E402
from minwidgets.kernel_floor import AMOUNTS, COUNTS, REPORTED  # noqa: E402
from minwidgets.modules import bundle  # noqa: E402
from minwidgets.page_widget import VIEW_MIME  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


def test_the_default_is_the_sources_launch():
    widget = KernelFloor()
    assert {name: getattr(widget, name) for name in REPORTED["setting"]} == REPORTED["setting"]
    assert widget.numbers == {path: decode_floor(path, CARDS["GB200"], 15, 16, 2048) for path in DECODE_ROWS}
    assert widget.reported_us == {"native": 12.0, "staged": 17.7, "fp8": 13.7}


def test_reported_times_are_the_claims_and_of_their_setting_only():
    claims = {one["id"]: one for part in yaml.safe_load((ROOT / "book/claims.yml").read_text(encoding="utf8")).values() for one in part}
    for path, us in REPORTED["us"].items():
        claim = claims[f"kernel_{path}_us"]
        assert (claim["value"], claim["label"], claim["unit"]) == (us, "reported", "µs")
    for name, value in {"query_tokens": 16, "heads": 8, "top_k": 1024, "fill": 0.99, "card": "B200"}.items():
        assert KernelFloor(**{name: value}).reported_us == {}, name


def test_a_readers_own_card():
    widget = KernelFloor(card="own", memory_tb_s=4.2, matrix_tflop_s=700, heads=64)
    assert (widget.peaks.memory_bytes_s, widget.peaks.matrix_flops_s) == (4.2e12, 7e14)
    assert widget.numbers["native"] == decode_floor("native", widget.peaks, 15, 64, 2048)
    assert "your own card" in widget._in_words()
    widget.card = "H100"
    assert widget.peaks == CARDS["H100"]  # and what was given waits
    assert widget.memory_tb_s == 4.2


@pytest.mark.parametrize("name", [*COUNTS, *AMOUNTS])
def test_values_outside_their_limits_are_refused_by_name_and_change_nothing(name):
    least, most = {**COUNTS, **AMOUNTS}[name]
    widget = KernelFloor()
    before = getattr(widget, name)
    for wrong in (least - 1, most + 1, "many", float("nan")):
        with pytest.raises(traitlets.TraitError, match=name):
            setattr(widget, name, wrong)
        with pytest.raises(traitlets.TraitError, match=name):
            KernelFloor(**{name: wrong})
    assert getattr(widget, name) == before
    setattr(widget, name, least)
    setattr(widget, name, most)
    assert getattr(widget, name) == most


def test_a_refusal_says_what_to_use():
    with pytest.raises(traitlets.TraitError, match="heads=0: use a whole number from 1 to 512"):
        KernelFloor(heads=0)
    with pytest.raises(traitlets.TraitError, match="fill=1.5: use a number from 0 to 1"):
        KernelFloor(fill=1.5)
    with pytest.raises(traitlets.TraitError, match="card"):
        KernelFloor(card="H300")
    with pytest.raises(ConfigError, match="unknown option 'head'; known options: query_tokens, heads, top_k, fill, memory_tb_s"):
        KernelFloor(head=3)
    with pytest.raises(ConfigError, match="unknown option 'tables'"):
        KernelFloor(tables={})
    with pytest.raises(traitlets.TraitError, match="tables"):
        KernelFloor().tables = {}


def test_every_product_of_the_limits_is_a_count_that_the_page_can_hold():
    extreme = KernelFloor(**{name: most for name, (_, most) in COUNTS.items()}).numbers
    assert all(max(floor.flops, floor.nbytes) < 2**53 for floor in extreme.values())


def test_reset_knows_the_traits_as_made():
    widget = KernelFloor(heads=64)
    widget.heads = 8
    assert widget.initial["heads"] == 64 and set(widget.initial) == {*COUNTS, *AMOUNTS, "card"}


def test_a_view_says_in_words_what_it_shows():
    data, metadata = KernelFloor()._repr_mimebundle_()
    assert VIEW_MIME in data and metadata[VIEW_MIME]["minwidget"] == data["text/plain"]
    for text in ("15 queries, 16 heads and lists of 2,048 slots, 100% full, on GB200", "native 11.46 MB, at least 1.43 µs (bound by memory), reported 12.0 µs",
                 "staged 46.97 MB, at least 5.87 µs (bound by memory), reported 17.7 µs", "bfloat16 36.03 MB, at least 4.50 µs (bound by memory)."):
        assert text in data["text/plain"]
    assert "reported" not in KernelFloor(heads=64)._in_words() and "(bound by memory, then compute)" in KernelFloor(heads=128)._in_words()


def test_the_drawing_is_one_module_with_its_imports_in_place():
    text = bundle("kernel_floor.js")
    assert not re.search(r"^import ", text, re.MULTILINE) and text.count("export default") == 1
    for name in ("numbers", "floorDrawing", "binding", "keptNodes", "render"):
        assert text.count(f"function {name}(") == 1
    assert KernelFloor()._esm == text and "</script" not in text

"""The widget Copy count without a browser: what the traits take, what they amount to, and whose costs it starts with."""
import re
from pathlib import Path

import pytest
import yaml

from minengine.arithmetic import copy_costs, request_copies, transfer_time_s
from minengine.config import ConfigError

traitlets = pytest.importorskip("traitlets", reason="pip install -c constraints.txt -e .[book]")
pytest.importorskip("anywidget", reason="pip install -c constraints.txt -e .[book]")

from minwidgets import CopyCount  # noqa: E402
from minwidgets.copy_count import COPY_S, COUNTS, REPORTED, SECONDS, THEIR_BYTES, THEIRS  # noqa: E402
from minwidgets.modules import bundle  # noqa: E402
from minwidgets.page_widget import VIEW_MIME  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


def test_the_default_is_the_sources_request_in_both_its_layouts():
    widget = CopyCount()
    assert widget.numbers == request_copies("LBHNC", 200_000, 1024, 78, 352) and widget.numbers.count == 15_288
    assert [count for count, _ in widget.compared.values()] == [15_288, 3_125]
    widget.num_indexer_layers = 21
    assert widget.numbers.count == 196 * 99
    widget.regions_per_layer = 2
    assert (widget.numbers.count, widget.numbers.piece_bytes, widget.numbers.indexer_piece_bytes) == (196 * 177, 1024 * 176, 1024 * 132)
    widget.kv_cache_layout = "BHLNC"
    assert (widget.numbers.regions, widget.numbers.piece_bytes, widget.numbers.indexer_piece_bytes) == (1, 1024 * (78 * 352 + 21 * 132), 0)
    assert list(widget.compared) == [("LBHNC", 1024), ("BLHNC", 64), ("BHLNC", 1024)]


def test_the_costs_it_starts_with_are_those_that_two_claims_imply():
    claims = {one["id"]: one for part in yaml.safe_load((ROOT / "book/claims.yml").read_text(encoding="utf8")).values() for one in part}
    for name, (pieces, seconds) in REPORTED.items():
        count, ms = claims[f"descriptors_{name}"], claims[f"transfer_{name}_ms"]
        assert (count["value"], ms["value"], count["label"], ms["label"]) == (pieces, 1e3 * seconds, "reported", "reported")
        assert f"{pieces:,}" in THEIRS and f"{1e3 * seconds:g} ms" in THEIRS and f"{THEIR_BYTES / 1e9:.1f} GB" in THEIRS
        widget = CopyCount()
        assert transfer_time_s(THEIR_BYTES, pieces, widget.byte_s, widget.copy_s) == pytest.approx(seconds, rel=0.002)
    assert COPY_S == pytest.approx(copy_costs(THEIR_BYTES, *REPORTED.values())[1], rel=0.01) and CopyCount().cost_source == THEIRS


def test_costs_that_are_given_are_not_called_the_sources():
    assert CopyCount(copy_s=1e-6).cost_source == "as given"
    widget = CopyCount(byte_s=1e-10, copy_s=2e-6, cost_source="measured here, n=9")
    assert widget.cost_source == "measured here, n=9" and "(measured here, n=9)" in widget._in_words()
    assert widget.compared["BLHNC", 64] == (3_125, transfer_time_s(widget.tokens * 78 * 352, 3_125, 1e-10, 2e-6))


@pytest.mark.parametrize("name", [*COUNTS, *SECONDS])
def test_values_outside_their_limits_are_refused_by_name_and_change_nothing(name):
    least, most = {**COUNTS, **SECONDS}[name]
    widget = CopyCount()
    before = getattr(widget, name)
    for wrong in (least - 1, most + 1, "many", float("nan")):
        with pytest.raises(traitlets.TraitError, match=name):
            setattr(widget, name, wrong)
        with pytest.raises(traitlets.TraitError, match=name):
            CopyCount(**{name: wrong})
    assert getattr(widget, name) == before
    setattr(widget, name, least)
    setattr(widget, name, most)
    assert getattr(widget, name) == most


@pytest.mark.parametrize("traits, message", [
    ({"num_indexer_layers": 79}, "num_indexer_layers=79: use at most num_hidden_layers, 78"),
    ({"row_bytes": 351, "block_size": 3, "regions_per_layer": 2}, "regions_per_layer=2: block_size x row_bytes is 1053, which they do not divide"),
    ({"layers": 3}, "unknown option 'layers'; known options: tokens, num_hidden_layers"),
    ({"tables": {}}, "unknown option 'tables'"),
])
def test_an_authors_mistake_is_an_error_at_once(traits, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        CopyCount(**traits)


def test_unknown_choices_and_times_are_refused_by_name():
    for name, wrong in (("kv_cache_layout", "HND"), ("regions_per_layer", 3), ("byte_s", 0.0)):
        with pytest.raises(traitlets.TraitError, match=name):
            CopyCount(**{name: wrong})
    with pytest.raises(traitlets.TraitError, match="copy_s=2.0: use seconds from 0 to 1"):
        CopyCount(copy_s=2.0)


def test_every_product_of_the_limits_is_a_count_that_the_page_can_hold():
    extreme = CopyCount(**{name: most for name, (_, most) in COUNTS.items()}, regions_per_layer=2).numbers
    assert max(extreme.nbytes, extreme.count) < 2**53
    assert CopyCount(**{name: most for name, (_, most) in COUNTS.items() if name != "block_size"}, block_size=1).numbers.count < 2**53


def test_one_trait_at_a_time_may_pass_through_what_does_not_fit():
    widget = CopyCount(num_indexer_layers=21)
    widget.num_hidden_layers = 12
    with pytest.raises(ConfigError, match="use at most num_hidden_layers, 12"):
        widget.numbers
    assert "use at most num_hidden_layers, 12" in widget._repr_mimebundle_()[0]["text/plain"]


def test_reset_knows_the_traits_as_made():
    widget = CopyCount(tokens=7)
    widget.tokens = 8
    assert widget.initial["tokens"] == 7 and set(widget.initial) == {*COUNTS, *SECONDS, "kv_cache_layout", "regions_per_layer", "cost_source"}


def test_a_view_says_in_words_what_it_shows():
    data, metadata = CopyCount()._repr_mimebundle_()
    assert VIEW_MIME in data and metadata[VIEW_MIME]["minwidget"] == data["text/plain"]
    for text in ("196 blocks of 78 pieces are 15,288 copies of 360,448 bytes", "BLHNC with blocks of 64 tokens: 3,125 copies, about 126 ms", "reasoned: "):
        assert text in data["text/plain"]
    assert "of 1 piece are 3,125 copies of 1,757,184 bytes" in CopyCount(kv_cache_layout="BLHNC", block_size=64)._in_words()


def test_the_drawing_is_one_module_with_its_imports_in_place():
    text = bundle("copy_count.js")
    assert not re.search(r"^import ", text, re.MULTILINE) and text.count("export default") == 1
    for name in ("numbers", "copyDrawing", "binding", "keptNodes", "render", "inUnits"):
        assert text.count(f"function {name}(") == 1
    assert CopyCount()._esm == text and "</script" not in text

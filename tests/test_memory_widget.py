"""The widget Memory ladder without a browser: what the traits take, what they amount to, and whose figures it shows."""
import re
from pathlib import Path

import pytest
import yaml

from minengine.arithmetic import CARDS, memory_ladder, rank_weights, untouched_state
from minengine.config import ConfigError

traitlets = pytest.importorskip("traitlets", reason="pip install -c constraints.txt -e .[book]")
pytest.importorskip("anywidget", reason="pip install -c constraints.txt -e .[book]")

from minwidgets import MemoryLadder  # noqa: E402
from minwidgets.memory_ladder import AMOUNTS, CHOICES, COUNTS, FITTED, MODELS, REPORTED, TABLES, TOPOLOGIES, missing_bytes  # noqa: E402
from minwidgets.modules import bundle  # noqa: E402
from minwidgets.page_widget import VIEW_MIME  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
GLM, LLAMA = MODELS


def test_the_default_is_the_sources_decoder():
    widget = MemoryLadder()
    assert widget.numbers == memory_ladder(MODELS[GLM], "TP4") and widget.numbers.tokens == 1_720_027
    widget.kv_cache_dtype = "fp8"
    assert widget.numbers.tokens == 1_090_000
    assert {name: one.copies for name, one in widget.compared.items()} == {"TP1": 1, "TP4": 4, "TP8": 8, "TEP8": 8, "DEP8": 1, "TP8+DCP4": 2}


def test_reported_figures_are_the_claims():
    claims = {one["id"]: one for part in yaml.safe_load((ROOT / "book/claims.yml").read_text(encoding="utf8")).values() for one in part}
    stated = {"tokens_fp8": REPORTED["tokens"]["fp8"], "tokens_nvfp4": REPORTED["tokens"]["nvfp4_fp8_ds_mla"], "dep8_over_tep8_prefix": REPORTED["times"],
              **{f"itl_{name.lower().replace('+', '_')}_ms": ms for name, ms in REPORTED["itl_ms"].items()}}
    assert {name: (claims[name]["value"], claims[name]["label"]) for name in stated} == {name: (value, "reported") for name, value in stated.items()}
    assert missing_bytes() == pytest.approx(untouched_state(1.63 / 1.09) - 21 * 132 / 78, rel=1e-9)


def test_simulated_times_are_the_simulators_and_agree_where_they_were_fitted():
    from minengine.simulate.machine import machine
    from minengine.simulate.prime_steady import dcp_itl_ms, itl_ms
    from minengine.simulate.rack_fit import preset

    rack, given = machine("gb200-nvl72"), preset()
    found = {**{name: itl_ms(rack, given, name) for name in ("TP4", "TP8", "TEP8", "DEP8")}, "TP8+DCP4": dcp_itl_ms(rack, given)}
    assert TABLES["simulated_ms"] == {name: round(ms, 2) for name, ms in found.items()}
    assert {name: TABLES["simulated_ms"][name] for name in FITTED} == {name: REPORTED["itl_ms"][name] for name in FITTED}


def test_tables_are_the_arithmetics():
    for model, config in MODELS.items():
        for name in TOPOLOGIES[model]:
            for weights, groups in TABLES["models"][model]["topologies"][name]["weights"].items():
                assert sum(groups.values()) == sum(rank_weights(config, name, 0, weights, "nvfp4").values()), (model, name, weights)
    assert {key: card["hbm_bytes"] for key, card in TABLES["cards"].items()} == {key: card.hbm_bytes for key, card in CARDS.items()}


def test_a_readers_own_card_and_what_is_given():
    widget = MemoryLadder(model=LLAMA, topology="TP1", card="own", hbm_gb=24, kv_cache_dtype="bfloat16", beside="given", beside_gb=2.5)
    assert (widget.memory.hbm_bytes, widget.numbers.beside_bytes, widget.numbers.beside_label) == (24 * 10**9, 2_500_000_000, "assumed")
    assert widget.numbers.tokens == (24 * 10**9 - widget.numbers.weight_bytes - 2_500_000_000) // (32 * 8 * 2 * 128 * 2)
    assert "your own card" in widget._in_words()
    widget.card = "RTX4090"
    assert widget.numbers.hbm_bytes == CARDS["RTX4090"].hbm_bytes and widget.hbm_gb == 24  # what was given waits


@pytest.mark.parametrize("name", [*COUNTS, *AMOUNTS])
def test_values_outside_their_limits_are_refused_by_name_and_change_nothing(name):
    least, most = {**COUNTS, **AMOUNTS}[name]
    widget = MemoryLadder()
    before = getattr(widget, name)
    for wrong in (least - 1, most + 1, "many", float("nan")):
        with pytest.raises(traitlets.TraitError, match=name):
            setattr(widget, name, wrong)
        with pytest.raises(traitlets.TraitError, match=name):
            MemoryLadder(**{name: wrong})
    assert getattr(widget, name) == before
    setattr(widget, name, least)
    setattr(widget, name, most)
    assert getattr(widget, name) == most


@pytest.mark.parametrize("traits, message", [
    ({"model": LLAMA, "kv_cache_dtype": "nvfp4", "topology": "DEP8"}, "topology='DEP8': Llama-3.1-8B has none; use one of TP1, TP4, TP8"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype='nvfp4': GLM-5.3 has none; use one of bfloat16, fp8, nvfp4_fp8_ds_mla"),
    ({"beside": "given", "beside_gb": 199}, "beside_gb=199: use less than the card has, 198.7 GB"),
    ({"untouched": 1000}, "untouched=1000: four GB200 would then not hold the 1,090,000 tokens"),
    ({"layers": 3}, "unknown option 'layers'; known options: model, topology, card"),
    ({"tables": {}}, "unknown option 'tables'"),
])
def test_an_authors_mistake_is_an_error_at_once(traits, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        MemoryLadder(**traits)


def test_one_trait_at_a_time_may_pass_through_what_does_not_fit():
    widget = MemoryLadder(topology="DEP8")
    widget.model = LLAMA
    with pytest.raises(ConfigError, match="topology='DEP8'"):
        widget.numbers
    assert "topology='DEP8'" in widget._repr_mimebundle_()[0]["text/plain"]


def test_unknown_choices_are_refused_by_name():
    for name in CHOICES:
        with pytest.raises(traitlets.TraitError, match=name):
            MemoryLadder(**{name: "other"})
    with pytest.raises(traitlets.TraitError, match="tables"):
        MemoryLadder().tables = {}


def test_reset_knows_the_traits_as_made():
    widget = MemoryLadder(topology="TP8")
    widget.topology = "TP4"
    assert widget.initial["topology"] == "TP8" and set(widget.initial) == {*CHOICES, *COUNTS, *AMOUNTS}


def test_a_view_says_in_words_what_it_shows():
    data, metadata = MemoryLadder()._repr_mimebundle_()
    assert VIEW_MIME in data and metadata[VIEW_MIME]["minwidget"] == data["text/plain"]
    for text in ("Of 198.7 GB a card, 113.8 are weights, 0.4 buffers, 32.5 all else (reasoned); 52.0 GB are left for a cache",
                 "DEP8 19,528,430 tokens (GPUs: 8, copies of a row: 1, a token 8.48 ms reported, a token 8.48 ms simulated)", "11 sessions of 146,000 tokens"):
        assert text in data["text/plain"]
    assert "GB are missing" in MemoryLadder(topology="TP1")._in_words()


def test_the_drawing_is_one_module_with_its_imports_in_place():
    text = bundle("memory_ladder.js")
    assert not re.search(r"^import ", text, re.MULTILINE) and text.count("export default") == 1
    for name in ("numbers", "ladderDrawing", "binding", "keptNodes", "render", "inUnits"):
        assert text.count(f"function {name}(") == 1
    assert MemoryLadder()._esm == text and "</script" not in text

"""What follows from a claim and what the book has beside it; which numbers prose may not spell out."""
from datetime import date

import pytest

from bookkit.claims import RECORD_MIME, written
from bookkit.prose import ALLOWED, hidden_records, prose, typed_quantities
from bookkit.verdicts import STATUSES, own_value, ratio
from minengine import claims as registry
from minengine.claims import Claim
from minengine.results import Measurement


def claim(**fields):
    return Claim(**{"id": "c", "value": 23.8, "unit": "x", "label": "reported", "book": "run", "source": "s", "what": "w", "chapters": (1,), "section": "t",
                    **fields})


def own(one, record=None, stored=None):
    records = {one.id: {"value": 20.0, "label": "measured", "n": None, "spread": None, "holds": None, "note": "", **record}} if record is not None else {}
    return own_value(one, {one.id: one}, records, {one.id: stored} if stored else {})


STORED = Measurement(name="m", what="w", unit="x", n=30, median=12.34567, spread=(11.8, 12.5), claim="c", machine="a GPU", versions={"python": "3"},
                     commit="0" * 40, command="make gpu", date=date(2026, 1, 31), file="a.json")


@pytest.mark.parametrize("fields, record, status", [
    ({"book": "derive", "formula": "share(2400, 101)"}, None, "holds"),
    ({"book": "derive", "formula": "share(2450, 101)"}, None, "differs"),
    ({"book": "bound", "formula": "[share(40, 2), share(80, 2)]"}, None, "holds as stated"),
    ({"book": "bound", "formula": "[share(60, 2), share(80, 2)]"}, None, "bounded"),
    ({"book": "bound", "formula": "share(60, 2)", "value": "under 40"}, None, "bounded"),
    ({"book": "bound"}, None, "not built yet"),
    ({"book": "bound", "formula": "share(60, 2)"}, {"holds": False}, "differs"),
    ({}, None, "not built yet"),
    ({}, {}, "measured"),
    ({}, {"holds": True}, "holds as stated"),
    ({}, {"holds": False}, "differs"),
    ({}, {"holds": True, "label": "invented"}, "invented data"),
    ({"book": "simulate"}, None, "not built yet"),
    ({"book": "simulate"}, {"holds": True, "label": "simulated"}, "simulated"),
    ({"book": "simulate"}, {"label": "reasoned"}, "predicted"),
    ({"book": "simulate"}, {"label": "reasoned", "holds": True}, "holds as stated"),
    ({"book": "gpu"}, None, "needs a GPU"),
    ({"book": "open", "reason": "r"}, None, "cannot be checked"),
])
def test_the_status_follows(fields, record, status):
    assert own(claim(**fields), record).status == status
    assert status in STATUSES


def test_own_values_say_how_they_came_about():
    derived = own(claim(book="derive", formula="share(2400, 101)"))
    assert (round(derived.value, 3), derived.how, derived.formula, derived.decimals) == (23.762, "share(2400, 101)", True, 3)
    recorded = own(claim(), {"value": 4297.36, "n": 1372, "spread": [457.75, 2205], "note": "mean"})
    assert (recorded.value, recorded.how, recorded.recorded, recorded.decimals) == (4297.36, "mean; n = 1,372; 458 to 2,205", True, 0)
    stored = own(claim(book="gpu"), stored=STORED)
    assert (stored.status, stored.value, stored.decimals) == ("measured", 12.34567, 2)
    assert stored.how == "n = 30; 11.8 to 12.5; a GPU, 31 January 2026; make gpu"


def test_a_cell_goes_before_a_stored_measurement():
    assert own(claim(), {"value": 7}, STORED).value == 7


@pytest.mark.parametrize("mine, stated, text", [
    (23.762, 23.8, "1.00"), (8, 5, "1.60"), ([15288, 30576], 32000, "0.48 to 0.96"), (0.004, 1, "0.004"), (3, "near zero", ""), (None, 5, ""), (3, 0, ""),
    (3, {"fp8": 1}, ""), ([1, 2], [1, 2], ""),
])
def test_ratio_of_ours_to_theirs(mine, stated, text):
    assert ratio(mine, stated) == text


@pytest.mark.parametrize("value, key, form, text", [
    (576, "", "", "576"), (576, "", "unit", "576 x"), (0.40, "", "percent", "40%"), ([0.93, 0.96], "", "percent", "93% to 96%"),
    (1.09e6, "", "million", "1.09"), (146000, "", "thousand", "146"), ({"fp8": 68.47}, "fp8", "", "68.47"), (0.07, "", "percent", "7%"),
])
def test_the_role_prints(value, key, form, text):
    assert written(claim(value=value), key, form) == text


@pytest.mark.parametrize("value, key, form, message", [
    (576, "", "percents", "'percents' is no form; use unit, percent"), ({"fp8": 1}, "", "", "has the keys fp8"), ({"fp8": 1}, "x", "", "has the keys fp8"),
    (1, "fp8", "", "has no key 'fp8'"), ("near zero", "", "percent", "is no number"),
])
def test_a_role_that_does_not_fit_is_refused(value, key, form, message):
    with pytest.raises(ValueError, match=message):
        written(claim(value=value), key, form)


def test_the_build_and_the_engine_name_the_same_mime():
    assert RECORD_MIME == registry.RECORD_MIME


@pytest.mark.parametrize("text, typed", [
    ("It takes 576 bytes.", ["576 bytes."]), ("1,347 of them", ["1,347 of them"]), ("a factor of 1.64", ["1.64"]), ("40% less", ["40% less"]),
    ("* 12 ms\n* 3 s", ["12 ms", "3 s"]), (":::{admonition} T\nIt is 8.5 wide.\n:::", ["8.5 wide."]), ("| a | 17.7 |", ["17.7 |"]),
    ("::::{grid}\n:::{grid-item-card} C\n9 GB\n:::\n::::", ["9 GB"]), ("45 µs", ["45 µs"]), ("```{list-table}\n* - 9 GB\n```", ["9 GB"]), ("16 GPUs", ["16 GPUs"]),
    ("{claim}`row_fp8_bytes` bytes, {glue:text}`n` ms and `352 bytes` and $x = 1.5$", []), ("chapter 3, FAST'25, GLM-5.3, 8K tokens, four bytes", []),
    ("```{code-cell} python\nprint('576 bytes')\n```", []), ("[one](a-1.5.md), arXiv:2405.04434, 16 bits", []), ("$$\n1.5 x\n$$", []),
    ("---\nversion: 1.5\n---\nText.", []),
])
def test_quantities_typed_into_prose(text, typed):
    assert [words for _, words in typed_quantities(text)] == typed


def test_typed_quantities_come_with_their_lines():
    text = "---\na: 1.5\n---\n# T\n\n```{code-cell} python\n:tags: [x]\n1.5\n```\n\n:::{note}\n\n12 ms\n:::\n\n$$\n1.5\n$$\n40% of {glue:text}`a\nb` and 3.5\n"
    assert [line for line, _ in typed_quantities(text)] == [13, 19, 20]
    assert prose(text).count("\n") == text.count("\n")


def test_constants_may_be_spelled_out_and_each_says_why():
    assert ALLOWED and all(reason for reason in ALLOWED.values())
    for words in ALLOWED:
        assert list(typed_quantities(f"It has {words}.")) == []
        assert list(typed_quantities(f"It has {words}1.5")) != []


def test_a_record_in_a_cell_without_outputs_is_found():
    cell = "```{{code-cell}} python\n:tags: [{}]\nx = 1\nrecord('a', x)\n```\n"
    assert [list(hidden_records("\n" + cell.format(tag))) for tag in ("remove-cell", "hide-input, remove-output", "hide-input", "remove-input")] == [[2], [2], [], []]

"""What `show` gives: HTML that needs no inline script, a table of the numbers, and clear refusals."""
import json
import re

import pytest
from minwidgets.figures import PLOTLY_MIME, show

BARS = {"data": [{"type": "bar", "name": "bytes", "x": ["fp8", "nvfp4"], "y": [656, 352.5]}], "layout": {"yaxis": {"title": {"text": "bytes a row"}}}}


def cells(text):
    return re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", text)


def test_a_figure_has_caption_text_alternative_table_and_data():
    text = show(BARS, caption="Row sizes, `n=1` & more.", alt='Bars: "352" is lowest.').to_html()
    assert "<figcaption>Row sizes, <code>n=1</code> &amp; more.</figcaption>" in text
    assert 'role="img" aria-label="Bars: &quot;352&quot; is lowest."' in text
    assert cells(text) == ["x", "bytes a row", "fp8", "656", "nvfp4", "352.5"]
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', text)[1])
    assert data["data"][0]["y"] == [656, 352.5]


def test_text_in_the_data_cannot_end_the_script_element():
    spec = {"data": [{"x": ["</script><b>"], "y": [1]}]}
    text = show(spec, caption="c", alt="a").to_html()
    assert text.count("</script>") == 1 and "&lt;/script&gt;" in text


def test_several_series_name_their_rows_and_numbers_are_short():
    spec = {"data": [{"name": "a", "x": [1], "y": [1234567]}, {"x": [1], "y": [0.123456]}]}
    assert cells(show(spec, caption="c", alt="a").to_html()) == ["series", "x", "y", "a", "1", "1,234,567", "series 2", "1", "0.1235"]


def test_a_given_table_wins():
    assert cells(show(BARS, caption="c", alt="a", table=[{"format": "fp8", "n": 3}]).to_html()) == ["format", "n", "fp8", "3"]
    assert cells(show(BARS, caption="c", alt="a", table=(["k"], [[None]])).to_html()) == ["k", ""]


def test_numpy_columns_and_plotlys_template(tmp_path):
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="pip install -c constraints.txt -e .[book]")
    numpy = pytest.importorskip("numpy")
    figure = graph_objects.Figure(graph_objects.Scatter(x=numpy.arange(3), y=numpy.array([0.5, 1.0, 2.0])))
    shown = show(figure, caption="c", alt="a")
    assert cells(shown.to_html()) == ["x", "y", "0", "0.5", "1", "1", "2", "2"]
    assert "template" not in shown.spec["layout"]


def test_the_mime_bundle_serves_lab_and_the_page():
    data, metadata = show(BARS, caption="c", alt="a")._repr_mimebundle_()
    assert set(data) == {PLOTLY_MIME, "text/html", "text/plain"}
    assert metadata[PLOTLY_MIME]["minfigure"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"caption": " "}, "caption is empty"),
        ({"alt": ""}, "alt is empty"),
        ({"fig": {"data": [{"type": "heatmap", "x": [1], "y": [1], "z": [[1]]}]}}, "type 'heatmap'"),
        ({"fig": {"data": [{"type": "pie", "labels": ["a"], "values": [1]}]}}, "table is needed: trace 0"),
        ({"fig": {"data": [{"x": list(range(401)), "y": list(range(401))}]}}, "401 points"),
    ],
)
def test_refusals_say_what_to_do(change, message):
    given = {"fig": BARS, "caption": "c", "alt": "a", **change}
    with pytest.raises(ValueError, match=message):
        show(given.pop("fig"), **given)

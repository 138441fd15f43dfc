"""What every chapter must have, and that its numbers come from somewhere: a cell, or the claims registry. No cell is run here."""
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from bookkit.prose import FENCE, ROLE, typed_quantities
from minengine import arithmetic
from minengine.claims import ClaimError, claims_table, derive, digits, read_claims
from minengine.workload import traces

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((ROOT / "chapters").glob("[0-9][0-9]-*.md"))
SECTIONS = ("What you need first", "The minimal model", "Where this wins, where it loses", "Exercises", "What to read next")


@pytest.fixture(scope="module")
def claims():
    return read_claims()


def parts(chapter):
    text = chapter.read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def cells(body):
    return [match[4] for match in FENCE.finditer(body) if match[2] == "code-cell"]


def test_there_are_chapters_and_the_table_of_contents_names_them():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    listed = [entry["file"] for part in toc["parts"] for entry in part["chapters"]]
    there = {f"chapters/{page.stem}" for page in (ROOT / "chapters").glob("*.md")}
    assert CHAPTERS and {name for name in listed if name.startswith("chapters/")} == there


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
class TestChapter:
    def test_front_matter_makes_it_a_notebook(self, chapter):
        front, _ = parts(chapter)
        assert front["kernelspec"]["name"] == "python3"
        assert front["jupytext"]["text_representation"]["format_name"] == "myst"

    def test_it_has_the_shape_of_a_chapter(self, chapter):
        _, body = parts(chapter)
        titles = re.findall(r"^#+ (.+)$", FENCE.sub("", body), re.MULTILINE)
        for section in SECTIONS:
            assert any(title.startswith(section) for title in titles), section
        assert re.search(r"\*\*The question", body), "say the question in the first lines"
        assert ":::{admonition} Takeaway" in body
        assert "{literalinclude} ../minengine/" in body, "the minimal model is the engine's own code"

    def test_it_takes_a_quarter_to_half_an_hour(self, chapter):
        _, body = parts(chapter)
        assert 1500 <= len(re.findall(r"[\w'’-]+", ROLE.sub("x", FENCE.sub(lambda m: m[4] if m[2] == "admonition" else "", body)))) <= 3000

    def test_prose_has_no_typed_quantities(self, chapter):
        _, body = parts(chapter)
        typed = list(typed_quantities(body))
        assert not typed, "let a cell compute these and glue them in, or take them from book/claims.yml"

    def test_what_the_prose_glues_is_computed(self, chapter):
        _, body = parts(chapter)
        said = set(re.findall(r"\b(\w+)=", "\n".join(re.findall(r"^say\((.*?)\)$", "\n".join(cells(body)), re.MULTILINE | re.DOTALL))))
        assert set(re.findall(r"\{glue:text\}`(\w+)`", body)) <= said

    def test_claims_it_uses_are_registered_for_it(self, chapter, claims):
        _, body = parts(chapter)
        number = int(chapter.stem[:2])
        used = set(re.findall(r"stated\[[\"'](\w+)[\"']\]|derive\(claims, \"(\w+)\"\)", body))
        used = {name for pair in used for name in pair if name} | set(re.findall(r"\{claim\}`(\w+)", body))
        assert used, "a chapter checks claims"
        for name in used:
            assert number in claims[name].chapters, name

    def test_exercises_have_folded_solutions_that_run(self, chapter):
        _, body = parts(chapter)
        asked = re.findall(r"^```\{exercise-start\}.*?\n:label: (\S+)", body, re.MULTILINE)
        solved = re.findall(r"^```\{solution-start\} (\S+)\n((?::[^\n]*\n)*)```\n(.*?)^```\{solution-end\}", body, re.MULTILINE | re.DOTALL)
        assert len(asked) >= 2 and [name for name, _, _ in solved] == asked
        for name, options, text in solved:
            assert ":class: dropdown" in options, name
            assert "```{code-cell}" in text, name

    def test_at_most_three_figures_and_each_has_words(self, chapter):
        _, body = parts(chapter)
        figures = re.findall(r"^show\((.*?)^```", body, re.MULTILINE | re.DOTALL)
        assert len(figures) <= 3
        for figure in figures:
            assert "caption=" in figure and "alt=" in figure and len(re.findall(r"alt=(.*?)(?:table=|$)", figure, re.DOTALL)[0]) > 60

    def test_code_reaches_for_nothing_outside(self, chapter):
        _, body = parts(chapter)
        for cell in cells(body):
            assert not re.search(r"https?://|/home/|/root|/tmp|/work|\bpip install\b|time\.sleep", cell)


def test_the_first_chapter_also_runs_on_the_shipped_traces(monkeypatch, tmp_path, capsys):
    """Where the public traces are not at hand the page uses the synthetic ones; every cell must run and the page must say so."""
    monkeypatch.delenv("MINENGINE_TRACES", raising=False)
    monkeypatch.setattr(traces, "BESIDE_CHECKOUT", tmp_path)
    said = {}
    for name, contents in {"myst_nb": {"glue": lambda key, value, display: said.__setitem__(key, value)}, "IPython": {},
                           "IPython.display": {"Markdown": str}}.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    _, body = parts(ROOT / "chapters" / "01-an-agent-turn.md")
    namespace = {}
    for cell in cells(body):
        source = "".join(line + "\n" for line in cell.splitlines() if not line.startswith(":tags:"))
        exec(compile(source, "chapter 1", "exec"), namespace)
    assert "synthetic" in said["source"] and "prove nothing" in said["kind"]
    assert set(re.findall(r"\{glue:text\}`(\w+)`", body)) <= set(said)
    assert (said["total"], said["naive"], said["flying"], said["share"]) == ("2,400", "6,666", "23.8", "0.36")
    assert capsys.readouterr().out.count("Right") == 3


# --- the registry -----------------------------------------------------------------------------------------

def test_every_derived_claim_comes_out_to_the_digits_it_was_stated_with(claims):
    derived = [claim for claim in claims.values() if claim.book == "derive"]
    assert len(derived) >= 50
    for claim in derived:
        assert round(derive(claims, claim.id), digits(claim.value)) == claim.value, claim.id


def test_in_flight_is_derived_from_the_two_reported_speeds(claims):
    assert derive(claims, "c66_in_flight") == pytest.approx(24 * 100 / 101)
    assert arithmetic.share(derive(claims, "c66_in_flight"), claims["c66_sessions"].value) == pytest.approx(derive(claims, "c66_in_flight_share"))


def test_a_claims_chapters_exist(claims):
    there = {int(chapter.stem[:2]) for chapter in CHAPTERS}
    for claim in claims.values():
        assert set(claim.chapters) <= there, claim.id


@pytest.mark.parametrize("change, message", [
    ({"label": None}, "field 'label': is None; use one of reported"),
    ({"book": "guess"}, "field 'book': is 'guess'"),
    ({"formula": None}, "field 'formula': belongs to book: derive"),
    ({"book": "derive"}, "field 'formula': belongs to book: derive"),
    ({"book": "open"}, "field 'reason': is missing"),
    ({"value": [3, 2, 1]}, "field 'value': a list is a pair"),
    ({"value": [2, 1]}, "field 'value': a list is a pair"),
    ({"colour": "red"}, "field 'colour': is unknown"),
    ({"unit": None}, "field 'unit': is None; give a text"),
    ({"id": "b"}, "claim 'b', field 'id': is used twice"),
])
def test_a_broken_registry_names_claim_and_field(tmp_path, change, message):
    row = {"id": "a", "value": 1, "unit": "x", "label": "reported", "book": "run", "source": "s", "what": "w", "chapters": [1]}
    file = tmp_path / "claims.yml"
    file.write_text(yaml.safe_dump({"section": [{**row, "id": "b"}, {**row, **change}]}))
    with pytest.raises(ClaimError, match=message):
        read_claims(file)


def test_a_missing_field_and_a_missing_registry_are_named(tmp_path):
    file = tmp_path / "claims.yml"
    with pytest.raises(ClaimError, match="run from a checkout"):
        read_claims(file)
    file.write_text("section: [{id: a, value: 1}]")
    with pytest.raises(ClaimError, match="claim 'a', field '.*': is missing"):
        read_claims(file)


def test_a_formula_may_use_claims_and_arithmetic_and_nothing_else(tmp_path):
    row = {"value": 2, "unit": "x", "label": "reasoned", "source": "s", "what": "w", "chapters": [1]}
    file = tmp_path / "claims.yml"
    file.write_text(yaml.safe_dump({"s": [{**row, "id": "a", "book": "run"}, {**row, "id": "b", "book": "derive", "formula": "share(a, 4)"},
                                          {**row, "id": "c", "book": "derive", "formula": "open('x')"}]}))
    read = read_claims(file)
    assert derive(read, "b") == 0.5
    with pytest.raises(ClaimError, match="claim 'c', field 'formula': name 'open' is not defined"):
        derive(read, "c")
    with pytest.raises(ClaimError, match="claim 'a', field 'formula': is missing"):
        derive(read, "a")


def test_stated_digits():
    assert [digits(value) for value in (23.8, 0.36, 164, 4.0, 1.0e30, "1:4")] == [1, 2, 0, 1, 0, 0]


def test_the_table_of_claims_shows_both_values_with_their_labels(claims):
    table = claims_table(claims, [("c66_naive_tok_s", "6,666", "reasoned"), ("set_hit", "0.95", "measured")])
    assert table.splitlines()[2].endswith("| 6,666 tok/s (reasoned) | 6,666 (reasoned) |")
    assert "| 0.93 to 0.96 of the blocks (measured) | 0.95 (measured) |" in table

"""Glossary, bibliography, notebooks and descriptions: what the sources must hold, without building the book."""
import json
import re
from pathlib import Path

import nbformat
import pytest
import yaml

pytest.importorskip("jupyter_book", reason="pip install -c constraints.txt -e .[book]")
from bookkit import notebooks, references  # noqa: E402
from docutils import nodes  # noqa: E402
from docutils.utils import new_document  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((ROOT / "chapters").glob("[0-9][0-9]-*.md"))
PAGES = sorted((ROOT / "reference").glob("*.md"))
GLOSSARY = (ROOT / "reference/glossary.md").read_text(encoding="utf-8")


def terms():
    """The glossary's terms in lower case: lines at the margin of its glossary blocks."""
    blocks = re.findall(r"^```\{glossary\}\n(.*?)^```", GLOSSARY, re.MULTILINE | re.DOTALL)
    return [line.casefold() for block in blocks for line in block.splitlines() if line and not line.startswith(" ")]


def test_the_glossary_names_what_the_book_is_about():
    found = terms()
    assert len(found) == len(set(found)) >= 35
    for term in ("row", "latent", "rotary key", "block", "prefix cache", "hit", "prefill", "decode", "chunked prefill", "ttft", "itl", "tp", "dep", "tep",
                 "dcp", "indexer", "index_topk", "nvfp4", "e2m1", "e4m3", "absorbed form"):
        assert term in found, term


def test_a_chapter_marks_a_word_once_and_only_words_that_are_explained():
    marked = {}
    for chapter in CHAPTERS:
        used = re.findall(r"\{term\}`(?:[^`<]*<)?([^`<>]+)>?`", chapter.read_text(encoding="utf-8"))
        assert len(used) == len(set(used)), f"{chapter.name} marks a word twice: the first use is enough"
        assert {word.casefold() for word in used} <= set(terms()), chapter.name
        marked[chapter.stem[:2]] = len(used)
    assert marked["01"] >= 8 and marked["02"] >= 6


def test_every_reference_page_is_in_the_table_of_contents_and_describes_itself():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    listed = {entry["file"] for part in toc["parts"] for entry in part["chapters"]}
    assert len(PAGES) >= 5 and {f"reference/{page.stem}" for page in PAGES} <= listed
    for page in PAGES:
        _, front, _ = page.read_text(encoding="utf-8").split("---\n", 2)
        assert 50 <= len(yaml.safe_load(front)["myst"]["html_meta"]["description"]) <= 160, page.name


def test_a_path_for_each_kind_of_reader_and_the_front_page_leads_there():
    text = (ROOT / "reference/reading-paths.md").read_text(encoding="utf-8")
    front = (ROOT / "index.md").read_text(encoding="utf-8")
    for kind in ("read", "run", "teach"):
        assert f"(path-{kind})=" in text and f"](#path-{kind})" in front, kind


# --- the bibliography -------------------------------------------------------------------------------------

def test_every_work_can_be_found_and_is_well_formed():
    works = references.works()
    assert len(works) >= 12
    for work in works:
        assert work.persons["author"] and work.fields["title"] and references.addresses(work), work.key
        for name, pattern in {"doi": r"10\.\d{4,}/\S+", "eprint": r"\d{4}\.\d{4,5}", "url": r"https://\S+", "year": r"(19|20)\d\d"}.items():
            assert re.fullmatch(pattern, work.fields.get(name, "")) or name not in work.fields, (work.key, name)
    links = [link for work in works for link in references.addresses(work).values()]
    assert len(links) == len(set(links)), "a work is listed twice"


def test_what_a_chapter_tells_to_read_is_in_the_bibliography():
    known = {link for work in references.works() for link in references.addresses(work).values()}
    for chapter in CHAPTERS:
        reading = chapter.read_text(encoding="utf-8").split("## What to read next")[1]
        assert set(re.findall(r"\]\((https?://[^)\s]+)\)", reading)) <= known, chapter.name


def test_an_entry_names_authors_links_and_chapters():
    entries = {work.key: references.References._entry(None, work) for work in references.works()}
    assert entries["little1961"].astext() == ("Little: A Proof for the Queuing Formula: L = λW. Operations Research 9 (3), 1961. doi:10.1287/opre.9.3.383 "
                                              "(chapter 1)")
    assert entries["micikevicius2022fp8"].astext().startswith("Micikevicius, Stosic, Burgess and others: ")
    assert entries["zheng2024sglang"].astext().startswith("Zheng and others: ")
    assert [link["refuri"] for link in entries["kwon2023pagedattention"].findall(nodes.reference)] == [
        "https://doi.org/10.1145/3600006.3613165", "https://arxiv.org/abs/2309.06180"]


# --- notebooks and descriptions ---------------------------------------------------------------------------

@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_becomes_a_notebook_with_the_same_cells(chapter, tmp_path):
    book = notebooks.notebook(chapter)
    nbformat.validate(book)
    assert "checkout" in book.cells[0].source
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    assert len(code) == chapter.read_text(encoding="utf-8").count("```{code-cell}") and not any(cell.startswith(":tags:") for cell in code)
    assert json.dumps(book) == json.dumps(notebooks.notebook(chapter)), "the same page gives the same file"


def test_a_page_without_a_kernel_is_no_notebook():
    assert notebooks.notebook(ROOT / "reference/glossary.md") is None


def test_a_description_is_the_first_paragraph_cut_at_a_word():
    from bookkit.descriptions import LENGTH, OF_THE_BOOK, description

    document, section = new_document("page"), nodes.section()
    document += section
    section += nodes.bullet_list("", nodes.list_item("", nodes.paragraph("", "an item")))
    assert description(document) == OF_THE_BOOK == description(None)
    section += nodes.paragraph("", "word " * 60)
    assert description(document) == "word " * 31 + "..." and len(description(document)) <= LENGTH


def test_a_figure_that_is_not_there_is_an_error_that_names_it():
    from types import SimpleNamespace

    from bookkit import gallery
    from sphinx.errors import ExtensionError

    chapter = new_document("chapter")
    chapter += [nodes.raw("", "<p>no figure</p>", format="html"), nodes.raw("", '<figure class="minfigure">1</figure>', format="html"),
                nodes.raw("", '<figure class="minfigure">2</figure>', format="html")]
    app = SimpleNamespace(env=SimpleNamespace(found_docs={"chapters/a"}, get_doctree=lambda name: chapter))

    def filled(**place):
        page = new_document("page")
        page += gallery.chapter_figure(**place)
        gallery.fill(app, page, "summary")
        return page.astext()

    assert filled(chapter="chapters/a", nth=2) == '<figure class="minfigure">2</figure>'
    with pytest.raises(ExtensionError, match="summary: 'chapters/a' has 2 figures; there is no figure 3"):
        filled(chapter="chapters/a", nth=3)
    with pytest.raises(ExtensionError, match="summary: there is no page 'chapters/b'"):
        filled(chapter="chapters/b", nth=1)


def test_what_stands_apart_on_the_page_stands_apart_in_the_search():
    from bookkit.search import apart

    html = "<tr><th>percentile</th><td>5%</td><td>7</td></tr><summary>Numbers</summary><p>a <b>row</b>s<small>here</small><a>3</a></p><p>x</p>"
    assert re.sub(r"<[^<]+?>", "", apart(html)).split() == ["percentile", "5%", "7", "Numbers", "a", "rows", "here", "3", "x"]
    assert apart(apart(html)) == apart(html)


def test_a_link_to_a_setting_names_a_widget_and_a_trait_that_exist():
    from bookkit.settings import SETTING, check

    check("RowBytes.kv_cache_dtype=fp8&RowBytes-2.tokens=2000")
    with pytest.raises(ValueError, match="there is no widget 'RowBits'; there are CopyCount, KernelFloor"):
        check("RowBits.tokens=2")
    with pytest.raises(ValueError, match="RowBytes has no trait 'token'; it has .*tokens"):
        check("RowBytes.tokens=1&RowBytes.token=2")
    assert SETTING.fullmatch("chapters/03-the-latent-row#RowBytes.kv_cache_dtype=fp8").groups() == ("chapters/03-the-latent-row", "RowBytes.kv_cache_dtype=fp8")
    for wrong in ("", "RowBytes", "RowBytes.tokens", "page#", "a b#RowBytes.tokens=2"):
        assert not SETTING.fullmatch(wrong), wrong


# --- the guide and the workflow ---------------------------------------------------------------------------

def test_the_template_has_the_parts_that_chapters_must_have():
    from test_chapters import SECTIONS

    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| ([^|]+?) \|", guide.split("### The template")[1].split("## ")[0], re.MULTILINE)
    for part in (*SECTIONS, "**The question**", "Takeaway", "the widget"):
        assert part in table, part


def test_the_workflow_builds_tests_and_publishes_with_the_commands_of_the_house():
    flow = yaml.safe_load((ROOT / ".github/workflows/book.yml").read_text(encoding="utf-8"))
    steps = flow["jobs"]["book"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["make setup", "make book", ".ci/run"]
    assert (ROOT / ".ci/run").exists() and all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in ("setup", "book"))
    published = [step["with"]["path"] for step in steps if "upload-pages-artifact" in step.get("uses", "")]
    from bookkit.build import SITE

    assert [ROOT / path for path in published] == [SITE]
    assert "refs/heads/main" in flow["jobs"]["publish"]["if"] and flow["jobs"]["publish"]["needs"] == "book"
    assert flow["permissions"] == {"contents": "read"}

"""`{references}`: the bibliography from a BibTeX file, an entry a work, each with the chapters that link to it."""
from __future__ import annotations

from pathlib import Path
from typing import Iterator

from docutils import nodes
from pybtex.database import Entry, parse_file
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from .inputs import ROOT

__all__ = ["BIBLIOGRAPHY", "addresses", "citing", "setup", "works"]

BIBLIOGRAPHY = ROOT / "reference" / "references.bib"
MANY = 6  # authors that an entry names; of more it names the first
OTHERS = "others"  # BibTeX's word for the authors that are not named


def works(file: Path = BIBLIOGRAPHY) -> list[Entry]:
    """All entries, by first author and year."""
    found = parse_file(str(file)).entries.values()
    return sorted(found, key=lambda work: (_authors(work)[0].casefold(), work.fields.get("year", ""), work.fields["title"]))


def addresses(work: Entry) -> dict[str, str]:
    """Where a work can be read: words to show -> address."""
    fields, found = work.fields, {}
    if "doi" in fields:
        found[f"doi:{fields['doi']}"] = f"https://doi.org/{fields['doi']}"
    if "eprint" in fields:
        found[f"arXiv:{fields['eprint']}"] = f"https://arxiv.org/abs/{fields['eprint']}"
    if "url" in fields:
        found["web page"] = fields["url"]
    return found


def citing(work: Entry, root: Path = ROOT) -> Iterator[Path]:
    """Chapters with a link to the work."""
    for chapter in sorted((root / "chapters").glob("*.md")):
        text = chapter.read_text(encoding="utf-8")
        if any(address in text for address in addresses(work).values()):
            yield chapter


class References(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(BIBLIOGRAPHY))
        listed = nodes.bullet_list(classes=["references"])
        for work in works():
            listed += nodes.list_item("", self._entry(work), ids=[f"ref-{work.key}"])
        return [listed]

    def _entry(self, work: Entry) -> nodes.paragraph:
        authors, fields = _authors(work), work.fields
        named = authors[:1] if len(authors) > MANY else [author for author in authors if author != OTHERS]
        names = ", ".join(named) + (" and others" if len(named) < len(authors) else "")
        line = nodes.paragraph("", f"{names}: ")
        line += nodes.emphasis("", fields["title"])
        where = fields.get("booktitle") or fields.get("journal") or fields.get("howpublished", "")
        line += nodes.Text(f". {', '.join(filter(None, [where, fields.get('year')]))}.")
        for words, address in addresses(work).items():
            line += [nodes.Text(" "), nodes.reference("", words, refuri=address)]
        numbers = [str(int(chapter.stem[:2])) for chapter in citing(work)]
        if numbers:
            line += nodes.Text(f" (chapter {', '.join(numbers)})" if len(numbers) == 1 else f" (chapters {', '.join(numbers)})")
        return line


def _authors(work: Entry) -> list[str]:
    names = (" ".join([*person.prelast_names, *person.last_names, *person.lineage_names]) for person in work.persons["author"])
    return [name.strip("{}") for name in names]  # braces keep a body's name in one piece


def setup(app: Sphinx) -> None:
    app.add_directive("references", References)

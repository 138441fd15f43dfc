"""What makes a chapter run again, and what does not."""
import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_book import HEADER

from bookkit import assets, page_engine
from bookkit.inputs import Inputs

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "constraints.txt": "numpy==1\n",
    "minengine/__init__.py": "",
    "minengine/rows.py": "from minkernels import pack\n",
    "minengine/data/trace.jsonl": "{}\n",
    "kernels/minkernels/__init__.py": "def pack(): ...\n",
    "widgets/minwidgets/__init__.py": "",
    "chapters/a.md": "# A\n",
    "book/claims.yml": yaml.safe_dump({"rows": [{"id": "row_ratio", "value": 1.6, "source": "s", "formula": "row_fp8 / 352"},
                                                {"id": "row_fp8", "value": 576, "source": "s"}, {"id": "other", "value": 1, "source": "s"}]}),
    "book/results/gpu.json": "{}\n",
    "../shared/data/t.json": "[]",
}


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "repo"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_chapter_depends_on_the_packages_it_mentions_and_on_theirs(checkout):
    inputs = Inputs(checkout)
    assert inputs.packages_used("x = 1") == set()
    assert inputs.packages_used("from minengine.kv import rows") == {"minengine", "minkernels"}
    assert inputs.packages_used("!minengine generate hello") == {"minengine", "minkernels"}
    assert inputs.packages_used("run(['python', '-m', 'minengine'])") == {"minengine", "minkernels"}
    assert inputs.packages_used("import minwidgets.figures") == {"minwidgets"}
    assert inputs.packages_used("minengines = 3") == set()


@pytest.mark.parametrize(
    "edited, code, runs_again",
    [
        ("minengine/rows.py", "import minengine", True),
        ("minengine/data/trace.jsonl", "import minengine", True),
        ("kernels/minkernels/__init__.py", "import minengine", True),
        ("widgets/minwidgets/__init__.py", "import minengine", False),
        ("widgets/minwidgets/__init__.py", "import minwidgets", True),
        ("minengine/rows.py", "import minwidgets", False),
        ("../shared/data/t.json", "import minengine", True),
        ("book/claims.yml", "import minengine", False),  # a comment, or a claim that it does not mention
        ("book/results/gpu.json", "import minengine", False),
        ("book/results/gpu.json", "from minengine.results import read_results", True),
        ("book/results/gpu.json", "from minengine.accuracy import stored\nkept = stored()", True),
        ("minengine/rows.py", "x = 1", False),
        ("constraints.txt", "x = 1", True),
        ("chapters/a.md", "import minengine", False),
    ],
)
def test_an_edit_changes_the_key_of_the_chapters_that_depend_on_it(checkout, edited, code, runs_again):
    before = Inputs(checkout).key(code)
    path = checkout / edited
    path.write_text(path.read_text() + "\n")
    assert (Inputs(checkout).key(code) != before) == runs_again


@pytest.mark.parametrize("claim, field, runs_again", [
    ("row_ratio", "value", True), ("row_ratio", "formula", True), ("row_ratio", "source", False), ("row_fp8", "value", True), ("other", "value", False),
])
def test_of_the_claims_only_those_that_a_cell_mentions_count_and_those_they_come_from(checkout, claim, field, runs_again):
    code = "from minengine.claims import read_claims\nread_claims()['row_ratio']"
    before = Inputs(checkout).key(code)
    path = checkout / "book/claims.yml"
    registry = yaml.safe_load(path.read_text())
    next(row for row in registry["rows"] if row["id"] == claim)[field] = "9"
    path.write_text(yaml.safe_dump(registry))
    assert (Inputs(checkout).key(code) != before) == runs_again


def test_traces_that_the_reader_names_count_as_data(checkout, tmp_path, monkeypatch):
    before = Inputs(checkout).key("import minengine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/trace.json").write_text("[1]")
    monkeypatch.setenv("MINENGINE_TRACES", str(tmp_path / "mine"))
    named = Inputs(checkout).key("import minengine")
    (tmp_path / "mine/trace.json").write_text("[2]")
    assert len({before, named, Inputs(checkout).key("import minengine")}) == 3


def test_new_renamed_and_compiled_files(checkout):
    before = Inputs(checkout).key("import minengine")
    (checkout / "minengine/__pycache__").mkdir()
    (checkout / "minengine/__pycache__/rows.pyc").write_bytes(b"x")
    assert Inputs(checkout).key("import minengine") == before
    (checkout / "minengine/rows.py").rename(checkout / "minengine/row.py")
    assert Inputs(checkout).key("import minengine") != before


def test_the_site_is_stale_after_any_edit_of_its_sources(checkout):
    seen = {Inputs(checkout).site()}
    for name in FILES:
        (checkout / name).write_text(FILES[name] + "\n")
        seen.add(Inputs(checkout).site())
    assert len(seen) == len(FILES) + 1


def notebook(source="import minengine", tags=(), prose="text", outputs=()):
    import nbformat.v4 as v4

    nb = v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    nb.cells = [v4.new_markdown_cell(prose), v4.new_code_cell(source, metadata={"tags": list(tags)}, outputs=list(outputs))]
    return nb


def test_the_cache_looks_at_code_and_execution_tags_not_at_prose_and_looks(checkout, tmp_path):
    pytest.importorskip("jupyter_cache", reason="pip install -c constraints.txt -e .[book]")
    from bookkit.cache import EngineCache

    def key(nb):
        return EngineCache(tmp_path / "cache", Inputs(checkout)).create_hashed_notebook(nb)[1]

    first = key(notebook())
    assert key(notebook(prose="other")) == first
    assert key(notebook(tags=["hide-input", "remove-stderr"])) == first
    assert key(notebook(tags=["raises-exception"])) != first
    assert key(notebook("import minengine.kv")) != first
    (checkout / "minengine/rows.py").write_text("x = 2\n")
    assert key(notebook()) != first


def test_stored_outputs_come_back_under_todays_tags(checkout, tmp_path):
    pytest.importorskip("jupyter_cache", reason="pip install -c constraints.txt -e .[book]")
    import nbformat.v4 as v4
    from bookkit.cache import EngineCache
    from jupyter_cache.base import CacheBundleIn

    cache = EngineCache(tmp_path / "cache", Inputs(checkout))
    executed = notebook(outputs=[v4.new_output("stream", text="352\n")])
    cache.cache_notebook_bundle(CacheBundleIn(copy.deepcopy(executed), "a.md"), check_validity=False)
    _, merged = cache.merge_match_into_notebook(notebook(tags=["hide-input"], prose="new prose"))
    assert merged.cells[0].source == "new prose"
    assert merged.cells[1].outputs[0].text == "352\n"
    assert merged.cells[1].metadata.tags == ["hide-input"]


CHAPTER = HEADER + """# {title}

{prose}

```{{code-cell}} python
{code}
```
"""


def test_a_small_book_from_first_build_to_failing_chapter(tmp_path):
    """The whole way on two chapters: built once, then nothing, then only what an edit touches; a failure stays one."""
    pytest.importorskip("jupyter_book", reason="pip install -c constraints.txt -e .[book]")
    assets.install()
    root = tmp_path / "repo"
    shutil.copytree(ROOT / "book", root / "book", ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    (root / "book/node_modules").symlink_to(ROOT / "book/node_modules")
    shutil.copyfile(ROOT / "_config.yml", root / "_config.yml")
    shutil.copytree(ROOT / "widgets", root / "widgets")
    (root / "constraints.txt").write_text("")
    (root / "minengine/simulate").mkdir(parents=True)
    (root / "minengine/__init__.py").write_text("size = 352\n")
    (root / "minengine/simulate/__init__.py").touch()
    for name in page_engine.ENTRIES:  # what pages may run
        (root / name.replace(".", "/")).with_suffix(".py").touch()
    (root / "_toc.yml").write_text("format: jb-book\nroot: index\nchapters:\n- file: chapters/rows\n- file: chapters/plain\n")
    (root / "index.md").write_text("# Small\n\nA formula: $x^2$.\n")
    (root / "chapters").mkdir()

    def write(name, prose="Prose.", code="print(6 * 7)"):
        (root / f"chapters/{name}.md").write_text(CHAPTER.format(title=name, prose=prose, code=code))

    def build():
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([sys.executable, "book/build.py"], cwd=root, capture_output=True, text=True, env=environment, timeout=300)
        return done.returncode, done.stdout + done.stderr

    def page(name):
        return (root / f"_build/html/{name}.html").read_text()

    write("rows", code="import minengine\nprint(minengine.size)")
    write("plain")
    code, said = build()
    assert code == 0 and "executing chapters/rows.md" in said and "executing chapters/plain.md" in said, said
    assert "_build/html/index.html" in said and "352" in page("chapters/rows") and 'class="katex"' in page("index")
    assert "thebe" not in page("chapters/rows") and "fontawesome.js" not in page("chapters/rows")

    code, said = build()
    assert code == 0 and "nothing changed" in said

    write("rows", prose="Better prose.", code="import minengine\nprint(minengine.size)")
    code, said = build()
    assert code == 0 and "executing" not in said and "Better prose." in page("chapters/rows"), said

    (root / "minengine/__init__.py").write_text("size = 656\n")
    code, said = build()
    assert code == 0 and "executing chapters/rows.md" in said and "executing chapters/plain.md" not in said, said
    assert "656" in page("chapters/rows")

    write("plain", code="raise RuntimeError('lost block')")
    for _ in range(2):
        code, said = build()
        assert code == 1 and "chapters/plain.md" in said and "lost block" in said, said
    assert "656" in page("chapters/rows")  # the last good site is still there

    write("plain", prose="A formula that KaTeX cannot read: $\\fra{1}{2}$.")
    code, said = build()
    assert code == 1 and "\\fra" in said, said
    write("plain", code="import plotly.graph_objects as go\ngo.Figure(go.Bar(y=[1]))")
    code, said = build()
    assert code == 1 and "minwidgets.figures.show" in said, said

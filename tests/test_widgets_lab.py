"""Widgets with a kernel: in JupyterLab a trait set in Python changes the page, and a control changes the trait."""
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from browsing import Watched, browser  # noqa: F401  (a fixture)

from minengine.simulate.disagg import prefill_decode
from minengine.simulate.grid import stored
from minengine.simulate.sizing import DEFAULTS, point
from minengine.simulate.timeline import timeline

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.browser
CODE = "from minwidgets import {0}\n\nwidget = {0}()\nwidget"
NOTEBOOKS = {"row": "RowBytes", "steps": "StepTimeline", "kernel": "KernelFloor", "mask": "TokenMask", "copies": "CopyCount",
             "apart": "PrefillDecode", "memory": "MemoryLadder", "sizing": "ParetoExplorer"}
QUIET = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}  # else it asks whether to look for news, and looks for updates
# Runs code in the open notebook's kernel; gives the value of an expression after it, as repr.
IN_KERNEL = """async ([code, expression]) => {
    const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    const reply = await kernel.requestExecute({ code, user_expressions: { it: expression } }).done;
    return reply.content.status === "ok" ? reply.content.user_expressions.it.data["text/plain"] : reply.content.evalue;
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab of its own on this machine: the address of its notebooks."""
    pytest.importorskip("jupyterlab", reason="pip install -c constraints.txt -e .[test]")
    pytest.importorskip("anywidget", reason="pip install -c constraints.txt -e .[book]")
    import nbformat

    home = tmp_path_factory.mktemp("lab")
    settings = home / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(QUIET))
    (home / "notebooks").mkdir()
    v4 = nbformat.v4
    kernel = {"name": "python3", "display_name": "Python 3"}
    for name, widget in NOTEBOOKS.items():
        notebook = v4.new_notebook(cells=[v4.new_code_cell(CODE.format(widget))], metadata={"kernelspec": kernel})
        nbformat.write(notebook, home / f"notebooks/{name}.ipynb")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ, "HOME": str(home), "IPYTHONDIR": str(home / "ipython"), "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"), "JUPYTER_DATA_DIR": str(home / "data"), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "widgets")]),
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root",
        "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
        "--IdentityProvider.token=", "--ServerApp.password=", f"--ServerApp.root_dir={home / 'notebooks'}", "--LabApp.expose_app_in_browser=True",
        "--LabApp.extension_manager=readonly", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        said = []
        for line in server.stderr:  # until it says that it listens, or ends
            said.append(line)
            if f"127.0.0.1:{port}/lab" in line:
                break
        assert server.poll() is None, "".join(said)
        with drained(server.stderr):
            yield f"http://127.0.0.1:{port}/lab/tree/"
            server.terminate()  # first it ends its kernels
            server.wait(timeout=60)
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def drained(stream):
    """Reads what a process still says, so that it never waits for a reader."""
    reader = threading.Thread(target=stream.read, daemon=True)
    reader.start()
    yield
    reader.join(timeout=60)


def run_all(page, address, drawn):
    """Open a notebook, run its cells, wait until its widget has drawn."""
    page.goto(f"{address}?reset", wait_until="load")
    page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=60_000)
    page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_selector(drawn, timeout=60_000)


def test_python_and_the_page_change_each_other(browser, lab):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.page
        run_all(page, lab + "row.ipynb", ".rb svg rect")
        stats = page.locator(".rb-stat")
        assert stats.all_inner_texts() == ["352", "30,228", "4.41 GB", "11"]

        def kernel(code, expression):
            return page.evaluate(IN_KERNEL, [code, expression])

        def wait_for_stats(*texts):
            shown = "[...document.querySelectorAll('.rb-stat')].map((it) => it.innerText).join()"
            page.wait_for_function(f"(texts) => {shown} === texts", arg=",".join(texts))

        # Python -> page
        assert kernel("widget.kv_cache_dtype = 'fp8'", "widget.numbers.sessions_held") == "7"
        wait_for_stats("576", "47,700", "6.96 GB", "7")
        assert page.locator(".rb input[value=fp8]").is_checked()
        assert "tokens=-1: use a whole number" in kernel("widget.tokens = -1", "0")
        # page -> Python
        page.locator(".rb input[type=number][id$='-tokens']").fill("200000")
        page.wait_for_function(f"async () => (await ({IN_KERNEL})(['', 'widget.tokens'])) === '200000'")
        assert kernel("", "widget.numbers.session_bytes") == str(200_000 * 47_700)
        page.locator(".rb input[value=gqa]").check()
        page.wait_for_function(f"""async () => (await ({IN_KERNEL})(['', '(widget.attention, widget.model_name)'])) === "('gqa', '')" """)
        page.locator(".rb").get_by_role("button", name="Reset").click()
        page.wait_for_function(f"async () => (await ({IN_KERNEL})(['', 'widget.tokens'])) === '146000'")
        wait_for_stats("352", "30,228", "4.41 GB", "11")
        assert "RowBytes" not in page.url  # Lab's address is Lab's
        wrong = [text for text in watched.wrong if text.startswith(("off-host", "uncaught"))]
        assert not wrong, wrong


def test_a_kernel_answers_the_step_timeline(browser, lab):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.page
        run_all(page, lab + "steps.ipynb", ".st svg path")

        def kernel(code, expression):
            return page.evaluate(IN_KERNEL, [code, expression])

        def wait_for_gaps(count):
            page.wait_for_function("(count) => document.querySelector('.st[aria-busy=false] .rb-stat')?.textContent === count", arg=str(count))

        def gaps(**asked):
            return timeline(**asked)["stalled_gaps"]

        wait_for_gaps(gaps())
        # Python -> page
        assert kernel("widget.prompt_tokens = 2000", "widget.timeline['stalled_gaps']") == str(gaps(prompt_tokens=2000))
        wait_for_gaps(gaps(prompt_tokens=2000))
        assert "streams=25: use a whole number from 1 to 24" in kernel("widget.streams = 25", "0")
        # page -> Python, which answers with numbers that the page had not
        page.locator(".st input[type=number][id$='-max_num_batched_tokens']").fill("100")
        wait_for_gaps(gaps(prompt_tokens=2000, max_num_batched_tokens=100))
        assert kernel("", "(widget.max_num_batched_tokens, widget.engine)") == "(100, '')"
        page.locator(".st").get_by_role("button", name="Reset").click()
        wait_for_gaps(gaps())
        assert kernel("", "(widget.prompt_tokens, widget.max_num_batched_tokens)") == "(640, 128)"
        wrong = [text for text in watched.wrong if text.startswith(("off-host", "uncaught"))]
        assert not wrong, wrong


def test_a_kernels_floor_is_set_from_both_sides(browser, lab):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.page
        run_all(page, lab + "kernel.ipynb", ".kf svg rect")

        def kernel(code, expression):
            return page.evaluate(IN_KERNEL, [code, expression])

        def wait_for_native(text):
            page.wait_for_function("(text) => document.querySelector('.kf .rb-stat').textContent === text", arg=text)

        wait_for_native("1.43\u00a0µs")
        # Python -> page
        assert kernel("widget.heads = 64; widget.fill = 1", "widget.numbers['native'].bounds") == "('compute',)"
        wait_for_native("1.71\u00a0µs")
        assert "fill=2.0: use a number from 0 to 1" in kernel("widget.fill = 2", "0")
        # page -> Python, numbers without a fraction too
        page.locator(".kf input[value=own]").check()
        page.locator(".kf input[type=number][id$='-memory_tb_s']").fill("4")
        page.wait_for_function(f"async () => (await ({IN_KERNEL})(['', '(widget.card, widget.memory_tb_s)'])) === \"('own', 4.0)\"")
        page.locator(".kf").get_by_role("button", name="Reset").click()
        page.wait_for_function(f"async () => (await ({IN_KERNEL})(['', '(widget.card, widget.heads)'])) === \"('GB200', 16)\"")
        wait_for_native("1.43\u00a0µs")
        wrong = [text for text in watched.wrong if text.startswith(("off-host", "uncaught"))]
        assert not wrong, wrong


def test_a_kernel_answers_the_token_mask(browser, lab):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.page
        run_all(page, lab + "mask.ipynb", ".tm svg rect")

        def kernel(code, expression):
            return page.evaluate(IN_KERNEL, [code, expression])

        def wait_for_call(text):
            page.wait_for_function("(text) => [...document.querySelectorAll('.tm[aria-busy=false] .tm-piece')].map((it) => it.textContent).join('') === text", arg=text)

        # Python -> page, with a keyword that a page without a kernel refuses
        schema = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}$"}}, "required": ["code"]}
        start = "<tool_call>get_weather<arg_key>code</arg_key><arg_value>"
        kernel(f"import json; widget.schema = json.dumps({schema!r}); widget.text = {start + 'CH'!r}", "0")
        wait_for_call(start + "CH")
        # page -> Python
        page.locator(".tm").get_by_role("button", name="Back", exact=True).click()
        page.wait_for_function(f"async () => (await ({IN_KERNEL})(['', 'widget.text'])) === \"''\"")
        assert kernel("", "(widget.step['pieces'][0][1], widget.step['ended'], widget.engine)") == "('<', False, '')"
        page.locator(".tm").get_by_role("button", name="Reset").click()
        page.wait_for_function(f"async () => (await ({IN_KERNEL})(['', 'widget.tokens == \"\" and \"city\" in widget.schema'])) === 'True'")
        wait_for_call("")
        wrong = [text for text in watched.wrong if text.startswith(("off-host", "uncaught"))]
        assert not wrong, wrong


def test_a_copy_count_is_set_from_both_sides(browser, lab):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.page
        run_all(page, lab + "copies.ipynb", ".cc svg rect")

        def kernel(code, expression):
            return page.evaluate(IN_KERNEL, [code, expression])

        def wait_for_copies(text):
            page.wait_for_function("(text) => document.querySelector('.cc .rb-stat').textContent === text", arg=text)

        wait_for_copies("15,288")
        # Python -> page
        assert kernel("widget.num_indexer_layers = 21; widget.copy_s = 1e-6", "widget.numbers.count") == str(196 * 99)
        wait_for_copies("19,404")
        assert page.locator(".cc input[type=number][id$='-copy_s']").input_value() == "1"
        assert "copy_s=2.0: use seconds from 0 to 1" in kernel("widget.copy_s = 2", "0")
        # page -> Python
        page.locator(".cc input[value=BLHNC]").check()
        page.locator(".cc input[type=number][id$='-block_size']").fill("64")
        page.locator(".cc input[type=number][id$='-byte_s']").fill("50")
        page.wait_for_function(f"async () => (await ({IN_KERNEL})(['', '(widget.numbers.count, widget.numbers.regions, round(1e-9 / widget.byte_s))'])) === '(3125, 1, 50)'")
        page.locator(".cc").get_by_role("button", name="Reset").click()
        page.wait_for_function(f"async () => (await ({IN_KERNEL})(['', 'widget.numbers.count'])) === '15288'")
        wait_for_copies("15,288")
        wrong = [text for text in watched.wrong if text.startswith(("off-host", "uncaught"))]
        assert not wrong, wrong


def test_a_memory_ladder_is_set_from_both_sides(browser, lab):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.page
        run_all(page, lab + "memory.ipynb", ".ml svg rect")

        def kernel(code, expression):
            return page.evaluate(IN_KERNEL, [code, expression])

        def wait_for_copies(text):
            page.wait_for_function("(text) => document.querySelectorAll('.ml .rb-stat')[1].textContent === text", arg=text)

        wait_for_copies("4 copies")
        # Python -> page
        assert kernel("widget.topology = 'TP8'; widget.kv_cache_dtype = 'fp8'", "widget.numbers.copies") == "8"
        wait_for_copies("8 copies")
        assert page.locator(".ml input[value=fp8]").first.is_checked()
        assert "step_tokens=0: use a whole number from 1 to 65536" in kernel("widget.step_tokens = 0", "0")
        # page -> Python
        page.locator(".ml input[value=DEP8]").check()
        page.locator(".ml input[value=own]").check()
        page.locator(".ml input[type=number][id$='-hbm_gb']").fill("180")
        page.wait_for_function(f"async () => (await ({IN_KERNEL})(['', '(widget.topology, widget.memory.hbm_bytes)'])) === \"('DEP8', 180000000000)\"")
        page.locator(".ml").get_by_role("button", name="Reset").click()
        page.wait_for_function(f"async () => (await ({IN_KERNEL})(['', '(widget.topology, widget.card)'])) === \"('TP4', 'GB200')\"")
        wait_for_copies("4 copies")
        wrong = [text for text in watched.wrong if text.startswith(("off-host", "uncaught"))]
        assert not wrong, wrong


def test_a_kernel_answers_prefill_and_decode(browser, lab):  # noqa: F811
    with Watched(browser, 1280) as watched:
        page = watched.page
        run_all(page, lab + "apart.ipynb", ".pd svg path")

        def kernel(code, expression):
            return page.evaluate(IN_KERNEL, [code, expression])

        def wait_for_gaps(**asked):
            texts = [f"{1000 * one['p90_gap_s']:.0f}\u00a0ms" for one in prefill_decode(**asked).values()]
            page.wait_for_function("""(texts) => document.querySelector('.pd[aria-busy=false]') &&
                [...document.querySelectorAll('.pd .pd-numbers tbody tr:first-child td')].map((it) => it.textContent).join() === texts""", arg=",".join(texts))

        wait_for_gaps()
        # Python -> page
        assert kernel("widget.pd_slowdown = 2", "widget.timelines['apart']['stalled_gaps']") == "0"
        wait_for_gaps(pd_slowdown=2)
        assert "pd_slowdown=9.0: use a number from 1 to 4" in kernel("widget.pd_slowdown = 9", "0")
        # page -> Python, which answers with numbers that the page had not
        page.locator(".pd input[type=number][id$='-streams']").fill("7")
        page.locator(".pd input[value=poll]").check()
        wait_for_gaps(pd_slowdown=2, streams=7, load_admission="poll")
        assert kernel("", "(widget.streams, widget.load_admission, widget.engine)") == "(7, 'poll', '')"
        page.locator(".pd").get_by_role("button", name="Reset").click()
        wait_for_gaps()
        wrong = [text for text in watched.wrong if text.startswith(("off-host", "uncaught"))]
        assert not wrong, wrong


def test_a_kernel_answers_the_pareto_explorer(browser, lab):  # noqa: F811
    few = {"warm_s": 10, "window_s": 30}
    with Watched(browser, 1280) as watched:
        page = watched.page
        run_all(page, lab + "sizing.ipynb", ".pe svg path.pe-mark")

        def kernel(code, expression):
            return page.evaluate(IN_KERNEL, [code, expression])

        def wait_for_point(value):
            texts = [f"{float(f'{value[name]:.3g}'):g}" for name in ("e2e_tok_s_user", "output_tok_s_gpu", "in_flight_mean")]
            page.wait_for_function("""(texts) => document.querySelector('.pe[aria-busy=false]') &&
                [...document.querySelectorAll('.pe .rb-stat')].slice(0, 3).map((it) => it.textContent).join() === texts""", arg=",".join(texts))

        def ahead(**settings):
            return next(one["value"] for one in stored().points if one["settings"] == {**DEFAULTS, **settings})

        wait_for_point(ahead())
        # Python -> page
        kernel("with widget.hold_trait_notifications():\n    widget.decoders, widget.sessions = 3, 48", "0")
        wait_for_point(ahead(decoders=3, sessions=48))
        assert "sessions=0: use a whole number from 1 to 1000" in kernel("widget.sessions = 0", "0")
        # page -> Python, which simulates what nobody had
        kernel(f"widget.given = {{**widget.given, **{few}}}", "0")
        page.locator(".pe input[type=number][id$='-sessions']").fill("5")
        page.locator(".pe").get_by_role("button", name="Simulate it here").click()
        wait_for_point(point(**{**DEFAULTS, "decoders": 3, "sessions": 5}, **{**stored().given, **few}))
        assert kernel("", "(widget.sessions, widget.point['window_s'], widget.engine)") == "(5, 30, '')"
        page.locator(".pe").get_by_role("button", name="Reset").click()
        wait_for_point(ahead())
        wrong = [text for text in watched.wrong if text.startswith(("off-host", "uncaught"))]
        assert not wrong, wrong

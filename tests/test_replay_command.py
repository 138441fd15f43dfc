"""`minengine replay` from a terminal: what it prints, writes and refuses; the figure; and which traces it opens."""
import json
import xml.etree.ElementTree as ElementTree

import pytest
from clusters import tiny  # noqa: F401  a fixture
from serving import random_model, server

from minengine.cli import main
from minengine.config import ConfigError
from minengine.replay.figure import timelines
from minengine.progress import EVERY_S, progress
from minengine.workload.opening import open_sessions
from minengine.workload.report import DEFINITIONS, Record, report
from minengine.workload.traces import SHIPPED, Skipped, TraceError

SVG = "{http://www.w3.org/2000/svg}"
SMALL = ("--trace", str(SHIPPED / "agentx"), "--scale", "0.05", "--concurrency", "3", "--gap-cap-s", "5", "--duration-s", "30", "--block-size", "16",
         "--max-model-len", "512", "--num-gpu-blocks-override", "256", "--device", "cpu")


def run(*argv):
    return main(["replay", *map(str, argv)])


def lanes(svg):
    """Of each panel: its heading and the sessions in it, in order."""
    panels = []
    for text in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        if text.get("font-weight") == "bold":
            panels.append((text.text, []))
        elif text.get("text-anchor") == "end":
            panels[-1][1].append(text.text)
    return panels


# --- the command --------------------------------------------------------------------------------------------------

def test_the_same_sessions_on_the_engine_and_on_the_simulator_with_both_timelines(tiny, tmp_path, capsys):  # noqa: F811
    machine = tmp_path / "machine.yml"
    machine.write_text("kind: linear\nmeasured: {model: another}\nbase_s: 0.001\ndecode_s: 0.0001\nprefill_s: 0.00001\nattention_s: 1.0e-9\n")
    code = run(*SMALL, "--model", tiny["llama"], "--target", "both", "--machine", machine, "--json", tmp_path / "r.json", "--plot", tmp_path / "r.svg",
               "--slo-ttft-s", 10)
    printed = capsys.readouterr()
    assert code == 0 and "6 sessions; lengths x 0.05, 3 live sessions, gaps of 5 s at most" in printed.out
    heading = next(line for line in printed.out.splitlines() if line.startswith("metric"))
    assert heading.split() == ["metric", "engine", "simulator", "unit", "definition"] and "goodput_share" in printed.out
    assert "\nFew requests (engine " in printed.out and "\nNOT COMPARABLE: the simulator's steps are those of another" in printed.out
    text = json.loads((tmp_path / "r.json").read_text())
    engine, simulator = text["replays"]
    assert engine["note"] is None and "those of another" in simulator["note"]
    assert text["command"].startswith("minengine replay --trace ") and f"--machine {machine}" in text["command"]
    settings = text["settings"]
    assert (settings["model"], settings["engine"]["max_model_len"], settings["engine"]["num_threads"]) == (str(tiny["llama"]), 512, 1)
    assert settings["pool_rows"] == "float32" and settings["pool_tokens"] == settings["deployment"]["cached_tokens"] == 256 * 16
    assert settings["deployment"]["machine"] == str(machine)
    assert (engine["label"], simulator["label"], engine["stopped"]) == ("engine", "simulator", None)
    assert text["settings"]["concurrency"] == 3 and text["settings"]["slo"]["ttft_s"] == 10 and set(text["definitions"]) == set(DEFINITIONS)
    of = [{(r["session"], r["agent"], r["number"]): r for r in one["records"]} for one in (engine, simulator)]
    shared = of[0].keys() & of[1].keys()
    assert len(shared) >= 9 and {name for name, _, _ in of[0]} == {name for name, _, _ in of[1]}
    for turn in shared:  # the same prompts and answers
        assert of[0][turn]["input_tokens"] == of[1][turn]["input_tokens"]
        if of[0][turn]["end_s"] is not None and of[1][turn]["end_s"] is not None:
            assert of[0][turn]["output_tokens"] == of[1][turn]["output_tokens"]
            assert of[0][turn]["cached_tokens"] == of[1][turn]["cached_tokens"]  # and the same finds, where the pool holds all
    assert simulator["metrics"]["gap_s_p50"] > 0 and engine["metrics"]["gap_s_p50"] is None
    records = [Record(**r) for r in engine["records"]]
    assert report(records, engine["seconds"])["ttft_s_p50"] == engine["metrics"]["ttft_s_p50"]
    above, below = lanes((tmp_path / "r.svg").read_text())
    assert above[0].startswith("engine: ") and below[0].startswith("simulator: ") and above[1] == below[1] and len(above[1]) >= 3


def test_the_simulator_alone_takes_a_trace_on_any_machine(tiny, capsys):  # noqa: F811
    assert run(*SMALL, "--model", tiny["llama"], "--target", "sim", "--machine", "gb200-nvl72") == 0
    out = capsys.readouterr().out
    assert "simulator" in out and "goodput" not in out  # of no limit
    assert "NOT COMPARABLE: the simulator's steps are those of glm-5.3 (gb200-nvl72)" in out


@pytest.mark.parametrize("target", ["sim", "both"])
def test_a_machine_of_another_model_is_not_taken_by_default(target, tiny, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    assert run(*SMALL, "--model", tiny["llama"], "--target", target) == 2
    out, err = capsys.readouterr()
    assert "machine=this-machine: its steps are those of smollm2, and the model is" in err and out == ""  # before the engine has worked for nothing


def test_a_url_is_replayed_against(capsys):
    with server(**random_model()) as ours:
        code = run(*SMALL[:-8], "--duration-s", 60, "--requests", 8, "--gap-cap-s", 0, "--target", ours.base_url + "/v1", "--gpus", 2)
    out = capsys.readouterr().out
    assert code == 0 and "prompts as token ids, of exactly the trace's lengths" in out
    assert next(line for line in out.splitlines() if line.startswith("requests")).split()[1] >= "8"


def test_workers_in_processes_are_replayed_against(tiny, capsys):  # noqa: F811
    assert run(*SMALL, "--model", tiny["llama"], "--requests", 6, "--gap-cap-s", 0, "--prefill", 1, "--decode", 1, "--num-threads", 2) == 0
    assert "engine" in capsys.readouterr().out


def test_malformed_lines_are_counted_and_a_failing_request_is_told(tiny, tmp_path, capsys):  # noqa: F811
    good = {"id": "s", "block_size": 64, "requests": [{"t": 0, "type": "n", "in": tokens, "out": 4, "hash_ids": list(range(tokens // 64))}
                                                      for tokens in (640, 64_000, 700)]}
    (tmp_path / "t.jsonl").write_text("{broken\n" + json.dumps(good) + "\n")
    options = ("--trace", tmp_path / "t.jsonl", "--model", tiny["llama"], *SMALL[2:], "--scale", "0.1", "--concurrency", "1", "--requests", "3")
    assert run(*options, "--skip-bad") == 0
    err = capsys.readouterr().err
    assert "1 malformed parts of the trace were passed over; the first: " in err and "t.jsonl, line 1: is no complete JSON" in err
    assert "1 requests to the engine failed; the first: prompt: has 6400 tokens" in err
    assert run(*options) == 2
    assert "is no complete JSON" in capsys.readouterr().err


def test_a_replay_in_which_all_fails_is_no_success(tiny, tmp_path, capsys):  # noqa: F811
    long = {"id": "s", "block_size": 64, "requests": [{"t": 0, "type": "n", "in": 6400, "out": 4, "hash_ids": list(range(100))}]}
    (tmp_path / "t.jsonl").write_text(json.dumps(long))
    assert run("--trace", tmp_path / "t.jsonl", "--model", tiny["llama"], *SMALL[2:], "--scale", "1", "--requests", "1") == 1
    assert "requests to the engine failed" in capsys.readouterr().err


@pytest.mark.parametrize("argv, complaint", [
    (("--target", "moon"), "target='moon': use engine, sim, both or a URL"), (("--plot", "x.png"), "use a name that ends in .svg"),
    (("--warm-s", "300"), "warm_s=300.0: use a time"), (("--trace", "/nowhere/x.jsonl"), "cannot be opened"), (("--scale", "0"), "scale=0.0"),
    (("--concurrency", "0"), "concurrency=0"), (("--slo-ttft-s", "-1"), "slo ttft_s=-1.0"), (("--prefill", "1"), "prefill=1: needs decode=1"),
    (("--target", "sim", "--topology", "TP2"), "target=sim: simulates one engine"), (("--json", "/nowhere/x.json"), "No such file"),
    (("--target", "http://127.0.0.1:1"), "the connection failed"), (("--requests", "0"), "requests=0: use a whole number, 1 or more"),
    (("--gpus", "0"), "gpus=0: use a whole number"), (("--gpus", "2"), "gpus=2: does nothing without --target URL"),
    (("--timeout", "3"), "timeout=3.0: does nothing without"), (("--machine", "h200"), "machine='h200': does nothing without --target sim or both"),
    (("--plot-sessions", "3"), "plot_sessions=3: does nothing without --plot"), (("--plot", "x.svg", "--plot-sessions", "0"), "plot_sessions=0: use"),
    (("--cold-tokens", "5"), "cold_tokens=5: does nothing without --cold-per-s"), (("--seed", "-1"), "seed=-1: use a whole number"),
    (("--target", "http://127.0.0.1:1", "--max-num-seqs", "4"), "max_num_seqs=4: is an engine's, and the target is a server"),
    (("--target", "http://127.0.0.1:1", "--decode", "1"), "decode=1: is an engine's"), (("--target", "sim", "--prefill", "1"), "prefill=1: needs decode=1"),
    (("--json", "/"), "json='/': cannot be written (Is a directory)"), (("--plot", "/nowhere/x.svg"), "plot='/nowhere/x.svg': cannot be written"),
    (("--target", "sim", "--scale", "1e300"), "scale=1e+300: makes "), (("--cold-per-s", "1e9"), "cold_per_s=1000000000.0: use requests a second, 0 to 1000"),
    (("--gap-cap-s", "nan"), "gap_cap_s=nan"),
])
def test_what_cannot_be_is_one_sentence(argv, complaint, capsys):
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert complaint in err and err.count("\n") == 1
    assert out == "" or complaint in ("the connection failed", "scale=1e+300: makes ")  # known before the first word


def test_what_is_refused_leaves_no_file_and_harms_none(tmp_path):
    (tmp_path / "old.svg").write_text("old")
    assert run("--json", tmp_path / "new.json", "--plot", tmp_path / "old.svg", "--trace", "/nowhere/x.jsonl") == 2
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old.svg", "old")]


def test_where_there_is_no_terminal_a_line_is_written_now_and_then(capsys):
    now = iter([0.0, EVERY_S - 1, EVERY_S, EVERY_S, EVERY_S + 1, 2 * EVERY_S, 2 * EVERY_S])
    with progress("engine", 300.0, "s", clock=lambda: next(now)) as tell:
        for done in (10, 20, 30, 999):
            tell(done, f"{done} ended")
    assert capsys.readouterr().err == "engine: 20 of 300 s, 20 ended\nengine: 300 of 300 s, 999 ended\n"


@pytest.mark.parametrize("argv, complaint", [
    (["serve", "glm-mini"], "minengine: unrecognized arguments: glm-mini; a model is named with --model glm-mini; see minengine --help"),
    (["replay", "--nope"], "minengine: unrecognized arguments: --nope; see minengine --help"),
    (["replay", "--concurrency", "x"], "minengine replay: argument --concurrency: invalid int value: 'x'; see minengine replay --help"),
])
def test_what_is_typed_wrong_is_one_sentence(argv, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and capsys.readouterr().err == complaint + "\n"


# --- which traces ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("trace, words", [
    ("agentx", "sessions"), ("mooncake", "put together to conversations"), ("generated", "fitted to the public sessions"),
    (SHIPPED / "agentx" / "synthetic_01.json", "1 sessions"), (SHIPPED / "mooncake" / "requests.jsonl", "conversations"),
])
def test_traces_are_opened_by_name_or_by_what_they_hold(trace, words):
    sessions, told = open_sessions(trace if isinstance(trace, str) else str(trace))
    assert words in told and next(iter(sessions)).requests


def test_a_csv_is_opened_as_sessions_of_one_request_as_often_as_asked(tmp_path):
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,5\n1,bad,5\n2,300,5\n")
    skipped = Skipped()
    sessions, told = open_sessions(tmp_path / "t.csv", skip_bad=skipped)
    for _ in range(2):
        assert [r.input_tokens for session in sessions for r in session.requests] == [100, 300]
    assert skipped.count == 1 and "each request a session" in told
    with pytest.raises(TraceError, match="line 3, field 'ContextTokens'"):
        list(open_sessions(tmp_path / "t.csv")[0])


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv", "t.json", ""])
@pytest.mark.parametrize("skip", [False, True])
def test_a_trace_that_holds_nothing_is_named(name, skip, tmp_path):
    path = tmp_path / name
    if name:
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" if name == "t.csv" else "\n")
    with pytest.raises(TraceError, match=f"{path}.* (holds|is) no "):
        open_sessions(path, skip_bad=Skipped() if skip else None)


def test_what_is_no_trace_is_known_when_it_is_opened(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 5}\n')
    with pytest.raises(TraceError, match="line 1, field 'input_length': is missing"):
        open_sessions(tmp_path / "bad.jsonl")
    with pytest.raises(TraceError, match="bad.jsonl: holds no request that can be read; the first complaint: .*line 1, field 'input_length': is missing"):
        open_sessions(tmp_path / "bad.jsonl", skip_bad=Skipped())
    (tmp_path / "passwd").write_text("root:x:0\n")
    with pytest.raises(TraceError, match="passwd: is no JSON; name a trace"):
        open_sessions(tmp_path / "passwd")
    with pytest.raises(TraceError, match="path=5: use the path of a file or folder"):
        open_sessions(5)


# --- the figure --------------------------------------------------------------------------------------------------------

def record(session, agent, number, *times, **more):
    arrival_s, admitted_s, first_s, end_s = times
    return Record(session=session, agent=agent, number=number, arrival_s=arrival_s, admitted_s=admitted_s, first_token_s=first_s, end_s=end_s,
                  input_tokens=10, output_tokens=3, **more)


def bars(svg):
    """(title, [(x, width, fill)]) of each request."""
    return [(group[0].text, [(float(r.get("x")), float(r.get("width")), r.get("fill")) for r in group[1:]])
            for group in ElementTree.fromstring(svg).iter(f"{SVG}g")]


def test_a_bar_has_its_parts_in_seconds():
    whole, unknown = record("a#0", 0, 0, 0.0, 2.0, 3.0, 7.0), record("a#0", 0, 1, 8.0, None, 9.0, 10.0)
    failed, open_one = record("b#0", 0, 0, 1.0, None, None, 1.0, error="a < b"), record("b#0", 1, 0, 4.0, 5.0, None, None)
    drawn = bars(timelines({"engine": [whole, unknown, failed, open_one]}, 10.0))
    scale = (1120 - 150 - 16) / 10
    parts = [[(round((x - 150) / scale, 3), round(width / scale, 3)) for x, width, _ in some] for _, some in drawn]
    assert parts[0] == [(0, 2), (2, 1), (3, 4)] and parts[1] == [(8, 1), (9, 1)] and parts[3] == [(4, 1), (5, 5)]
    assert len(parts[2]) == 1 and "failed: a < b" in drawn[2][0] and drawn[2][1][0][2] != drawn[0][1][0][2]
    assert [fill for _, _, fill in drawn[1][1]] == [fill for _, _, fill in drawn[0][1][1:]]  # prefill and decode


def test_panels_have_the_same_lanes_and_say_what_is_not_shown():
    replays = {"one": [record(f"s{i}#0", 0, 0, float(i), None, None, None) for i in range(6)],
               "two": [record(f"s{i}#0", 0, 0, float(9 - i), None, None, None) for i in range(8)]}
    panels = lanes(timelines(replays, 10.0, most=4))
    assert [names for _, names in panels] == [["s0#0", "s1#0", "s2#0", "s3#0"]] * 2
    assert [heading for heading, _ in panels] == ["one: 6 requests, 2 more sessions not shown", "two: 8 requests, 4 more sessions not shown"]


def test_nothing_to_draw_is_refused():
    with pytest.raises(ConfigError, match="no request to draw"):
        timelines({"engine": []}, 10.0)

"""`minengine replay` from a terminal: what it prints, writes and refuses; the figure; and which traces it opens."""
import json
import xml.etree.ElementTree as ElementTree

import pytest
from clusters import tiny  # noqa: F401  a fixture
from serving import random_model, server

from minengine.cli import main
from minengine.config import ConfigError
from minengine.replay.figure import timelines
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
    assert "was measured with another, and the model is" in printed.err
    text = json.loads((tmp_path / "r.json").read_text())
    engine, simulator = text["replays"]
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


@pytest.mark.parametrize("argv, complaint", [
    (("--target", "moon"), "target='moon': use engine, sim, both or a URL"), (("--plot", "x.png"), "use a name that ends in .svg"),
    (("--warm-s", "300"), "warm_s=300.0: use a time"), (("--trace", "/nowhere/x.jsonl"), "cannot be opened"), (("--scale", "0"), "scale=0.0"),
    (("--concurrency", "0"), "concurrency=0"), (("--slo-ttft-s", "-1"), "slo ttft_s=-1.0"), (("--prefill", "1"), "prefill=1: needs decode=1"),
    (("--target", "sim", "--topology", "TP2"), "target=sim: simulates one engine"), (("--json", "/nowhere/x.json"), "No such file"),
    (("--target", "http://127.0.0.1:1"), "the connection failed"),
])
def test_what_cannot_be_is_one_sentence(argv, complaint, capsys):
    assert run(*argv) == 2
    err = capsys.readouterr().err
    assert complaint in err and err.count("\n") == 1


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

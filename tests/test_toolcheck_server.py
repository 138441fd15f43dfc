"""The suite on the real server: a slice in both formats by a model that writes at random, and a few cases by SmolLM2 in a process of its own.

A model without sense asks more of grammar and parser than one that mostly writes what everybody does.
"""
import pytest
from serving import random_model, server

from minengine.cli import main
from minengine.toolcheck import Client, all_cases, load, rates, run, select


@pytest.mark.parametrize("parser", ["glm", "llama"])
def test_a_slice_holds_on_our_server(parser):
    with server(**random_model(), serve={"tool_call_parser": parser}) as running:
        client = Client(running.base_url)
        outcomes = run(select(all_cases(), limit=80), client, client.models()[0], max_tokens=64)
    assert [(o.id, o.verdict.kind, o.verdict.detail) for o in outcomes if o.verdict.kind != "ok"] == []
    assert len({o.category for o in outcomes}) >= 15 and rates(outcomes)[-1].called >= 40


def test_without_a_grammar_the_suite_sees_it():
    with server(**random_model(), serve={"tool_call_parser": "glm", "tool_grammar": False}) as running:
        client = Client(running.base_url)
        outcomes = run(select(all_cases(), ["prefixes"], limit=6), client, client.models()[0], max_tokens=64)
    assert rates(outcomes)[-1].called == 0 and all(o.verdict.kind == "lost" or o.verdict.cut for o in outcomes)


def test_the_command_starts_a_server_of_its_own(capsys, tmp_path):
    code = main(["toolcheck", "--tool-call-parser", "glm", "--serve-flags=--num-threads 1 --max-model-len 1024", "--only", "types,bad-requests", "--cases", "8",
                 "--max-tokens", "48", "--json", str(tmp_path / "out.json")])
    assert code == 0, capsys.readouterr().out
    assert "Faults of any kind: 0 of 8 cases" in capsys.readouterr().out and len(load(tmp_path / "out.json")) == 8


def test_a_server_that_cannot_start_says_why(capsys):
    assert main(["toolcheck", "--model", "no-such-model", "--cases", "1"]) == 2
    assert "the server ended with code 2 before it answered: minengine: model 'no-such-model' was not found" in capsys.readouterr().err

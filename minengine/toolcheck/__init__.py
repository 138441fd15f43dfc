"""A published suite for tool calls: do the calls that a server returns hold, on any OpenAI-compatible URL?

`minengine toolcheck` sends more than 500 cases and prints the rate of malformed or lost calls with its 95% interval. Whether a call was wise is the
model's affair; that it can be run, fits its schema, and is the same streamed and whole is the server's.

    case.py           a case, and the kinds of verdict
    shapes.py         the schemas; cases.py, conversations.py, refusals.py: the requests made of them
    client.py, wire.py   HTTP, and answers put together from their bytes
    judge.py          pure functions from a case and an answer to a verdict
    run.py            all cases, rates, the table; own_server.py, command.py: from a terminal
"""
from .case import CALL_FAULTS, KINDS, Case, Expect, Verdict
from .cases import CATEGORIES, all_cases, select
from .client import Client, NoAnswer
from .judge import compare, judge
from .run import Outcome, Rate, StoredRun, load, rates, run, save, stored, table
from .wire import Answer, from_stream, from_whole

__all__ = ["Answer", "CALL_FAULTS", "CATEGORIES", "Case", "Client", "Expect", "KINDS", "NoAnswer", "Outcome", "Rate", "StoredRun", "Verdict", "all_cases",
           "compare", "from_stream", "from_whole", "judge", "load", "rates", "run", "save", "select", "stored", "table"]

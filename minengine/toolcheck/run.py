"""Send the cases, judge the answers, and say the rate."""
from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

from ..results import RESULTS, TOOLCHECK, ResultError
from ..workload.stats import wilson
from .case import CALL_FAULTS, KINDS, Case, Verdict
from .client import Client, NoAnswer
from .judge import compare, judge
from .wire import Answer

__all__ = ["Outcome", "Rate", "StoredRun", "load", "rates", "run", "save", "stored", "table"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one case. `request` and `answer` are kept where the verdict is not ok."""

    id: str
    category: str
    verdict: Verdict
    seconds: float
    request: Any = None
    answer: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Counts of one category. called: cases whose answer held a call; at_stake: those, and the ones that lost or spoilt theirs."""

    category: str
    cases: int
    called: int
    calls: int
    cut: int
    at_stake: int
    faults: dict[str, int]  # by kind, without ok

    @property
    def call_faults(self) -> int:
        return sum(self.faults[kind] for kind in CALL_FAULTS)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of malformed or lost calls among the cases at stake; nothing at stake tells nothing: 0 to 1."""
        return wilson(self.call_faults, self.at_stake) if self.at_stake else (0.0, 1.0)


def run(cases: Sequence[Case], client: Client, model: str, *, max_tokens: int = 160, concurrency: int = 8,
        progress: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """The outcome of every case, in their order; `progress` hears each as it comes, from the thread that had it.

    Raises:
        ValueError: max_tokens or concurrency below 1.
    """
    for name, value in (("max_tokens", max_tokens), ("concurrency", concurrency)):
        if value < 1:
            raise ValueError(f"{name}={value}: use 1 or more")

    def one(case: Case) -> Outcome:
        outcome = _outcome(case, client, model, max_tokens)
        if progress is not None:
            progress(outcome)
        return outcome

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, cases))


def _outcome(case: Case, client: Client, model: str, max_tokens: int) -> Outcome:
    body = {"model": model, "max_tokens": max_tokens, **case.body} if isinstance(case.body, dict) else case.body
    started, answer = time.monotonic(), None
    try:
        answer = client.chat(body)
        verdict = judge(case, answer)
        if case.expect.both and verdict.kind == "ok":
            verdict = _twin(case, client, body, answer, verdict)
        if case.category == "bad-requests":
            client.models()
    except NoAnswer as error:
        verdict = Verdict(kind="no_answer", detail=str(error) if answer is None else f"after the answer: {error}")
    spoilt = verdict.kind != "ok"
    return Outcome(id=case.id, category=case.category, verdict=verdict, seconds=time.monotonic() - started, request=body if spoilt else None,
                   answer={**asdict(answer), "calls": list(answer.calls)} if spoilt and answer is not None else None)


def _twin(case: Case, client: Client, body: dict[str, Any], whole: Answer, verdict: Verdict) -> Verdict:
    """Judge the streamed twin and compare. A server whose whole answer changes by itself cannot be compared, so a difference is looked at twice."""
    streamed = client.chat({**body, "stream": True, "stream_options": {"include_usage": True}})
    second = judge(case, streamed)
    if second.kind != "ok":
        return Verdict(kind=second.kind, detail=f"streamed: {second.detail}", calls=second.calls, cut=second.cut)
    difference = compare(whole, streamed)
    if difference and compare(whole, client.chat(body)) is None:
        return Verdict(kind="mismatch", detail=difference, calls=verdict.calls, cut=verdict.cut)
    return verdict


def rates(outcomes: Sequence[Outcome]) -> list[Rate]:
    """A rate for each category in the order of its first case, and one for `all`."""
    categories = list(dict.fromkeys(outcome.category for outcome in outcomes))
    return [_rate(name, [o for o in outcomes if o.category == name]) for name in categories] + [_rate("all", outcomes)]


def _rate(category: str, outcomes: Sequence[Outcome]) -> Rate:
    verdicts = [outcome.verdict for outcome in outcomes]
    return Rate(category=category, cases=len(verdicts), called=sum(v.calls > 0 for v in verdicts), calls=sum(v.calls for v in verdicts),
                cut=sum(v.cut for v in verdicts), at_stake=sum(v.calls > 0 or v.kind in CALL_FAULTS for v in verdicts),
                faults={kind: sum(v.kind == kind for v in verdicts) for kind in KINDS if kind != "ok"})


def table(outcomes: Sequence[Outcome]) -> str:
    """The suite's table in Markdown, one row a category, and under it the two sentences that count.

    Raises:
        ValueError: no outcomes.
    """
    if not outcomes:
        raise ValueError("outcomes: is empty; run at least one case")
    names = [kind for kind in KINDS if kind != "ok"]
    rows = [["category", "cases", "with calls", "calls", "cut", *(name.replace("_", " ") for name in names), "malformed or lost, 95%"]]
    for rate in rates(outcomes):
        shown = f"{_percent(rate.call_faults / rate.at_stake)} ({_interval(rate.interval)})" if rate.at_stake else "no call at stake"
        rows.append([rate.category, *map(str, (rate.cases, rate.called, rate.calls, rate.cut, *(rate.faults[name] for name in names))), shown])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["| " + " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|")
    return "\n".join([*lines, "", *_sentences(rates(outcomes)[-1])])


def _sentences(rate: Rate) -> list[str]:
    faults = sum(rate.faults.values())
    calls = "No call was at stake in any case."
    if rate.at_stake:
        calls = (f"Malformed or lost calls: {rate.call_faults} of {rate.at_stake} cases in which a call was at stake, "
                 f"{_percent(rate.call_faults / rate.at_stake)} (95% interval {_interval(rate.interval)}).")
    share, bounds = faults / rate.cases, wilson(faults, rate.cases)
    return [calls, f"Faults of any kind: {faults} of {rate.cases} cases, {_percent(share)} (95% interval {_interval(bounds)})."]


def _percent(share: float) -> str:
    return f"{share * 100:.1f}%"


def _interval(bounds: tuple[float, float]) -> str:
    return f"{bounds[0] * 100:.1f} to {bounds[1] * 100:.1f}"


def save(path: Path, outcomes: Sequence[Outcome], **about: Any) -> None:
    """All verdicts as JSON, one a line, with what the run was about."""
    lines = ",\n".join(json.dumps(asdict(outcome), ensure_ascii=False) for outcome in outcomes)
    path.write_text(f'{json.dumps(about, ensure_ascii=False)[:-1]},\n "outcomes": [\n{lines}\n]}}\n', encoding="utf-8")


def load(path: Path) -> list[Outcome]:
    """The outcomes that `save` wrote, for `table`."""
    entries = json.loads(path.read_text(encoding="utf-8"))["outcomes"]
    return [Outcome(**{**entry, "verdict": Verdict(**entry["verdict"])}) for entry in entries]


@dataclass(frozen=True)
class StoredRun:
    """A run of the whole suite that is kept with the book."""

    model: str
    flags: list[str]  # of the server
    seed: int
    max_tokens: int
    machine: str
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    outcomes: list[Outcome]


def stored(folder: str | Path = RESULTS) -> list[StoredRun]:
    """The kept runs, `toolcheck-*.json`, in the order of their names.

    Raises:
        ResultError: a file is not as `minengine toolcheck --json` writes it.
    """
    found = []
    for path in sorted(Path(folder).glob(f"{TOOLCHECK}*.json")):
        try:
            found.append(StoredRun(**{**json.loads(path.read_text(encoding="utf-8")), "outcomes": load(path)}))
        except (ValueError, TypeError, KeyError) as error:
            raise ResultError(f"{path.name}: {error}; write it with `minengine toolcheck --json`") from error
    return found

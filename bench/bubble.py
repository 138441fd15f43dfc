"""Who makes a request wait whose rows are there: the four parts of the wait, the budget of a step, and how a finished load is noticed.

`python -m bench bubble` prints the rows; `python -m bench.bubble` also keeps the result in `book/results/`. glm-mini in float32 with a host tier; most
requests go on from a history of 1,024 tokens, one in eight is a cold prompt as long, and all come when they come (`minengine/workload/open_loop.py`).
One process; each schedule is served under every setting, there and back, so a figure is one of a schedule and pass, and two settings are
compared within it. Seconds are those of the engine's thread, and those in which it had nothing to do.
"""
from __future__ import annotations

import argparse
from typing import Any, Iterator

from minengine.workload.stats import mean, median

from .harness import Bench, Variant
from .keep import keep, measurement
from .table import Row, at_most, figure, ratio

BUDGETS, CAP = (128, 256, 512, 1024), 256
REQUESTS, ROUNDS = 64, 3
SETTINGS = {**{f"{admission}-{budget}": (budget, admission, 0) for budget in BUDGETS for admission in ("poll", "event")},
            **{f"{admission}-{BUDGETS[-1]}-cap-{CAP}": (BUDGETS[-1], admission, CAP) for admission in ("poll", "event")}}
PARTS = ("ask", "retrieve", "poll", "hand-off", "admit")
FIGURES = {
    "queue-ms": "median wait from arrival to the first step, of all requests",
    "queue-mean-ms": "mean wait from arrival to the first step, of all requests",
    "ttft-ms": "median time to first token, of all requests",
    "ttft-known-ms": "median time to first token, of requests with a known history",
    "ttft-cold-ms": "median time to first token, of cold prompts",
    "step-ms": "mean length of the step that is going on at any moment, while there is one",
    "ask-ms": "until the tier is asked, of requests that it serves (mean)",
    "retrieve-ms": "until their rows are in the pool (mean)",
    "poll-ms": "until somebody looks (mean)",
    "hand-off-ms": "until the scheduler knows (mean)",
    "admit-ms": "until a step takes them (mean)",
    "after-ms": "from rows in the pool to the step that takes the request: poll, hand off and admit (mean)",
    "tier-n": "requests that the tier served in a pass",
}


def rows(bench: Bench) -> list[Row]:
    found = _measure(bench)
    of, large, half = found["settings"], f"poll-{BUDGETS[-1]}", f"poll-{BUDGETS[-2]}"
    lines = [ratio(f"median wait: budget {b} against {a}, poll", of[f"poll-{b}"]["queue-ms"], of[f"poll-{a}"]["queue-ms"], None, "ms")
             for b, a in zip(BUDGETS, BUDGETS[1:])]
    lines += [ratio(f"median TTFT: budget {b} against {a}, poll", of[f"poll-{b}"]["ttft-ms"], of[f"poll-{a}"]["ttft-ms"], None, "ms")
              for b, a in zip(BUDGETS, BUDGETS[1:])]
    lines.append(ratio(f"TTFT of cold prompts: budget {BUDGETS[0]} against {BUDGETS[-1]}, poll", of[f"poll-{BUDGETS[0]}"]["ttft-cold-ms"], of[large]["ttft-cold-ms"], None, "ms"))
    lines.append(ratio(f"median wait: at most {CAP} tokens of a prompt in a step of {BUDGETS[-1]}, against no such limit, poll",
                       of[f"{large}-cap-{CAP}"]["queue-ms"], of[large]["queue-ms"], None, "ms"))
    for name in (n for n in SETTINGS if n.startswith("event")):
        other = name.replace("event", "poll")
        lines.append(ratio(f"mean wait: {name} against {other}", of[name]["queue-mean-ms"], of[other]["queue-mean-ms"], at_most(1.0), "ms"))
    lines += [figure(f"{part}, budget {budget}, poll", of[f"poll-{budget}"][f"{part}-ms"], None, "ms") for budget in (BUDGETS[0], BUDGETS[-1]) for part in PARTS]
    return lines


def _measure(bench: Bench, rounds: int = ROUNDS, requests: int = REQUESTS) -> dict[str, Any]:
    return bench.run(Variant("waits", "bench.bubble:waits", {"rounds": rounds, "requests": requests, "threads": 1})).result


def waits(threads: int, rounds: int = ROUNDS, requests: int = REQUESTS) -> dict[str, Any]:
    import torch

    from minengine.workload.open_loop import Desk, Setting, turns

    torch.set_num_threads(threads)
    found: dict[str, dict[str, list[float]]] = {name: {figure: [] for figure in FIGURES} for name in SETTINGS}
    with Desk(threads=threads) as desk:
        for turn, name in _order(rounds):
            served = desk.serve(turns(requests, seed=turn), Setting(*SETTINGS[name]))
            for figure, value in summarise(served).items():
                found[name][figure].append(value)
        return {"settings": found, "cold_ms": [1e3 * desk.cold_s], "known_ms": [1e3 * desk.known_s], "interval_ms": [1e3 * desk.interval_s]}


def _order(rounds: int) -> Iterator[tuple[int, str]]:
    for turn in range(1, rounds + 1):
        yield from ((turn, name) for name in (*SETTINGS, *reversed(SETTINGS)))


def summarise(run: Any) -> dict[str, float]:
    """The figures of one pass."""
    parts = [mean(part) for part in zip(*run.parts_ms())]
    steps = run.step_s
    return {"queue-ms": median(run.queue_ms()), "queue-mean-ms": mean(run.queue_ms()), "ttft-ms": median(run.ttft_ms()), "ttft-known-ms": median(run.ttft_ms(False)),
            "ttft-cold-ms": median(run.ttft_ms(True)), "step-ms": 1e3 * sum(s * s for s in steps) / sum(steps),
            **{f"{name}-ms": value for name, value in zip(PARTS, parts)}, "after-ms": sum(parts[2:]), "tier-n": float(len(run.parts_ms()))}


def _kept(found: dict[str, Any]) -> list[dict[str, Any]]:
    of = found["settings"]
    kept = [measurement("bubble-alone-cold-ms", "a cold prompt alone on the engine, first to last token", "ms", found["cold_ms"]),
            measurement("bubble-alone-known-ms", "a request with a known history alone on the engine", "ms", found["known_ms"]),
            measurement("bubble-interval-ms", "mean time between two arrivals", "ms", found["interval_ms"])]
    for name, (budget, admission, cap) in SETTINGS.items():
        how = f"budget {budget}, {admission}" + (f", at most {cap} tokens of a prompt in a step" if cap else "")
        kept += [measurement(f"bubble-{name}-{figure}", f"{what}; {how}", "requests" if figure == "tier-n" else "ms", of[name][figure]) for figure, what in FIGURES.items()]

    def cut(name: str, what: str, after: str, before: str, figure: str) -> None:
        pairs = zip(of[after][figure], of[before][figure])
        kept.append(measurement(f"bubble-cut-{name}", f"{what}, a sample a pass", "of 1", [1 - a / b for a, b in pairs]))

    for figure in ("queue-ms", "queue-mean-ms", "ttft-ms", "ttft-cold-ms"):
        what = FIGURES[figure].partition(";")[0]
        for a, b in zip(BUDGETS, BUDGETS[1:]):
            cut(f"{a}-{figure.removesuffix('-ms')}", f"cut of the {what} by a budget of {a} in place of {b}, poll", f"poll-{a}", f"poll-{b}", figure)
        cut(f"cap-{figure.removesuffix('-ms')}", f"cut of the {what} by at most {CAP} tokens of a prompt in a step of {BUDGETS[-1]}, poll", f"poll-{BUDGETS[-1]}-cap-{CAP}",
            f"poll-{BUDGETS[-1]}", figure)
        for name in (n.removeprefix("event-") for n in SETTINGS if n.startswith("event")):
            cut(f"event-{name}-{figure.removesuffix('-ms')}", f"cut of the {what} by event in place of poll, budget {name.replace('-', ' ')}", f"event-{name}", f"poll-{name}", figure)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bubble", description="What a ready request waits for; kept in book/results/.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"schedules, each served there and back (default: {ROUNDS})")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"requests of a schedule (default: {REQUESTS})")
    args = parser.parse_args()
    bench = Bench(threads=1)
    kept = _kept(_measure(bench, args.rounds, args.requests))
    foreign = bench.runs[-1].foreign_cores
    if foreign is not None:
        kept.append(measurement("bubble-foreign-cores", "cores that other programs kept busy meanwhile: a quiet machine has none", "cores", [foreign]))
    for one in kept:
        print(f"{one['name']:36} {one['median']:9.2f} {one['unit']:5} ({one['spread'][0]:.2f} to {one['spread'][1]:.2f}), n={one['n']}: {one['what']}")
    command = " ".join(["python -m bench.bubble", *(f"--{name} {value}" for name, value in vars(args).items() if value != parser.get_default(name))])
    print(keep("bubble", command, kept).name)


if __name__ == "__main__":
    main()

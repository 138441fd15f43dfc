"""The constants of the source's rack that were not published, from the few of its figures that are taken as given.

    DEP8 profile, five parts    exchange_share, gemm_share, indexer_share, attention_share, token_s
    ITL of TP4                  launch_s: 2,264 kernels a forward are most of what is not bytes
    ITL of DEP8                 far_meeting_s: 225 collectives a forward, of ranks on two boards
    retrieval, transfer         retrieve_bytes_s, copy_s

Nine figures for nine constants; all others are published or assumed. Each depends a little on the others (a part of the profile has launches in
it), so they are solved in turn until nothing moves.

    python -m minengine.simulate.rack_fit       prints them
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from math import fsum
from pathlib import Path
from typing import Any

from ..arithmetic.copies import GLM_5_3, topology
from ..arithmetic.moving import copy_costs
from ..arithmetic.rows import kv_row, session_bytes
from .machine import Machine, machine as read_machine
from .step_model import PARTS, StepModel
from .work import Work, attended

__all__ = ["CONTEXT", "FITTED", "Decoding", "chunk", "decode_model", "decoding", "fit_rack", "itl_s", "prefill_model", "preset", "profile_parts"]

FITTED = ("exchange_share", "gemm_share", "indexer_share", "attention_share", "token_s", "launch_s", "far_meeting_s", "retrieve_bytes_s", "copy_s")
PRESETS = Path(__file__).with_name("presets")
CONTEXT = 146_000  # tokens of the source's typical session: the prompt and what a turn adds
ROUNDS = 24


def preset(name: str = "prime-inference") -> dict[str, Any]:
    """A deployment's published figures and the assumptions about the rest, see the file."""
    import yaml

    return yaml.safe_load((PRESETS / f"{name}.yml").read_text(encoding="utf-8"))


def chunk(new_tokens: int, prefix_tokens: int, index_topk: int) -> Work:
    """A rank's work on the next tokens of one prompt."""
    return Work(prefill_tokens=new_tokens, prefill_pairs=attended(prefix_tokens, new_tokens, None),
                prefill_attended=attended(prefix_tokens, new_tokens, index_topk))


class Decoding:
    """How many requests decode at once in a closed loop, as far as means tell.

    A session is a cycle of a wait, an answer and a gap: decode_s / (decode_s + wait_s + gap_s) of its time it decodes, and sometimes with a few
    subagents at once.

    Args:
        given: a preset.
        wait_s: from a request to its first token; None: retrieval, one chunk and transfer of the calibration, and no queue.
    """

    def __init__(self, given: Mapping[str, Any], wait_s: float | None = None) -> None:
        fixed, workload = given["calibration"], given["workload"]
        self.output_tokens = workload["output_tokens"]
        self.gap_s, self.at_once = (workload[name][given["assumed"]["gap_cap_s"]] for name in ("gap_s", "at_once"))
        known_ms = fixed["retrieve_ms"] + sum(fixed["profile"]["ms"].values()) + fixed["transfer"]["ms"]
        self.wait_s = known_ms / 1e3 if wait_s is None else wait_s

    def requests(self, sessions: float, itl: float) -> float:
        """That decode at once, of all engines together; `itl` in seconds."""
        decode_s = self.output_tokens * itl
        return sessions * self.at_once * decode_s / (decode_s + self.wait_s + self.gap_s)


def decoding(requests: float, context: int, index_topk: int) -> Work:
    """A rank's work on `requests` decodes (a mean, so any number) of `context` tokens each."""
    return Work(decodes=requests, context=requests * context, attended=requests * min(context, index_topk), sampled=requests)


def itl_s(model: StepModel, requests: float, context: int = CONTEXT) -> float:
    """Seconds a token of an engine that decodes that many requests at once, spread evenly over its data ranks."""
    work = decoding(requests / model.shape.data, context, model.config.index_topk)
    group = Work(*(model.shape.data * count for count in work))
    return model.forward_s(work, group) / model.tokens_per_step


def decode_model(machine: Machine, name: str, given: Mapping[str, Any], **changed: Any) -> StepModel:
    """A decoder of the preset."""
    assumed = given["assumed"]
    options = {key: assumed[key] for key in ("kv_cache_dtype", "weights", "experts", "draft_tokens", "tokens_per_step")}
    return StepModel(machine, name, **{**options, **changed})


def prefill_model(machine: Machine, name: str, given: Mapping[str, Any], **changed: Any) -> StepModel:
    """A prefill engine of the preset: it has no answers to guess at."""
    return decode_model(machine, name, given, **{"draft_tokens": 0, "tokens_per_step": 1.0, **changed})


def profile_parts(machine: Machine, given: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of the profiled forward, by parts: the rank's own chunk, and as much on each peer."""
    model, profile = prefill_model(machine, "DEP8", given), given["calibration"]["profile"]
    work = chunk(profile["new_tokens"], profile["prefix_tokens"], model.config.index_topk)
    return model.parts(work, model.shape.data * work.prefill_tokens)


def fit_rack(machine: Machine, given: Mapping[str, Any] | None = None) -> Machine:
    """`machine` with its FITTED constants solved for; the others stay.

    Raises:
        ValueError: figures that no value of a constant explains.
    """
    given = preset() if given is None else given
    fixed, assumed = given["calibration"], given["assumed"]
    itl, loop = fixed["itl"], Decoding(given)
    token_bytes = kv_row(GLM_5_3, assumed["kv_cache_dtype"]).bytes_per_token
    retrieve = session_bytes(assumed["retrieved_tokens"], token_bytes) / (fixed["retrieve_ms"] / 1e3)
    moved = session_bytes(assumed["transferred_tokens"], token_bytes)
    _, copy_s = copy_costs(moved, (fixed["transfer"]["descriptors"], fixed["transfer"]["ms"] / 1e3), (0, moved / machine["wire_bytes_s"]))
    constants = {"retrieve_bytes_s": retrieve, "copy_s": copy_s}
    steps = [(f"profile: {part}", name, low, high, lambda one, part=part: profile_parts(one, given)[part], fixed["profile"]["ms"][part])
             for part, (name, low, high) in zip(PARTS, (("exchange_share", 1e-3, 1.0), ("gemm_share", 1e-3, 1.0), ("indexer_share", 1e-3, 1.0),
                                                         ("attention_share", 1e-3, 1.0), ("token_s", 0.0, 1e-3)))]
    for name, constant, high in (("TP4", "launch_s", 1e-4), ("DEP8", "far_meeting_s", 1e-3)):
        requests = loop.requests(itl["sessions"], itl["ms"][name] / 1e3) / (assumed["decode_gpus"] / topology(name).gpus)
        steps.append((f"ITL of {name}", constant, 0.0, high, lambda one, name=name, requests=requests: itl_s(decode_model(one, name, given), requests),
                      itl["ms"][name]))
    fitted = machine.but("fitted", "retrieval and transfer", **constants)
    for _ in range(ROUNDS):
        before = [fitted[name] for name in FITTED]
        for source, name, low, high, seconds, target_ms in steps:
            fitted = _solve(fitted, name, low, high, seconds, target_ms / 1e3, source)
        if fsum(abs(fitted[name] / old - 1) for name, old in zip(FITTED, before)) < 1e-9:
            break
    return fitted


def _solve(machine: Machine, name: str, low: float, high: float, seconds: Callable[[Machine], float], target_s: float, source: str) -> Machine:
    """The constant at which `seconds` is `target_s`: regula falsi (the Illinois way), over 1/x for a share, in which seconds are nearly straight."""
    def at(x: float) -> Machine:
        return machine.but("fitted", source, **{name: 1 / x if inverse else x})

    inverse = name.endswith("_share")
    a, b = (1 / high, 1 / low) if inverse else (max(low, high * 1e-9), high)
    off_a, off_b = seconds(at(a)) - target_s, seconds(at(b)) - target_s
    if off_a * off_b > 0:
        raise ValueError(f"{source}: no {name} from {low:g} to {high:g} explains {1e3 * target_s:g} ms")
    for _ in range(60):
        x = (a * off_b - b * off_a) / (off_b - off_a)
        off = seconds(at(x)) - target_s
        if abs(off) < 1e-12 * target_s:
            break
        if off * off_b < 0:
            a, off_a = b, off_b
        else:
            off_a /= 2
        b, off_b = x, off
    return at(x)


if __name__ == "__main__":
    solved = fit_rack(read_machine("gb200-nvl72"))
    print("\n".join(f"{name}: {solved[name]:.4g}  # {solved.constants[name].source}" for name in FITTED))

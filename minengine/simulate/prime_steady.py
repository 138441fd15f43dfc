"""Predictions that need no cluster: means, one step at a time. Each function says what its figure follows from.

All take the machine with its constants fitted, and the preset with its assumptions. `spread` asks each again under other assumptions, with the
constants fitted anew to the same inputs.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..arithmetic.copies import GLM_5_3, topology
from ..arithmetic.memory import SOURCE_MODEL, Ladder, memory_ladder, more_tokens
from ..arithmetic.moving import copy_costs, wire_time_s
from ..arithmetic.rows import kv_row, session_bytes
from .machine import Machine, machine as read_machine
from .prediction import Prediction
from .rack_fit import CONTEXT, Decoding, decode_model, decoding, fit_rack, itl_s, prefill_model, preset
from .work import NOTHING, Work

__all__ = ["ASSUMPTIONS", "STEADY", "attention_share", "copies_ms", "dcp_itl_ms", "decoding_requests", "dummy_forward_ms", "dummy_window_ms", "itl_ms",
           "ladder", "nvlink_extra_ms", "prefix_ratio", "steady", "tokens_nvfp4", "transfer_ms"]

INFINIBAND_BYTES_S = 50e9  # a 400 Gbit/s card for each GPU
DUMMIES = 15  # reported of the window
COPIES = 32_000  # reported of a request of 200,000 tokens
BLOCK_MAJOR = 1940  # descriptors, reported
ONE_BY_ONE: dict[str, Any] = {"draft_tokens": 0, "tokens_per_step": 1.0}
ASSUMPTIONS: dict[str, dict[str, Any]] = {  # other values of what was assumed
    "70% of the memory's peak": {"memory_share": 0.7}, "90% of it": {"memory_share": 0.9},
    "5 µs a near meeting": {"near_meeting_s": 5e-6}, "12 µs": {"near_meeting_s": 12e-6},
    "3 guesses, 2.99 tokens a step": {"draft_tokens": 3, "tokens_per_step": 2.99}, "5 and 3.61": {"draft_tokens": 5, "tokens_per_step": 3.61},
    "8 bits beside the experts": {"weights": "fp8"}, "8-bit rows": {"kv_cache_dtype": "fp8"}, "gaps of up to 30 s": {"gap_cap_s": 30},
}


def itl_ms(machine: Machine, given: Mapping[str, Any], name: str, sessions: float = 64, **how: Any) -> float:
    """Mean inter-token latency of a decoder in `name`, if 16 decode GPUs are made into such decoders.

    Sessions decode for a part of their cycle, which is longer if tokens are slower; so latency and batch are found together, in turn. A
    decoder of eight GPUs serves twice the requests of one of four, and each rank reads half of each expert that they visit: bytes
    speak for the wider group. Meetings speak against it, since eight GPUs sit on two boards.
    """
    return 1e3 * itl_s(decode_model(machine, name, given, **how), decoding_requests(machine, given, name, sessions, **how))


def decoding_requests(machine: Machine, given: Mapping[str, Any], name: str, sessions: float = 64, **how: Any) -> float:
    """Requests that decode at once on each of those decoders, in the mean."""
    model, loop = decode_model(machine, name, given, **how), Decoding(given)
    engines, requests = given["assumed"]["decode_gpus"] / topology(name).gpus, 1.0
    for _ in range(60):
        requests = loop.requests(sessions, itl_s(model, requests)) / engines
    return requests


def dcp_itl_ms(machine: Machine, given: Mapping[str, Any]) -> float:
    """Of TP8 with DCP4, which is taken to decode without guesses: sparse attention over a split context has none in the engines that have
    both, and the source ran it apart. Its steps pay for all that a step pays, and yield one token; and on top for 177 more meetings."""
    return itl_ms(machine, given, "TP8+DCP4", **ONE_BY_ONE)


def dummy_forward_ms(machine: Machine, given: Mapping[str, Any]) -> float:
    """A forward of a rank without tokens, while each peer has one: it reads all weights that are not experts, launches all kernels and comes to
    all meetings."""
    model = prefill_model(machine, "DEP8", given)
    return 1e3 * model.forward_s(NOTHING, Work(prefill_tokens=model.shape.data - 1))


def dummy_window_ms(machine: Machine, given: Mapping[str, Any]) -> float:
    """The profiled rank's chunk and 15 dummy forwards. The chunk is the sum of the profile's parts, since nothing overlaps here: 436 ms, where
    the source has 408 for the same forward."""
    return sum(given["calibration"]["profile"]["ms"].values()) + DUMMIES * dummy_forward_ms(machine, given)


def attention_share(machine: Machine, given: Mapping[str, Any], sessions: float = 32) -> float:
    """Attention kernels' part of a TP4 decode step: a launch and the bytes of the chosen rows, 78 times."""
    model, requests = decode_model(machine, "TP4", given), decoding_requests(machine, given, "TP4", sessions)
    work, queries = decoding(requests, CONTEXT, model.config.index_topk), 1 + model.draft_tokens
    return model.parts(work, queries * requests, queries)["attention"] / model.forward_s(work, work)


def copies_ms(machine: Machine, given: Mapping[str, Any]) -> float:
    """What 32,000 copies take by their number alone, at what a descriptor takes in the calibration's transfer."""
    return 1e3 * COPIES * machine["copy_s"]


def nvlink_extra_ms(machine: Machine, given: Mapping[str, Any]) -> float:
    """The request of 32,000 copies over NVLink, less its bytes over InfiniBand, where the network card works through the list by itself: a
    200,000-token request, and a card of 400 Gbit/s a GPU."""
    nbytes = session_bytes(200_000, kv_row(GLM_5_3, given["assumed"]["kv_cache_dtype"]).bytes_per_token)
    model = decode_model(machine, "TP4", given)
    return model.transfer_ps(COPIES, nbytes) / 1e9 - 1e3 * wire_time_s(nbytes, INFINIBAND_BYTES_S)


def transfer_ms(machine: Machine, given: Mapping[str, Any]) -> float:
    """The calibration's transfer block by block: the same bytes in 1,940 pieces."""
    nbytes = session_bytes(given["assumed"]["transferred_tokens"], kv_row(GLM_5_3, given["assumed"]["kv_cache_dtype"]).bytes_per_token)
    return decode_model(machine, "TP8", given).transfer_ps(BLOCK_MAJOR, nbytes) / 1e9


def ladder(given: Mapping[str, Any], name: str, kv_cache_dtype: str, untouched: float = 0.0) -> Ladder:
    """The memory of a group of the deployment; the layer that guesses lies there too. `untouched`: as `memory_ladder` has it."""
    return memory_ladder(SOURCE_MODEL, name, kv_cache_dtype=kv_cache_dtype, untouched=untouched, **_weights(given))


def _weights(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the memory ladder is told of the weights."""
    assumed = given["assumed"]
    return {"weights": assumed["weights"], "experts": assumed["experts"], "draft_layers": 1 if assumed["draft_tokens"] else 0}


def tokens_nvfp4(machine: Machine, given: Mapping[str, Any]) -> float:
    """Tokens that a TP4 decoder caches in 4-bit rows, if what is neither weights nor cache is what it is with 1.09 million in 8 bits."""
    return ladder(given, "TP4", "nvfp4_fp8_ds_mla").tokens


def prefix_ratio(machine: Machine, given: Mapping[str, Any]) -> float:
    """Tokens that DEP8 caches over those of TEP8: eight times for one copy instead of eight, less what its replicated weights take."""
    return more_tokens("DEP8", "TEP8", kv_cache_dtype=given["assumed"]["kv_cache_dtype"], **_weights(given))


# --- what stands below a figure ------------------------------------------------------------------------------------

def _dcp_note(machine: Machine, given: Mapping[str, Any]) -> str:
    model, tp8 = decode_model(machine, "TP8+DCP4", given, **ONE_BY_ONE), decoding_requests(machine, given, "TP8")
    near = dcp_itl_ms(machine.but(far_meeting_s=machine["near_meeting_s"]), given)
    here, guessing = decoding_requests(machine, given, "TP8+DCP4", **ONE_BY_ONE), itl_ms(machine, given, "TP8+DCP4")
    return (f"{here:.0f} requests at once, since tokens are slow. The source ran it apart and does not say with how many: with the {tp8:.0f} that TP8 has "
            f"{1e3 * itl_s(model, tp8):.1f} ms, with one {1e3 * itl_s(model, 1):.1f}. If eight ranks met as quickly as four {near:.1f}; with guesses "
            f"{guessing:.1f}")


def _attention_note(machine: Machine, given: Mapping[str, Any]) -> str:
    layers, share = SOURCE_MODEL.num_hidden_layers, attention_share(machine, given)
    step_us = 1e3 * itl_ms(machine, given, "TP4", 32) * given["assumed"]["tokens_per_step"]
    reported = [layers * kernel_us / ((1 - share) * step_us + layers * kernel_us) for kernel_us in (12.0, 13.7)]
    return (f"a kernel here takes its launch and its bytes, {share * step_us / layers:.1f} µs; at the 12.0 and 13.7 µs that are reported it would be "
            f"{reported[0]:.3f} and {reported[1]:.3f}")


def _tokens_note(machine: Machine, given: Mapping[str, Any]) -> str:
    row = kv_row(GLM_5_3, "nvfp4_fp8_ds_mla")
    keys = row.indexer.total * row.indexer_layers / row.layers
    with_state = ladder(given, "TP4", "nvfp4_fp8_ds_mla", 100 - keys).tokens
    return f"of rows and {keys:.0f} bytes of indexer keys a token and layer; with 100 bytes that do not shrink {with_state:,}"


def _nvlink_note(machine: Machine, given: Mapping[str, Any]) -> str:
    extra = nvlink_extra_ms(machine, given)
    return f"{COPIES:,} copies at {1e6 * machine['copy_s']:.2f} µs; with the bytes' time here, less their time over InfiniBand, {extra:.0f} ms"


def _transfer_note(machine: Machine, given: Mapping[str, Any]) -> str:
    fixed, assumed = given["calibration"]["transfer"], given["assumed"]
    nbytes = session_bytes(assumed["transferred_tokens"], kv_row(GLM_5_3, assumed["kv_cache_dtype"]).bytes_per_token)
    byte_s, copy_s = copy_costs(nbytes, (fixed["descriptors"], fixed["ms"] / 1e3), (BLOCK_MAJOR, 78e-3))
    return (f"the wire is taken to be NVLink, {machine['wire_bytes_s'] / 1e9:.0f} GB/s; both transfers together say {1e-9 / byte_s:.0f} GB/s, about what "
            f"one 400 Gbit/s card does, and {1e6 * copy_s:.1f} µs a descriptor")


Figure = Callable[[Machine, Mapping[str, Any]], float]
Note = Callable[[Machine, Mapping[str, Any]], str]
STEADY: tuple[tuple[str, str, str, float, float | None, Figure, Note | str], ...] = (  # id, what, unit, reported, error asked for, predicted, note
    ("itl_tp8_ms", "inter-token latency of TP8", "ms", 6.74, 0.15, lambda machine, given: itl_ms(machine, given, "TP8"), ""),
    ("itl_tp8_dcp4_ms", "inter-token latency of TP8 with DCP4, without guesses", "ms", 14.02, 0.15, dcp_itl_ms, _dcp_note),
    ("dep8_window_ms", "window of one chunk and 15 dummy forwards on DEP8", "ms", 678, None, dummy_window_ms,
     "28 ms of the distance are the chunk itself: 436 by its parts, 408 reported"),
    ("dummy_forward_ms", "a dummy forward of DEP8", "ms", 18.0, None, dummy_forward_ms, "reported: (678 - 408) / 15"),
    ("attention_share", "attention's part of a decode step at 32 sessions", "of the step", 0.08, None, attention_share, _attention_note),
    ("tokens_nvfp4", "tokens cached by a decoder, 4-bit rows", "tokens", 1.63e6, None, tokens_nvfp4, _tokens_note),
    ("dep8_over_tep8_prefix", "prefix cache of DEP8 over TEP8", "times", 5, None, prefix_ratio, ""),
    ("nvlink_minus_ib_ttft_ms", "what NVLink added over InfiniBand, by its copies' cost", "ms", 292, None, copies_ms, _nvlink_note),
    ("transfer_block_major_ms", "the block-major transfer", "ms", 78, None, transfer_ms, _transfer_note),
)


def steady(machine: Machine | None = None, given: Mapping[str, Any] | None = None, *, spread: bool = True) -> Iterator[Prediction]:
    """All of them."""
    machine, given = read_machine("gb200-nvl72") if machine is None else machine, preset() if given is None else given
    others = dict(_others(machine, given)) if spread else {}
    for name, what, unit, reported, within, figure, note in STEADY:
        value = figure(machine, given)
        yield Prediction(id=name, what=what, unit=unit, reported=reported, predicted=value, within=within, claimed=name != "dummy_forward_ms",
                         note=note if isinstance(note, str) else note(machine, given),
                         spread=_moved(value, {words: figure(*other) for words, other in others.items()}))
    fixed = given["calibration"]["itl"]["ms"]
    latencies = {**fixed, "TP8": itl_ms(machine, given, "TP8"), "TP8+DCP4": dcp_itl_ms(machine, given)}
    yield Prediction(id="decode_order", claimed=False, what="decode topologies by latency, quickest first", unit="", reported="TP4, TP8, DEP8, TP8+DCP4",
                     predicted=", ".join(sorted(latencies, key=latencies.__getitem__)), note=f"{' and '.join(fixed)} are inputs")


def _others(machine: Machine, given: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Machine, Mapping[str, Any]]]]:
    """A machine and a preset for each of ASSUMPTIONS, the machine fitted anew."""
    for name, change in ASSUMPTIONS.items():
        of_machine = {key: value for key, value in change.items() if key in machine.constants}
        other = {**given, "assumed": {**given["assumed"], **{key: value for key, value in change.items() if key not in of_machine}}}
        yield name, (fit_rack(machine.but(**of_machine), other), other)


def _moved(value: float, others: Mapping[str, float]) -> dict[str, float]:
    """Those that move a prediction by more than 2%."""
    return {name: other for name, other in others.items() if abs(other / value - 1) > 0.02}

"""`minengine accuracy`: all measures in all row formats, part by part, from one seed.

A part is one task in one format; a finished one is kept in `parts/`, so that an interrupted run goes on where it stopped, and the
result file is written anew after each. Two runs of different parts may share a folder.
"""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..config import ConfigError
from ..kv.cache import cache_format
from ..llm import LLM
from ..results import ACCURACY, file_name, run_facts
from .agreement import agreement, continuations
from .bootstrap import Outcomes
from .needle import needle
from .perplexity import perplexity
from .recall import recall
from .stored import score_entry

__all__ = ["KINDS", "measure"]

BASELINE = "bfloat16"
LATENT = (BASELINE, "fp8", "fp8_ds_mla", "nvfp4_fp8_ds_mla", "int4", "int3", "int2")
HEADS = (BASELINE, "fp8", "nvfp4", "q8_0", "q4_0", "int4", "int3", "int2", "int4:bfloat16", "bfloat16:int4", "int3:bfloat16", "bfloat16:int3")
RECALL = ((256, 16), (1024, 64), (1024, 128), (4096, 256))  # tokens, records
KINDS = ("recall", "perplexity", "needle", "agreement")
SHARE = "share of answers"


@dataclass(frozen=True)
class _Plan:
    """One task, to be run in each of `formats`."""

    name: str
    kind: str
    model: str
    what: str
    unit: str
    setting: dict[str, Any]
    formats: Sequence[str]
    engine: dict[str, Any]  # options of LLM
    run: Callable[[LLM], list[Any]]  # -> what a part keeps: outcomes as the result file has them, or an agreement's answers

    def part(self, kv_cache_dtype: str, seed: int) -> dict[str, Any]:
        return {"name": self.name, "setting": self.setting, "kv_cache_dtype": kv_cache_dtype, "seed": seed}


def measure(out: Path, only: Iterable[str] = KINDS, seed: int = 0, quick: bool = False) -> Path:
    """Run what is missing in `out`; returns the result file, `accuracy-MACHINE.json` in `out`.

    Args:
        only: kinds of KINDS.
        quick: a few contexts of each task in four formats, to see that all works; its numbers are too few to mean anything.

    Raises:
        ConfigError: an unknown kind, a negative seed, a folder that cannot be written, or a model that is not installed.
    """
    only = tuple(only)
    if seed < 0:
        raise ConfigError(f"seed={seed}: use 0 or more")
    for kind in only:
        if kind not in KINDS:
            raise ConfigError(f"only='{kind}': use one or more of {', '.join(KINDS)}")
    plans = [plan for plan in _plans(seed, quick) if plan.kind in only]
    try:
        (out / "parts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out='{out}': is no folder that can be written ({error.strerror}); give another") from error
    jobs = [(plan, name) for plan in plans for name in plan.formats if _kept(out, plan, name, seed) is None]
    path = _write(out, seed, quick)
    for plan, name in (bar := tqdm(jobs, desc="accuracy", unit="part", dynamic_ncols=True, disable=not jobs)):
        bar.set_postfix_str(f"{plan.name} {name}")
        if _kept(out, plan, name, seed):  # by another run, since this one began
            continue
        llm = LLM(plan.model, kv_cache_dtype=name, seed=seed, **plan.engine)
        part = {**plan.part(name, seed), "row_bytes": cache_format(llm.llm_engine.config, name).nbytes, "outcomes": plan.run(llm)}
        file = _file(out, plan, name)
        file.with_suffix(".new").write_text(json.dumps(part), encoding="utf-8")
        os.replace(file.with_suffix(".new"), file)
        _write(out, seed, quick)
    return path


# --- the tasks ----------------------------------------------------------------------------------------------

def _plans(seed: int, quick: bool) -> list[_Plan]:
    contexts, queries = (2, 8) if quick else (40, 50)
    latent, heads = (LATENT[::2], HEADS[::3]) if quick else (LATENT, HEADS)
    plans = [
        _Plan(f"recall-{length}-{pairs}", "recall", "glm-mini", f"Records found again among {pairs}, in a text of {length:,} tokens", SHARE,
              {"length": length, "pairs": pairs, "contexts": contexts, "queries": queries}, latent,
              {"max_num_seqs": queries, "max_model_len": length + 64, "num_gpu_blocks_override": length // 64 + 2 * queries},
              partial(_recall, length, pairs, contexts, queries, seed))
        for length, pairs in (RECALL[:2] if quick else RECALL)
    ]
    setting = {"window": 512, "windows": 2 if quick else 23}
    plans.append(_Plan("perplexity", "perplexity", "smollm2", "A token of a public-domain text, given up to 511 before it; exp() is the perplexity",
                       "nats a token", setting, heads, {"max_model_len": 512}, partial(_perplexity, setting)))
    setting = {"contexts": 2 if quick else 60, "codes": 5, "lengths": [400, 1000]}
    plans.append(_Plan("needle", "needle", "smollm2", "Codes of four digits found again in prose of 400 to 1,000 tokens", SHARE, setting, heads,
                       {"block_size": 16, "max_model_len": 1088, "num_gpu_blocks_override": 160}, partial(_needle, setting, seed)))
    setting = {"prompts": 4 if quick else 40, "tokens": 16 if quick else 64, "passage": 160}
    plans.append(_Plan("agreement", "agreement", "smollm2", f"Tokens of a greedy answer, of {setting['tokens']}, before it leaves that of 16-bit rows",
                       "tokens", setting, heads, {"max_model_len": 512}, partial(_agreement, setting, seed)))
    return plans


def _recall(length: int, pairs: int, contexts: int, queries: int, seed: int, llm: LLM) -> list[str]:
    return _answers(recall(llm, length, pairs, contexts, queries, seed).outcomes)


def _needle(setting: dict[str, Any], seed: int, llm: LLM) -> list[str]:
    return _answers(needle(llm, **{**setting, "lengths": tuple(setting["lengths"])}, seed=seed))


def _perplexity(setting: dict[str, Any], llm: LLM) -> list[float]:
    return [round(value, 6) for value in perplexity(llm, **setting).values.tolist()]


def _agreement(setting: dict[str, Any], seed: int, llm: LLM) -> list[list[int]]:
    return [list(answer) for answer in continuations(llm, **setting, seed=seed)]


def _answers(outcomes: Outcomes) -> list[str]:
    return ["".join("1" if right else "0" for right in one) for one in outcomes.by_context]


# --- files --------------------------------------------------------------------------------------------------

def _file(out: Path, plan: _Plan, kv_cache_dtype: str) -> Path:
    return out / "parts" / f"{plan.name}-{kv_cache_dtype.replace(':', '-')}.json"


def _kept(out: Path, plan: _Plan, kv_cache_dtype: str, seed: int) -> dict[str, Any] | None:
    """A finished part, if it was measured at this setting and seed."""
    file = _file(out, plan, kv_cache_dtype)
    part = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return part if part.items() >= plan.part(kv_cache_dtype, seed).items() else None


def _write(out: Path, seed: int, quick: bool) -> Path:
    """The result file, from all parts that are finished; a task counts once its baseline is there."""
    tasks = []
    for plan in _plans(seed, quick):
        kept = {name: part for name in plan.formats if (part := _kept(out, plan, name, seed))}
        if BASELINE not in kept:
            continue
        outcomes = {name: part["outcomes"] for name, part in kept.items()}
        if plan.kind == "agreement":
            outcomes = {name: agreement(answers, outcomes[BASELINE]).values.tolist() for name, answers in outcomes.items()}
        scores = [score_entry(name, kept[name]["row_bytes"], outcomes[name], None if name == BASELINE else outcomes[BASELINE]) for name in kept]
        tasks.append({"name": plan.name, "kind": plan.kind, "model": plan.model, "what": plan.what, "unit": plan.unit, "setting": plan.setting,
                      "baseline": BASELINE, "scores": scores})
    run = {**run_facts(f"minengine accuracy --out FOLDER --seed {seed}{' --quick' if quick else ''}"), "seed": seed}
    path = out / file_name(ACCURACY, run["machine"])
    entries = ",\n".join(json.dumps(task) for task in tasks)
    path.write_text(f'{json.dumps(run)[:-1]},\n "tasks": [\n{entries}\n]}}\n', encoding="utf-8")
    return path

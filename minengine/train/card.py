"""Measure a trained glm-mini through the engine, and write the model card from what was measured."""
from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from string import Template
from typing import Any

import torch

from ..accuracy import RecallScore, recall
from ..llm import LLM
from .mini import Trainer

__all__ = ["CURVE_DTYPES", "measure", "write_card"]

LENGTHS, PAIRS = (256, 1024, 4096), (16, 64, 256)
CURVE_LENGTH, CURVE_PAIRS = 1024, 128
CURVE_DTYPES = ("bfloat16", "fp8", "nvfp4_fp8_ds_mla", "int4", "int3", "int2")
CONTEXTS, QUERIES, BLOCK_SIZE = 40, 50, 64


def measure(folder: Path) -> dict[str, Any]:
    """Recall by length and number of records in 16-bit rows, and by row format at one of them."""
    def score(kv_cache_dtype: str, length: int, pairs: int, cleared: bool = False) -> dict[str, Any]:
        llm = LLM(str(folder), kv_cache_dtype=kv_cache_dtype, block_size=BLOCK_SIZE, max_num_seqs=QUERIES, num_threads=torch.get_num_threads(),
                  max_model_len=length + BLOCK_SIZE, num_gpu_blocks_override=length // BLOCK_SIZE + 2 * QUERIES)
        result = recall(llm, length, pairs, CONTEXTS, QUERIES, zero_kv_cache=cleared)
        row = {"kv_cache_dtype": kv_cache_dtype, "cleared": cleared, "length": length, "pairs": pairs, **_numbers(result)}
        print(f"{kv_cache_dtype:>18}{' cleared' if cleared else ''}, {length} tokens, {pairs} records: {result.share:.4f}", flush=True)
        return row

    by_length = [score("bfloat16", length, pairs) for length in LENGTHS for pairs in PAIRS if 3 * pairs <= length]
    curve = [score(name, CURVE_LENGTH, CURVE_PAIRS) for name in CURVE_DTYPES]
    curve.append(score("bfloat16", CURVE_LENGTH, CURVE_PAIRS, cleared=True))
    return {"by_length": by_length, "by_format": curve, "contexts": CONTEXTS, "queries": QUERIES, "seed": 0,
            "machine": f"a {os.cpu_count()}-core {platform.machine()} machine", "torch": torch.__version__, "python": platform.python_version(),
            "command": "minengine train-mini"}


def _numbers(score: RecallScore) -> dict[str, Any]:
    return {"n": score.n, "right": score.right, "share": round(score.share, 4), "low": round(score.low, 4), "high": round(score.high, 4)}


def write_card(folder: Path, results: dict[str, Any], trainer: Trainer) -> None:
    """`results.json` and `README.md` in the model's folder."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    stages = [f"| {s.length} | {s.batch} | {s.queries} | {s.steps} | {f'the best {s.top_k}' if s.top_k else 'all'} | "
              f"{'yes' if s.helper else ''} | {'indexers alone' if s.indexers_only else 'everything'} |"
              for s in trainer.stages]
    numbers = {
        "parameters": f"{sum(p.numel() for p in trainer.network.parameters()):,}",
        "steps": f"{trainer.steps:,}",
        "minutes": f"{trainer.seconds / 60:.0f}",
        "texts": f"{sum(s.steps * s.batch for s in trainer.stages):,}",
        "stages": "\n".join(stages),
        "by_length": "\n".join(f"| {row['length']:,} | {row['pairs']} | {_cells(row)} |" for row in results["by_length"]),
        "by_format": "\n".join(f"| {'`bfloat16`, rows overwritten with zeros' if row['cleared'] else '`' + row['kv_cache_dtype'] + '`'} | {_cells(row)} |"
                               for row in results["by_format"]),
        "curve_length": f"{CURVE_LENGTH:,}", "curve_pairs": str(CURVE_PAIRS), "contexts": str(results["contexts"]), "queries": str(results["queries"]),
        "machine": f"{results['machine']}, torch {results['torch']}, Python {results['python']}",
    }
    template = Template((Path(__file__).with_name("card.md")).read_text(encoding="utf-8"))
    (folder / "README.md").write_text(template.substitute(numbers), encoding="utf-8")


def _cells(row: dict[str, Any]) -> str:
    return f"{row['share']:.4f} | {row['low']:.4f} to {row['high']:.4f} | {row['n']:,}"

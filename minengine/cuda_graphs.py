"""Decode steps as CUDA graphs: one recorded launch sequence for each (batch, block table) bucket.

A graph replays fixed addresses and shapes. So a step's inputs are copied into static tensors of the next larger
bucket, and the empty places run as one-token requests whose rows go to a block that no request owns (the last one).
Buckets are powers of two, recorded when first met.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from .kv.cache import KVCache
from .model.batch import Batch

__all__ = ["DecodeGraphs"]


@dataclass(slots=True)
class _Recorded:
    batch: Batch  # static inputs
    replay: Callable[[], Tensor]  # -> logits (N, vocab), valid until the next replay


class DecodeGraphs:
    def __init__(self, model, kv: KVCache, *, max_num_seqs: int, max_model_len: int, record: Callable | None = None) -> None:
        """
        Args:
            kv: a cache whose last block belongs to no request.
            record: how a static batch becomes a replay; a test on a CPU hands in one that runs eagerly.
        """
        self.model, self.kv = model, kv
        self.max_batch = max_num_seqs
        self.max_width = -(-max_model_len // kv.block_size)
        self.padding_slot = (kv.num_blocks - 1) * kv.block_size
        self.recorded: dict[tuple[int, int], _Recorded] = {}
        self._record = record or self._record_cuda
        self._memory = None

    def run(self, batch: Batch) -> Tensor:
        """Logits (D, vocab) of a decode-only batch of CPU tensors."""
        n = batch.num_decodes
        key = bucket(n, self.max_batch), bucket(batch.decode_block_tables.shape[1], self.max_width)
        if key not in self.recorded:
            static = self._static(*key)
            self.recorded[key] = _Recorded(static, self._record(static))
        graph = self.recorded[key]
        self._fill(graph.batch, batch)
        return graph.replay()[:n]

    def _static(self, n: int, width: int) -> Batch:
        """A batch of `n` padding rows with room for `width` blocks each."""
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.kv.device)

        return Batch(zeros(n), zeros(n), zeros(n) + self.padding_slot, torch.arange(n, device=self.kv.device), num_decodes=n,
                     decode_block_tables=zeros(n, width), decode_seq_lens=zeros(n) + 1, max_decode_len=width * self.kv.block_size)

    def _fill(self, static: Batch, batch: Batch) -> None:
        n, width = batch.decode_block_tables.shape
        static.slots[n:] = self.padding_slot
        static.decode_seq_lens[n:] = 1
        static.decode_block_tables.zero_()  # places that are not filled point at block 0, which the length masks
        static.positions[n:] = 0
        for name in ("input_ids", "positions", "slots", "decode_seq_lens"):
            getattr(static, name)[:n].copy_(getattr(batch, name), non_blocking=True)
        static.decode_block_tables[:n, :width].copy_(batch.decode_block_tables, non_blocking=True)

    def _record_cuda(self, static: Batch) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            static.scratch.clear()  # masks must be computed inside the graph, from the lengths of each replay
            return self.model.logits(self.model.forward(static, self.kv))

        # Warm-up on a side stream: libraries choose their kernels and take their workspaces before the recording.
        side = torch.cuda.Stream(self.kv.device)
        side.wait_stream(torch.cuda.current_stream(self.kv.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                compute()
        torch.cuda.current_stream(self.kv.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = compute()
        self._memory = self._memory or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def bucket(n: int, most: int) -> int:
    """The next power of two, at most `most`."""
    return min(1 << (n - 1).bit_length(), max(most, n))

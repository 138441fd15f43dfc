"""A step's decision -> tensors -> model -> sampled tokens. Decides nothing."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .kv.cache import KVCache
from .model.batch import Batch, PrefillChunk
from .request import Request
from .sampling import sample
from .schedule import Step

__all__ = ["ModelRunner", "StepTimes"]


@dataclass(slots=True)
class StepTimes:
    """Seconds spent in each part, summed over steps. On CUDA the model's work ends inside `sample_s`.

    `jump_forward_tokens` are output tokens that a grammar left no choice about: they were not sampled.
    """

    steps: int = 0
    schedule_s: float = 0.0
    prepare_s: float = 0.0
    model_s: float = 0.0
    sample_s: float = 0.0
    update_s: float = 0.0
    jump_forward_tokens: int = 0


class ModelRunner:
    """`block_size`: tokens of a block, where the cache keeps only some of their rows; None: all."""

    def __init__(self, model, kv: KVCache, *, cuda_graphs: bool = False, max_num_seqs: int = 1, max_model_len: int = 1,
                 block_size: int | None = None) -> None:
        self.model = model
        self.kv = kv
        self.block_size = block_size or kv.block_size
        self.device = kv.device
        self.times = StepTimes()
        self.on_layer: Callable[[int, Batch], None] | None = None  # after each layer of a step with prefills; its rows are in the cache
        self.step: Step | None = None  # that is being computed
        self.graphs = None
        if cuda_graphs:
            from .cuda_graphs import DecodeGraphs

            self.graphs = DecodeGraphs(model, kv, max_num_seqs=max_num_seqs, max_model_len=max_model_len)

    @torch.inference_mode()
    def execute(self, step: Step) -> list[int | None]:
        """Compute a step; returns one token for each of `step.sampled()`, in that order, None where a grammar allows none."""
        clock, times = time.perf_counter, self.times
        start = clock()
        self.step = step
        batch = self.prepare(step)
        prepared = clock()
        if self.graphs is not None and not step.prefills and step.decodes:
            logits = self.graphs.run(batch)
        else:
            logits = self.forward(batch)
        computed = clock()
        tokens = [] if logits is None else sample(logits, step.sampled())
        times.prepare_s += prepared - start
        times.model_s += computed - prepared
        times.sample_s += clock() - computed
        return tokens

    def forward(self, batch: Batch) -> Tensor | None:
        """A batch of CPU tensors through the model: logits (S, vocab) of the tokens that are sampled; None if none is."""
        batch = self.to_device(batch)
        hidden = self.model.forward(batch, self.kv, self.on_layer)  # (T, hidden)
        return self.model.logits(hidden[batch.logits_indices]) if batch.logits_indices.numel() else None

    def prepare(self, step: Step) -> Batch:
        """Lay the step's tokens end to end, decodes first; CPU tensors."""
        size = self.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for request in step.decodes:
            at = request.num_computed_tokens
            ids.append(request.token_ids[at])
            positions.append(at)
            slots.append(request.block_ids[at // size] * size + at % size)
        num_decodes = len(ids)
        logits_indices = list(range(num_decodes))
        prefills = []
        for request, n in step.prefills:
            start, at = len(ids), request.num_computed_tokens
            ids += request.token_ids[at: at + n]
            positions += range(at, at + n)
            slots += _slots(request, at, n, size)
            blocks = torch.tensor(request.block_ids[: -(-(at + n) // size)])
            prefills.append(PrefillChunk(start, start + n, at, blocks))
            if at + n == request.num_tokens:
                logits_indices.append(start + n - 1)
        batch = Batch(torch.tensor(ids), torch.tensor(positions), torch.tensor(slots), torch.tensor(logits_indices, dtype=torch.int64),
                      num_decodes=num_decodes, prefills=prefills)
        if num_decodes:
            lengths = [p + 1 for p in positions[:num_decodes]]
            batch.max_decode_len = max(lengths)
            width = -(-batch.max_decode_len // size)
            tables = [request.block_ids[:width] + [0] * (width - len(request.block_ids)) for request in step.decodes]
            batch.decode_block_tables = torch.tensor(tables)
            batch.decode_seq_lens = torch.tensor(lengths)
        return batch

    def to_device(self, batch: Batch) -> Batch:
        """The batch's tensors on the model's device (itself on a CPU)."""
        if self.device.type == "cpu":
            return batch

        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(self.device, non_blocking=True)

        chunks = [PrefillChunk(c.start, c.end, c.context_len, move(c.block_ids)) for c in batch.prefills]
        return Batch(move(batch.input_ids), move(batch.positions), move(batch.slots), move(batch.logits_indices), batch.num_decodes,
                     move(batch.decode_block_tables), move(batch.decode_seq_lens), batch.max_decode_len, chunks)


def _slots(request: Request, start: int, n: int, size: int) -> list[int]:
    """The cache slots of tokens start..start+n of a request, block run by block run."""
    slots: list[int] = []
    while n:
        offset = start % size
        run = min(n, size - offset)
        first = request.block_ids[start // size] * size + offset
        slots += range(first, first + run)
        start, n = start + run, n - run
    return slots

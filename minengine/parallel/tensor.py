"""One engine over ranks that split every step: TP, TEP, and either with DCP. Rank 0 decides and samples; the others compute what it computes."""
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine_args import EngineArgs
from ..model.batch import Batch, PrefillChunk
from ..request import RequestOutput
from .comm import Parallel
from .engine import RankRunner
from .first import FirstEngine
from .group import Group, Member

__all__ = ["TensorEngine"]


class TensorRunner(RankRunner):
    """Rank 0's: tells the others of each batch before it computes it."""

    group: Group

    def forward(self, batch: Batch) -> Tensor | None:
        self.group.tell(compute, _packed(batch))
        return super().forward(batch)


class TensorEngine(FirstEngine):
    """Rank 0 of the group. Blocks have the same ids on every rank, so one scheduler speaks for all."""

    def __init__(self, args: EngineArgs, group: Group, parallel: Parallel, **options: Any) -> None:
        super().__init__(args, group, parallel, **options)
        self.runner.group = group

    def _open_runner(self) -> TensorRunner:
        return TensorRunner(self.model, self.kv, block_size=self.args.block_size)

    def step(self) -> list[RequestOutput]:
        with self.group.watched():
            return super().step()


# --- what the other ranks run ------------------------------------------------------------------------------------


@torch.inference_mode()
def compute(member: Member, packed: tuple[Any, ...]) -> None:
    """The step that rank 0 computes."""
    member.engine.runner.forward(_unpacked(packed))


def _packed(batch: Batch) -> tuple[Any, ...]:
    """A batch of CPU tensors as arrays, which are pickled many times faster."""
    def array(tensor: Tensor | None) -> np.ndarray | None:
        return None if tensor is None else tensor.numpy()

    chunks = [(chunk.start, chunk.end, chunk.context_len, array(chunk.block_ids)) for chunk in batch.prefills]
    return (array(batch.input_ids), array(batch.positions), array(batch.slots), array(batch.logits_indices), batch.num_decodes,
            array(batch.decode_block_tables), array(batch.decode_seq_lens), batch.max_decode_len, chunks)


def _unpacked(packed: tuple[Any, ...]) -> Batch:
    def tensor(part: Any) -> Any:
        return torch.from_numpy(part) if isinstance(part, np.ndarray) else part

    *parts, chunks = packed
    return Batch(*map(tensor, parts), [PrefillChunk(start, end, context, tensor(blocks)) for start, end, context, blocks in chunks])

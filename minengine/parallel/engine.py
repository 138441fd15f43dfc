"""The engine of one rank of several, and what the ranks' processes run to make one."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..config import ConfigError
from ..engine_args import EngineArgs
from ..engine import LLMEngine
from ..machine import device_named, dtype_named
from ..model.batch import Batch
from ..model.decoder import load_model
from ..runner import ModelRunner
from .comm import Parallel
from .experts import ExchangedMoE
from .group import Member
from .ranks import Ranks

__all__ = ["RankEngine", "RankRunner", "meet", "open_rank"]


class RankRunner(ModelRunner):
    """Counts its forwards, and can take part in one without tokens of its own."""

    forwards = 0  # dummy ones included
    dummy_forwards = 0

    def forward(self, batch: Batch) -> Tensor | None:
        self.forwards += 1
        return super().forward(batch)

    @torch.inference_mode()
    def dummy_forward(self) -> None:
        """Let this rank's experts work for the others: every layer that exchanges tokens, and nothing else."""
        self.forwards += 1
        self.dummy_forwards += 1
        for layer in self.model.layers:
            if isinstance(layer.mlp, ExchangedMoE):
                layer.mlp.serve()


class RankEngine(LLMEngine):
    """An `LLMEngine` over this rank's part of model and cache."""

    parallel: Parallel
    runner: RankRunner

    def _open_runner(self) -> RankRunner:
        return RankRunner(self.model, self.kv, block_size=self.args.block_size)

    def lockstep(self) -> list[Any]:
        """`LLMEngine.step` as one of ranks that each have requests of their own: exactly one forward, a dummy one if there is nothing to compute."""
        forwards = self.runner.forwards
        outputs = LLMEngine.step(self)
        if self.runner.forwards == forwards:
            self.runner.dummy_forward()
        return outputs


def meet(member: Member, args: EngineArgs, timeout_s: float) -> Parallel:
    """Find the other ranks; all do so at once.

    Raises:
        ConfigError: there is no GPU for this rank.
        PeerLost: not all came.
    """
    device = device_named(args.device)
    if device.type == "cuda":
        if device.index is not None or torch.cuda.device_count() < member.size:
            raise ConfigError(f"device='{args.device}': {args.ranks.name} takes {member.size} GPUs and torch sees {torch.cuda.device_count()}; use device='cuda' "
                              "with a GPU for each rank, or device='cpu'")
        device = torch.device("cuda", member.rank)
        torch.cuda.set_device(device)
    return Parallel(Ranks(args.ranks, member.rank), member.folder, device, timeout_s)


def open_rank(member: Member, args: EngineArgs, timeout_s: float) -> None:
    """Make the engine of a rank other than 0. Where requests are rank 0's alone, it has no use for a tokenizer."""
    parallel = meet(member, args, timeout_s)
    whole = args.ranks.data > 1
    model = None if whole else load_model(args.model, dtype=dtype_named(args.dtype, parallel.device), device=parallel.device, parallel=parallel)
    storage = member.storage(str(parallel.device)) if member.storage is not None else None
    member.engine = RankEngine(args, model=model, parallel=parallel, storage=storage)

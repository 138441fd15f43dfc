"""A vocabulary split over tensor-parallel ranks: each has the embeddings and the outputs of some tokens.

Shapes: T tokens, S rows that are sampled, V tokens of the vocabulary, v of them on this rank, w the most on any rank.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arithmetic.sharding import rank_share
from .comm import Parallel

__all__ = ["SplitVocabulary"]


class SplitVocabulary:
    def __init__(self, vocab_size: int, parallel: Parallel) -> None:
        self._comm = parallel.everyone
        self.part = parallel.ranks.part(vocab_size)
        self._sizes = [len(rank_share(vocab_size, self._comm.size, rank)) for rank in range(self._comm.size)]

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids (T,), table (v, hidden) -> (T, hidden): the rank that has a token gives its row, the others zeros."""
        at = token_ids - self.part.start
        elsewhere = (at < 0) | (at >= len(self.part))
        rows = F.embedding(at.masked_fill(elsewhere, 0), table).masked_fill_(elsewhere.unsqueeze(-1), 0)
        return self._comm.all_reduce(rows, "vocab.embed")

    def gather(self, logits: Tensor) -> Tensor:
        """(S, v) -> (S, V). All parts are sent as wide as the widest, because ranks must send alike."""
        padded = F.pad(logits, (0, self._sizes[0] - logits.shape[-1]))  # (S, w)
        parts = self._comm.all_gather(padded, "vocab.logits")  # (ranks, S, w)
        return torch.cat([part[:, :size] for part, size in zip(parts, self._sizes)], dim=-1)

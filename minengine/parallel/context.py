"""Decode context parallelism: the latent rows of a request, which all heads share, split by position over m neighbouring tensor-parallel ranks.

Token p lies on rank p % m, in the block that it has on every rank and that keeps block_size / m rows here: row p // m of the request's. So
ranks hold the same number of rows, give or take one, whatever the length, and all have the same block tables.

Each rank gives its heads' queries to the others, attends with the heads of all of them to the rows that it has, and gets back, for its own
heads, every rank's mean latent and the logarithm of its sum of exponentials (Milakov and Gimelshein, 2018: such parts merge exactly).
Sparse attention chooses among all: each rank sends its best candidates, and the best of those are everybody's.

Shapes: T tokens, H heads of this rank, m ranks, G = m * H, R kv_lora_rank, D decodes, n queries of a chunk, Q queries, K index_topk, s rows of
a request that are on this rank.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minkernels.indexer import indexer_scores, rank_scores, runs
from minkernels.sparse_mla import sparse_mla_decode, sparse_mla_decode_torch

from ..config import GlmConfig
from ..kv.cache import KVCache
from ..model.batch import Batch, PrefillChunk
from ..model.mla import LatentAttention, first, slots_of, unchosen
from ..model.weights import WeightSource
from .comm import Parallel

__all__ = ["ContextAttention"]

NO_CANDIDATE = torch.iinfo(torch.int64).min


class ContextAttention(LatentAttention):
    """`LatentAttention` over the rows of one of m ranks; the cache's blocks hold this rank's rows alone."""

    def __init__(self, config: GlmConfig, layer: int, weights: WeightSource, reduce: Callable[[Tensor], Tensor], parallel: Parallel) -> None:
        super().__init__(config, layer, weights, reduce)
        self.dcp = parallel.dcp

    def _here(self, visible: Tensor | int) -> Tensor | int:
        """How many of a request's first `visible` rows are on this rank."""
        return (visible - self.dcp.rank + self.dcp.size - 1) // self.dcp.size

    def _write(self, x: Tensor, cis: Tensor, c_kv: Tensor, k_rope: Tensor, batch: Batch, kv: KVCache) -> None:
        """Only the tokens whose place is here; their slots are the same for every layer of a step."""
        if "mine" not in batch.scratch:
            mine = (batch.positions % self.dcp.size == self.dcp.rank).nonzero().squeeze(1)  # (t,)
            # A block has a whole number of rows on every rank, so slots divide as positions do.
            batch.scratch["mine"] = mine, batch.slots.index_select(0, mine) // self.dcp.size
        mine, slots = batch.scratch["mine"]
        kv.write(self.layer, slots, c_kv.index_select(0, mine), k_rope.index_select(0, mine))
        if self.indexer is not None:
            self.indexer.write(x.index_select(0, mine), cis.index_select(0, mine), slots, kv)

    def _attend(self, q_latent: Tensor, q_rope: Tensor, x: Tensor, c_q: Tensor, cis: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        q = self.dcp.all_gather(torch.cat((q_latent, q_rope), dim=-1), "dcp.query").flatten(0, 1)  # (G, T, R + rope)
        means, logs = [], []  # (tokens, G, R) and (tokens, G), in the batch's order
        if batch.num_decodes:
            part = slice(0, batch.num_decodes)
            slots = self._slots_for_decodes(x[part], c_q[part], cis[part], batch, kv)  # (D, K)
            mean, log = self._over_list(q[:, part], slots, kv)
            means.append(mean)
            logs.append(log)
        for number, chunk in enumerate(batch.prefills):
            part = slice(chunk.start, chunk.end)
            choice = self._choice_for_chunk(x[part], c_q[part], cis[part], number, batch, kv)
            for mean, log in self._over_chunk(q[:, part], choice, chunk, kv):
                means.append(mean)
                logs.append(log)
        return self._merge(torch.cat(means), torch.cat(logs)).to(q_latent.dtype)

    def _over_list(self, q: Tensor, slots: Tensor, kv: KVCache) -> tuple[Tensor, Tensor]:
        """One query a request over the rows of its list: (G, D, R + rope), slots (D, K) -> (D, G, R), (D, G)."""
        q, rank, pages = q.transpose(0, 1).contiguous(), self.w_uk.shape[-1], kv.pages(self.layer)[:, :, 0]  # (D, G, R + rope), pages (B, N, row)
        if kv.backend == "triton":
            mean, log = sparse_mla_decode(q, pages, slots, rank, kv.kv_cache_dtype, backend=kv.backend)
        else:
            mean, log = sparse_mla_decode_torch(q, pages, slots, rank, kv.fmt.dequantize)
        return mean.float(), log.masked_fill(log == float("inf"), float("-inf"))  # no entry is +inf there, and no weight here

    def _over_chunk(self, q: Tensor, choice: Tensor | None, chunk: PrefillChunk, kv: KVCache) -> list[tuple[Tensor, Tensor]]:
        """Neighbouring queries of one request over what each sees of it: (G, n, R + rope) -> (r, G, R), (r, G), run by run of r queries."""
        heads, count, rank = q.shape[0], q.shape[1], self.w_uk.shape[-1]
        seen = self._here(chunk.context_len + count)  # s
        rows = torch.cat([part[:seen, 0] for part in kv.read_blocks(self.layer, chunk.block_ids)], dim=-1).float()  # (s, R + rope)
        parts = []
        for run in runs(count, max(1, heads * seen), rows.device):
            if choice is None:
                visible = torch.arange(chunk.context_len + run.start + 1, chunk.context_len + run.stop + 1, device=rows.device)  # (r,)
                absent = torch.arange(seen, device=rows.device) >= self._here(visible).unsqueeze(1)  # (r, s)
            else:
                absent = unchosen(choice[run], seen)  # (r, s)
            scores = (q[:, run].float() @ rows.t()).masked_fill_(absent, float("-inf"))  # (G, r, s)
            log = scores.logsumexp(-1)  # (G, r)
            weights = (scores - log.clamp(min=torch.finfo(log.dtype).min).unsqueeze(-1)).exp_()  # of no row at all: zeros, not NaN
            parts.append(((weights @ rows[:, :rank]).transpose(0, 1), log.t()))
        return parts

    def _merge(self, means: Tensor, logs: Tensor) -> Tensor:
        """Every rank's part for all heads -> the whole for this rank's: (T, G, R) and (T, G) float32 -> (H, T, R)."""
        parts = torch.cat((means, logs.unsqueeze(-1)), dim=-1).transpose(0, 1)  # (G, T, R + 1): heads of rank 0, then of rank 1, ...
        each = [self.heads] * self.dcp.size
        parts = self.dcp.all_to_all(parts, "dcp.merge", each, each).unflatten(0, (self.dcp.size, self.heads))  # (m, H, T, R + 1)
        means, logs = parts[..., :-1], parts[..., -1:]
        weights = (logs - logs.amax(0).clamp(min=torch.finfo(logs.dtype).min)).exp_()  # (m, H, T, 1); a rank without rows weighs 0
        return (weights * means).sum(0) / weights.sum(0).clamp(min=torch.finfo(logs.dtype).tiny)

    # --- sparse attention's choice: positions and slots are this rank's ----------------------------------------

    def _slots_for_decodes(self, x: Tensor, c_q: Tensor, cis: Tensor, batch: Batch, kv: KVCache) -> Tensor:
        scratch, tables = batch.scratch, batch.decode_block_tables
        if batch.max_decode_len <= self.top_k:
            if "every slot" not in scratch:
                positions = first(self._here(batch.decode_seq_lens), self._here(batch.max_decode_len))
                scratch["every slot"] = slots_of(positions, tables, kv.block_size)
            return scratch["every slot"]
        if self.indexer is not None:
            queries, weights = self.indexer.queries(x, c_q, cis)  # (D, Hi, d), (D, Hi)
            chosen = self._choose(queries.unsqueeze(1), weights.unsqueeze(1), tables, batch.decode_seq_lens, batch.max_decode_len, kv)
            scratch["chosen slots"] = slots_of(chosen, tables, kv.block_size)
        return scratch["chosen slots"]

    def _choice_for_chunk(self, x: Tensor, c_q: Tensor, cis: Tensor, number: int, batch: Batch, kv: KVCache) -> Tensor | None:
        chunk = batch.prefills[number]
        seen = chunk.context_len + x.shape[0]
        if seen <= self.top_k:
            return None
        if self.indexer is not None:
            queries, weights = self.indexer.queries(x, c_q, cis)  # (n, Hi, d), (n, Hi)
            visible = torch.arange(chunk.context_len + 1, seen + 1, device=x.device)  # (n,)
            batch.scratch["chunk choice", number] = self._choose(queries.unsqueeze(0), weights.unsqueeze(0), chunk.block_ids[None], visible, seen, kv)
        return batch.scratch["chunk choice", number]

    def _choose(self, queries: Tensor, weights: Tensor, tables: Tensor, visible: Tensor, seen: int, kv: KVCache) -> Tensor:
        """Of the `index_topk` best-scored rows of each request, those that are here.

        Args:
            queries, weights: (g, q, Hi, d) and (g, q, Hi), q queries for each of g tables; Q = g * q.
            tables: (g, M).
            visible: (Q,) tokens of the request that a query sees, at most `seen`.

        Returns:
            (Q, K) positions among this rank's rows, -1 for none.
        """
        queries, weights, count = queries.float(), weights.float(), visible.shape[0]
        here = torch.arange(self._here(seen), device=visible.device) * self.dcp.size + self.dcp.rank  # (s,): where in the request the rows are
        candidates = torch.full((count, self.top_k), NO_CANDIDATE, device=visible.device)  # (Q, K)
        most = min(self.top_k, len(here))
        for run in runs(count, max(1, len(here)), visible.device) if most else ():
            # Queries that share a table are cut; of those that have one each, their tables too.
            ask = (queries[:, run], weights[:, run], tables) if len(tables) == 1 else (queries[run], weights[run], tables[run])
            scores = indexer_scores(ask[0], ask[1], kv.indexer_pages(self.indexer.index), ask[2], len(here)).flatten(0, 1)  # (r, s)
            keys = rank_scores(scores.nan_to_num(nan=float("-inf")), here)
            keys.masked_fill_((scores == float("-inf")) | scores.isnan() | (here >= visible[run].unsqueeze(1)), NO_CANDIDATE)
            candidates[run, :most] = keys.topk(most, dim=-1, sorted=False).values
        everybody = self.dcp.all_gather(candidates, "dcp.choice").transpose(0, 1).flatten(1)  # (Q, m * K)
        best = everybody.topk(self.top_k, dim=-1, sorted=False).values  # (Q, K)
        positions = 0xFFFFFFFF - (best & 0xFFFFFFFF)  # in the request
        mine = (best != NO_CANDIDATE) & (positions % self.dcp.size == self.dcp.rank)
        chosen = torch.where(mine, positions // self.dcp.size, -1)
        every = first(self._here(visible), self.top_k)  # (Q, K), of queries that see no more than are chosen
        return torch.where(visible.unsqueeze(1) <= self.top_k, every, chosen)

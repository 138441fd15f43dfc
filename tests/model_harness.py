"""Requests that run on a decoder batch by batch, without scheduler or sampler: every logit of every token comes back."""
import random

import torch

from minengine.kv.cache import KVCache
from minengine.model.batch import Batch, PrefillChunk


class Requests:
    """Requests with scattered blocks of one cache; `step` advances some of them in one batch."""

    def __init__(self, decoder, token_ids, *, kv_cache_dtype="float32", layout="LBNHC", block_size=16, seed=0, config=None, context=1):
        """
        token_ids: {name: (n,) int64}, prompt and continuation.
        config: of what the cache keeps, if that is a part of the decoder's heads; context: ranks that share a block's rows.
        """
        need = {name: -(-len(ids) // block_size) for name, ids in token_ids.items()}
        blocks = list(range(sum(need.values()) + 3))
        random.Random(seed).shuffle(blocks)
        self.decoder, self.token_ids = decoder, token_ids
        self.block_size = block_size
        self.kv = KVCache(config or decoder.config, kv_cache_dtype, layout, len(blocks), block_size // context, dtype=decoder.dtype)
        self.kv.storage.random_(0, 60, generator=torch.Generator().manual_seed(seed))  # old rows, all finite
        self.blocks = {name: torch.tensor([blocks.pop() for _ in range(n)]) for name, n in need.items()}
        self.computed = dict.fromkeys(token_ids, 0)
        self.logits = {name: [] for name in token_ids}

    def step(self, prefills, decodes=()):
        """One batch: prefills {name: how many tokens}, decodes [name]."""
        counts = {**dict.fromkeys(decodes, 1), **prefills}
        batch = self.batch(prefills, decodes)
        with torch.inference_mode():
            logits = self.decoder.logits(self.decoder.forward(batch, self.kv))
        for (name, count), part in zip(counts.items(), logits.split(list(counts.values()))):
            self.computed[name] += count
            self.logits[name].append(part)

    def batch(self, prefills, decodes=()):
        size = self.block_size
        counts = {**dict.fromkeys(decodes, 1), **prefills}
        positions, slots, chunks, start = [], [], [], 0
        for name, count in counts.items():
            at = torch.arange(self.computed[name], self.computed[name] + count)
            positions.append(at)
            slots.append(self.blocks[name][at // size] * size + at % size)
            if name in prefills:
                seen = self.computed[name] + count
                chunks.append(PrefillChunk(start, start + count, self.computed[name], self.blocks[name][: -(-seen // size)]))
            start += count
        ids = torch.cat([self.token_ids[name][at] for name, at in zip(counts, positions)])
        batch = Batch(ids, torch.cat(positions), torch.cat(slots), torch.arange(start), len(decodes), prefills=chunks)
        if decodes:
            lens = [self.computed[name] + 1 for name in decodes]
            width = -(-max(lens) // size)
            batch.max_decode_len, batch.decode_seq_lens = max(lens), torch.tensor(lens)
            batch.decode_block_tables = torch.stack([torch.cat((self.blocks[n], self.blocks[n].new_zeros(width)))[:width] for n in decodes])
        return batch

    def run(self, prompts, seed=0, chunks=(1, 3, 20, 45)):
        """All requests mixed: the first prompts[name] tokens in random chunks, the rest as decodes. Returns {name: (n, vocab)}."""
        for _ in self.steps(prompts, seed, chunks):
            pass
        return self.result()

    def steps(self, prompts, seed=0, chunks=(1, 3, 20, 45)):
        """The same, one batch after the other."""
        draw = random.Random(seed)
        while waiting := [name for name, ids in self.token_ids.items() if self.computed[name] < len(ids)]:
            active = [name for name in waiting if draw.random() < 0.8] or waiting
            decodes = [name for name in active if self.computed[name] >= prompts[name]]
            self.step({name: min(draw.choice(chunks), prompts[name] - self.computed[name]) for name in active if name not in decodes}, decodes)
            yield

    def result(self):
        return {name: torch.cat(parts) for name, parts in self.logits.items()}


def worst(got, expected):
    """Largest difference over the largest logit, over all requests."""
    return max(((got[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in got)

"""The kernel of chapter 8 built up in four steps: one query token attends to the rows that a list names.

    1  scores_kernel        gathers the listed rows and scores them
    2  attend_kernel        softmax and blend in one pass over tiles; an empty entry is neither read nor counted
    3  attend_4bit_kernel   the packed row: unpacked on chip, even and odd columns apart
    4  attend_split_kernel  the list dealt out over programs; the last to finish merges

For reading: widths are powers of two, heads at least 16 of them, rows lie one behind the other, and a list holds slots of the pool or -1.
Lines are short, for the page. The kernel that serves, with pages, odd widths, many tokens and other row formats, is `minkernels.sparse_mla`.
Shapes: q (H, R + P), absorbed and scaled; pool (M, row); slots (K,); out (H, R). R is the latent's width, P the rotary key's.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from minkernels.aot_case import Case
from minkernels.launch import has_e2m1_convert
from minkernels.numbers_kernel import decode_e2m1_pairs, decode_e4m3

__all__ = ["aot_cases", "attend", "attend_4bit", "attend_split", "scores"]

LOWEST = tl.constexpr(-1e30)  # below every score, and finite: the difference of two of them is no NaN
NUM_WARPS = 8  # with four, 16 heads x 512 sums do not fit into the registers


@triton.jit
def list_tile(slots, start, end, TILE: constexpr):
    """(TILE,) entries of the list from `start`: slots, -1 where there is no entry, -2 from `end` on."""
    entry = start + tl.arange(0, TILE)
    return tl.load(slots + entry, mask=entry < end, other=-2)


@triton.jit
def query(q, column, H: constexpr, WIDTH: constexpr):
    """(H, columns) of the query."""
    return tl.load(q + tl.arange(0, H)[:, None] * WIDTH + column[None, :])


@triton.jit
def read(pool, slot, row_size, column):
    """(TILE, columns) of the rows in `slot` (TILE,).

    Where that is negative nothing is read, and zeros stand there.
    """
    slot, column = tl.broadcast(slot.to(tl.int64)[:, None], column[None, :])
    return tl.load(pool + slot * row_size + column, mask=slot >= 0, other=0)


@triton.jit
def dot(a, b):
    """Of float32 as they are: by default a card rounds the factors to 11 bits."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def online_softmax(scores, top, total):
    """Scores (H, TILE) join a running maximum and sum (H,).

    Returns the weights, by what older sums fade, the new maximum, the new sum.
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp(scores - new_top[:, None])
    fade = tl.exp(top - new_top)
    return weights, fade, new_top, total * fade + tl.sum(weights, axis=1)


@triton.jit
def scores_kernel(q, pool, slots, out, K: constexpr, H: constexpr, R: constexpr,
                  P: constexpr, TILE: constexpr):
    """Step 1: out (H, K)."""
    latent, rope = tl.arange(0, R), R + tl.arange(0, P)
    q_latent, q_rope = query(q, latent, H, R + P), query(q, rope, H, R + P)
    for start in range(0, K, TILE):
        slot = list_tile(slots, start, K, TILE)
        c = read(pool, slot, R + P, latent)  # (TILE, R), from anywhere in the pool
        k = read(pool, slot, R + P, rope)  # (TILE, P)
        scores = dot(q_latent, tl.trans(c)) + dot(q_rope, tl.trans(k))
        entry = tl.broadcast_to(start + tl.arange(0, TILE)[None, :], (H, TILE))
        tl.store(out + tl.arange(0, H)[:, None] * K + entry, scores, mask=entry < K)


@triton.jit
def attend_kernel(q, pool, slots, out, K: constexpr, H: constexpr, R: constexpr,
                  P: constexpr, TILE: constexpr):
    """Step 2: out (H, R)."""
    head, latent, rope = tl.arange(0, H), tl.arange(0, R), R + tl.arange(0, P)
    q_latent, q_rope = query(q, latent, H, R + P), query(q, rope, H, R + P)
    top, total = tl.full((H,), LOWEST, tl.float32), tl.zeros((H,), tl.float32)
    blend = tl.zeros((H, R), tl.float32)
    for start in range(0, K, TILE):
        slot = list_tile(slots, start, K, TILE)
        if tl.max(slot) >= 0:  # a tile of empty entries costs nothing more
            c = read(pool, slot, R + P, latent)
            k = read(pool, slot, R + P, rope)
            scores = dot(q_latent, tl.trans(c)) + dot(q_rope, tl.trans(k))
            scores = tl.where(slot[None, :] >= 0, scores, float("-inf"))
            weights, fade, top, total = online_softmax(scores, top, total)
            blend = blend * fade[:, None] + dot(weights, c)
    total = tl.where(total > 0, total, 1.0)  # no entry at all: the output is 0
    tl.store(out + head[:, None] * R + latent[None, :], blend / total[:, None])


@triton.jit
def scale_columns(R: constexpr, P: constexpr):
    """(R/2,) where in a row the scale of each byte's group stands; rank 512 keeps them in four runs."""
    group = tl.arange(0, R // 2) // 8
    if R == 512:
        group = 8 * (group & 3) + (group >> 2)
    return R // 2 + P + group


@triton.jit
def attend_packed(q, pool, slots, first, last, H: constexpr, R: constexpr,
                  P: constexpr, TILE: constexpr, EMPTY: constexpr,
                  NATIVE: constexpr):
    """Entries first..last of the list over packed rows: the blend's even and odd
    columns (H, R/2), maximum and sum (H,), how many entries read a row."""
    pair, rope, ROW = tl.arange(0, R // 2), tl.arange(0, P), R // 2 + P + R // 16
    q_even = query(q, 2 * pair, H, R + P).to(tl.float16)
    q_odd = query(q, 2 * pair + 1, H, R + P).to(tl.float16)
    q_rope = query(q, R + rope, H, R + P).to(tl.float16)
    top, total = tl.full((H,), LOWEST, tl.float32), tl.zeros((H,), tl.float32)
    even, odd = tl.zeros((H, R // 2), tl.float32), tl.zeros((H, R // 2), tl.float32)
    fetched = tl.zeros((TILE,), tl.int32)
    for start in range(first, last, TILE):
        slot = list_tile(slots, start, last, TILE)
        source = tl.where(slot == -1, EMPTY, slot)  # EMPTY: -1 no row, 0 row zero
        fetched += (source >= 0).to(tl.int32)
        if tl.max(source) >= 0:
            byte = read(pool, source, ROW, pair)  # two neighbours in each
            low, high = decode_e2m1_pairs(byte, NATIVE)
            scale = decode_e4m3(read(pool, source, ROW, scale_columns(R, P)))
            c_even, c_odd = low * scale, high * scale  # (TILE, R/2) float16, exact
            k = decode_e4m3(read(pool, source, ROW, R // 2 + rope))
            scores = tl.dot(q_even, tl.trans(c_even)) + tl.dot(q_rope, tl.trans(k))
            scores += tl.dot(q_odd, tl.trans(c_odd))
            scores = tl.where(slot[None, :] >= 0, scores, float("-inf"))
            weights, fade, top, total = online_softmax(scores, top, total)
            weights = weights.to(tl.float16)
            even = even * fade[:, None] + tl.dot(weights, c_even)
            odd = odd * fade[:, None] + tl.dot(weights, c_odd)
    return even, odd, top, total, tl.sum(fetched)


@triton.jit
def store_pairs(out, even, odd, H: constexpr, R: constexpr):
    """Even and odd columns to their places in out (H, R)."""
    at = out + tl.arange(0, H)[:, None] * R + 2 * tl.arange(0, R // 2)[None, :]
    tl.store(at, even)
    tl.store(at + 1, odd)


@triton.jit
def attend_4bit_kernel(q, pool, slots, out, fetched_out, K: constexpr, H: constexpr, R: constexpr,
                       P: constexpr, TILE: constexpr, EMPTY: constexpr, NATIVE: constexpr):
    """Step 3: out (H, R), and how many rows were read."""
    even, odd, _, total, fetched = attend_packed(
        q, pool, slots, 0, K, H, R, P, TILE, EMPTY, NATIVE)
    total = tl.where(total > 0, total, 1.0)
    store_pairs(out, even / total[:, None], odd / total[:, None], H, R)
    tl.store(fetched_out, fetched)


@triton.jit
def attend_split_kernel(q, pool, slots, blends, tops, totals, finished, out,
                        K: constexpr, SHARE: constexpr, H: constexpr, R: constexpr,
                        P: constexpr, TILE: constexpr, NATIVE: constexpr):
    """Step 4: program i has the list's entries i * SHARE and on. blends (programs,
    H, R), tops and totals (programs, H), finished one 0, out (H, R)."""
    i, head, latent = tl.program_id(0), tl.arange(0, H), tl.arange(0, R)
    last = tl.minimum(i * SHARE + SHARE, K)
    even, odd, top, total, _ = attend_packed(
        q, pool, slots, i * SHARE, last, H, R, P, TILE, -1, NATIVE)
    store_pairs(blends + i * H * R, even, odd, H, R)
    tl.store(tops + i * H + head, top)
    tl.store(totals + i * H + head, total)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(finished, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        top, total = tl.full((H,), LOWEST, tl.float32), tl.zeros((H,), tl.float32)
        blend = tl.zeros((H, R), tl.float32)
        for part in range(tl.num_programs(0)):  # .cg: past an older L1
            at = part * H + head
            part_top = tl.load(tops + at, cache_modifier=".cg")
            part_total = tl.load(totals + at, cache_modifier=".cg")
            part_blend = tl.load(blends + at[:, None] * R + latent[None, :],
                                 cache_modifier=".cg")
            new_top = tl.maximum(top, part_top)
            fade, weight = tl.exp(top - new_top), tl.exp(part_top - new_top)
            total = total * fade + part_total * weight
            blend = blend * fade[:, None] + part_blend * weight[:, None]
            top = new_top
        total = tl.where(total > 0, total, 1.0)
        tl.store(out + head[:, None] * R + latent[None, :], blend / total[:, None])


# --- launches ------------------------------------------------------------------------------------------------

def scores(q: Tensor, pool: Tensor, slots: Tensor, rope: int = 64, tile: int = 16) -> Tensor:
    """Step 1: (H, K) scores of float32 rows; the list has no empty entry."""
    out = q.new_empty(q.shape[0], len(slots))
    scores_kernel[(1,)](q, pool, slots, out, **_options(q, slots, rope, tile))
    return out


def attend(q: Tensor, pool: Tensor, slots: Tensor, rope: int = 64, tile: int = 16) -> Tensor:
    """Step 2: (H, R) attention over float32 rows."""
    out = q.new_empty(q.shape[0], q.shape[1] - rope)
    attend_kernel[(1,)](q, pool, slots, out, **_options(q, slots, rope, tile))
    return out


def attend_4bit(q: Tensor, pool: Tensor, slots: Tensor, rope: int = 64, tile: int = 16, empty: int = -1) -> tuple[Tensor, int]:
    """Step 3: (H, R) attention over packed rows, and how many rows it read; with `empty` = 0 an empty entry reads row zero."""
    out, fetched = q.new_empty(q.shape[0], q.shape[1] - rope), torch.zeros(1, dtype=torch.int32, device=q.device)
    attend_4bit_kernel[(1,)](q, pool, slots, out, fetched, **_options(q, slots, rope, tile), EMPTY=empty, NATIVE=_native(q))
    return out, int(fetched)


def attend_split(q: Tensor, pool: Tensor, slots: Tensor, rope: int = 64, tile: int = 16, programs: int = 4) -> Tensor:
    """Step 4: (H, R) attention over packed rows by several programs."""
    heads, rank = q.shape[0], q.shape[1] - rope
    share = tile * -(-len(slots) // (tile * programs))  # whole tiles
    blends, finished = q.new_empty(programs, heads, rank), torch.zeros(1, dtype=torch.int32, device=q.device)
    tops, totals = q.new_empty(2, programs, heads)
    out = q.new_empty(heads, rank)
    attend_split_kernel[(programs,)](q, pool, slots, blends, tops, totals, finished, out, **_options(q, slots, rope, tile), SHARE=share,
                                     NATIVE=_native(q))
    return out


def _options(q: Tensor, slots: Tensor, rope: int, tile: int) -> dict[str, int]:
    return {"K": len(slots), "H": q.shape[0], "R": q.shape[1] - rope, "P": rope, "TILE": tile, "num_warps": NUM_WARPS}


def _native(q: Tensor) -> bool:
    """Whether the card has the instruction that turns a byte into two float16."""
    return has_e2m1_convert(q.device)


def aot_cases() -> list[Case]:
    """Step 4 at GLM-5.3's row and 16 heads: with the bits moved by hand, and with Blackwell's instruction."""
    tensors = {"q": "*fp32", "pool": "*u8", "slots": "*i32", "blends": "*fp32", "tops": "*fp32", "totals": "*fp32", "finished": "*i32",
               "out": "*fp32"}
    cases = []
    for name, arch, native in (("step 4 of 4, shifts", "sm_90a", False), ("step 4 of 4, converts", "sm_100a", True)):
        constants = {"K": 2048, "SHARE": 256, "H": 16, "R": 512, "P": 64, "TILE": 32, "NATIVE": native}
        wants = ("tensor_core", "e2m1_convert") if native else ("tensor_core",)
        cases.append(Case(name, attend_split_kernel, tensors | dict.fromkeys(constants, "constexpr"), constants, num_warps=NUM_WARPS, num_stages=2,
                          arches=(arch,), wants=wants))
    return cases

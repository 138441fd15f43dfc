"""Attention over a long list is split over programs; here their parts become one result, in Triton.

A part of one row (a token's head) is three things over the entries its program saw: `maximum`, the largest score in units of log2(e)
(so that weights are powers of two), `total`, the sum of 2^(score - maximum), and `mean`, D float32 sums of weighted values, not yet divided.
They lie at [row, split] of (rows, splits) and (rows, splits, D). A program that saw no entry leaves maximum = -inf and total = 0, and need
not write its D sums: they are never read. A row whose parts are all empty gives output 0 and lse = +inf. A maximum may leave NaN out; the total
of a part with a NaN score is NaN, which is what makes the row's output and lse NaN.

The merge runs in a launch of its own (`merge_kernel`, a program a row) or in whoever finishes last (`is_last`).
"""
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def is_last(counter, NUM_PARTS: tl.constexpr):
    """Whether this program is the last of NUM_PARTS to get here, which also sets the counter back for the next launch.

    What the others stored before is visible to loads with cache_modifier=".cg" after it: the barrier puts this program's stores, of all its
    threads, before the release, and L1, which no other program's store reaches, is left out.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = before == NUM_PARTS - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last


@triton.jit
def log_sum_exp(maximum, total):
    """Natural logarithm of the sum of exponentials; +inf where there was no entry, NaN where a score was NaN."""
    return tl.where(total == 0, INFINITY, (maximum + tl.log2(tl.where(total == 0, 1.0, total))) * LN2)


@triton.jit
def merge_rows(
    means, maxima, totals,  # (rows, splits, D), (rows, splits), (rows, splits) float32
    out, lse,  # (rows, D), (rows,) float32
    rows, present, num_splits,  # [ROWS] int64, [ROWS] bool
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """The listed rows' parts -> `out` and `lse`, BLOCK_D columns at a time."""
    largest = tl.full(rows.shape, -INFINITY, tl.float32)
    for split in range(num_splits):
        largest = tl.maximum(largest, tl.load(maxima + rows * num_splits + split, mask=present, other=-INFINITY, cache_modifier=".cg"))
    base = tl.where(largest == -INFINITY, 0.0, largest)
    total = tl.zeros(rows.shape, tl.float32)
    for split in range(num_splits):
        weight = tl.exp2(tl.load(maxima + rows * num_splits + split, mask=present, other=-INFINITY, cache_modifier=".cg") - base)
        total += weight * tl.load(totals + rows * num_splits + split, mask=present, other=0.0, cache_modifier=".cg")
    tl.store(lse + rows, log_sum_exp(largest, total), mask=present)
    inverse = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    for start in range(0, D, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        mean = tl.zeros((rows.shape[0], BLOCK_D), tl.float32)
        for split in range(num_splits):
            part = rows * num_splits + split
            weight = tl.exp2(tl.load(maxima + part, mask=present, other=-INFINITY, cache_modifier=".cg") - base)
            width = tl.where(weight > 0, D, 0)  # an empty part's sums were not written
            mean += weight[:, None] * tl.load(means + part[:, None] * D + column[None, :], mask=column[None, :] < width[:, None], other=0.0,
                                              cache_modifier=".cg")
        width = tl.where(present, D, 0)
        tl.store(out + rows[:, None] * D + column[None, :], (mean * inverse[:, None]).to(out.dtype.element_ty),
                 mask=column[None, :] < width[:, None])


@triton.jit
def merge_kernel(means, maxima, totals, out, lse, num_splits, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    merge_rows(means, maxima, totals, out, lse, row, row >= 0, num_splits, D, BLOCK_D)

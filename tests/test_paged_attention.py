"""Paged decode attention, kernel (in Triton's interpreter, or on a card) and plain torch, against float64 over the dequantised rows.

Only the positions of a request are ever written: all else in the pool, block 0 included, is NaN, and what a block table lists past a request's
last block is outside the pool. The kernel runs before the oracle, so that reused memory cannot hold the answer. Errors are relative to the
largest number of a request's and KV head's result.
"""
import pytest
import torch

from kernel_harness import interpreted
from minengine.arithmetic import head_row_bytes
from minengine.kv.rows import head_format
from minkernels.paged_attention import STORAGE, choose_splits, paged_decode, row_width

FORMATS = ("float32", "bfloat16", "fp8", "nvfp4")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# float16 operands: weights rounded to 2^-12, the result to 2^-11 of itself. The interpreter truncates to bfloat16: 2^-8.
LEVELS = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SPLIT = [dict(), dict(num_splits=1), dict(num_splits=3), dict(num_splits=3, one_launch=False)]


def case(kv_format, lengths, d=32, heads=2, group=3, block_size=16, dtype=torch.float16, index=torch.int32, spread=4, seed=0, device="cpu"):
    """(q, pages, tables, lens), and K and V of every request in float64: [(H, n, d), (H, n, d)].

    Amounts differ by `spread` powers of two from one group of 16 values to the next.
    """
    torch.manual_seed(seed)
    fmt = head_format(kv_format, d)
    counts = [-(-n // block_size) for n in lengths]
    blocks = 3 * max(1, sum(counts)) + 1
    ids = (1 + torch.randperm(blocks - 1))[: sum(counts)].split(counts)  # block 0 is nobody's
    tables = torch.full((len(lengths), max(1, *counts) + 1), blocks + 7, dtype=index)
    width = fmt.storage_width
    # One layer of two in a block-major pool with channels to spare, heads before tokens: no two strides are what sizes imply.
    pool = torch.full((blocks, 2, heads, block_size + 1, width + 5), 0x7F if fmt.storage_dtype == torch.uint8 else float("nan"), dtype=fmt.storage_dtype)
    pages = pool.to(device)[:, 1, :, :block_size, 3 : 3 + width].transpose(1, 2)
    rows = []
    for i, (n, mine) in enumerate(zip(lengths, ids)):
        tables[i, : len(mine)] = mine
        amount = torch.exp2(torch.randint(-spread, 1, (2, n, heads, d // 16))).repeat_interleave(16, dim=-1)
        packed = fmt.quantize(*(torch.randn(2, n, heads, d) * amount))
        at = torch.arange(n)
        pages[mine[at // block_size].to(device), (at % block_size).to(device)] = packed.to(device)
        rows.append([part.double().transpose(0, 1) for part in fmt.dequantize(packed)])
    q = torch.randn(len(lengths), 2, heads * group, d).to(dtype)[:, 1]  # every other row of a buffer
    return q.to(device), pages, tables.to(device), torch.tensor(lengths, dtype=index, device=device), rows


def oracle(q, rows, scale):
    """Float64, a request and a KV head at a time: (D, Hq, d)."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i, (k, v) in enumerate(rows):
        group = q.shape[1] // len(k)
        for head in range(len(k) if k.shape[1] else 0):
            mine = slice(head * group, (head + 1) * group)
            out[i, mine] = (q[i, mine].double().cpu() @ k[head].T * scale).softmax(-1) @ v[head]
    return out


def check(kv_format, lengths, options=None, scale=None, **arguments):
    """Run one case; the error of the worst request and KV head."""
    q, pages, tables, lens, rows = case(kv_format, lengths, **arguments)
    got = paged_decode(q, pages, tables, lens, kv_format, scale=scale, **options or {})
    want = oracle(q, rows, q.shape[2] ** -0.5 if scale is None else scale)
    assert got.dtype == q.dtype and got.shape == q.shape and got.is_contiguous(), (got.dtype, got.shape)
    got, want = (x.double().cpu().unflatten(1, (pages.shape[2], -1)) for x in (got, want))
    empty = torch.tensor([n == 0 for n in lengths])
    assert not got[empty].any(), f"seq_len 0 gave {got[empty]}"
    error = ((got - want).abs().amax((2, 3)) / want.abs().amax((2, 3)).clamp(min=1e-30)).max().item()
    level = max(LEVELS[q.dtype], 1e-3 if kv_format == "float32" and q.dtype == torch.float16 else 0)
    assert error < level, f"{kv_format} {lengths} {options} {arguments}: error {error:.3g}, level {level}"
    return error


def check_all(cases, backend, device="cpu"):
    """The cases that `cases()` gives, as (arguments, keywords of check), in one go: one trip to the interpreter. How many."""
    listed = cases()
    for arguments, keywords in listed:
        check(*arguments, **{**keywords, "device": device, "options": {**keywords["options"], "backend": backend}})
    return len(listed)


ROUND = (1, 16, 17, 63, 64, 65, 128, 0, 200)  # a row, page and tile boundaries, nothing


def every_way():
    """Each format with each query dtype, splits taking turns, over lengths around every boundary."""
    return [((f, ROUND[(i + j) % 3 :: 3] + (150,)), dict(dtype=dtype, options=SPLIT[(i + j) % 4], seed=i))
            for i, f in enumerate(FORMATS) for j, dtype in enumerate(DTYPES)]


def shapes():
    """Head dims that are no powers of two, groups of 1 to 17, blocks of 16 to 1024, int64 indices, amounts far apart."""
    return [((f, lengths), dict(d=d, group=group, heads=heads, block_size=size, index=index, spread=spread, options=dict(num_splits=splits)))
            for f in FORMATS for d, group, heads, size, index, lengths, spread, splits in (
                (16, 1, 1, 16, torch.int64, (5, 33), 0, 1), (80, 8, 1, 48, torch.int32, (49, 48), 7, 2), (64, 3, 3, 1024, torch.int32, (70, 1), 4, 1),
                (144, 17, 1, 32, torch.int64, (130,), 4, 2), (128, 4, 2, 64, torch.int32, (66,), 4, 1))]


def boundaries():
    """Ends and beginnings of pages in many places of a tile, at block sizes that divide it, span it, and do neither."""
    return [(("nvfp4", tuple(range(size % 5, 3 * 64 + 3, 16))), dict(block_size=size, options=dict(num_splits=2), heads=1)) for size in (16, 24, 96)]


CASES = pytest.mark.parametrize("cases", [every_way, shapes, boundaries])


@CASES
def test_the_kernel_in_the_interpreter(cases):
    assert interpreted(check_all, cases, "triton") >= 3


@pytest.mark.gpu
@CASES
def test_the_kernel_on_a_card(cases):
    check_all(cases, "triton", "cuda")


@CASES
def test_plain_torch(cases):
    check_all(cases, "torch")


@pytest.mark.gpu
@CASES
def test_plain_torch_on_a_card(cases):
    check_all(cases, "torch", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", FORMATS)
def test_long_requests_on_a_card(kv_format):
    """Splits as the function chooses them, more programs than a GPU holds, and again, with counters that must be zero again."""
    for _ in range(3):
        check(kv_format, (5000, 1, 20000, 0, 333), d=128, heads=8, group=4, block_size=64, dtype=torch.float16, device="cuda", options=dict(backend="triton"))


def test_plain_torch_in_double_precision_is_the_oracle():
    check("nvfp4", ROUND, dtype=torch.float64, scale=0.3)


def test_plain_torch_takes_requests_in_runs(monkeypatch):
    monkeypatch.setattr("minkernels.paged_attention.TORCH_VALUES", 2 * 208 * 2 * 32)
    check("fp8", ROUND, dtype=torch.float64)


def check_special(backend, device="cpu"):
    options = dict(backend=backend)
    check("bfloat16", (40, 7), scale=0.05, options=options, device=device)
    q, pages, tables, lens, _ = case("bfloat16", (40, 16), device=device)
    # A block that is none is skipped, wherever it stands; a request of nothing else is 0.
    want = paged_decode(q[:1], pages, tables[:1, [0, 2]], lens[:1] - 16, "bfloat16", backend=backend)
    tables[0, 1], tables[1, 0] = -1, len(pages)
    got = paged_decode(q, pages, tables, lens, "bfloat16", **options)
    assert (got[:1] - want).abs().max() < 2e-3 and not got[1].any(), (got, want)
    # A cached number that float16 cannot hold saturates and stays one number among others: no NaN where its weight is 0.
    q, pages, tables, lens, _ = case("bfloat16", (40,), device=device)
    pages[tables[0, 0].item(), 3, :, :] = 1e6 * torch.where(torch.arange(64, device=device) < 32, -1.0, 1.0)
    q = q.abs()
    got = paged_decode(q, pages, tables, lens, "bfloat16", **options)
    assert got.isfinite().all() and got.abs().max() < 10, got
    assert paged_decode(q[:0], pages, tables[:0], lens[:0], "bfloat16", **options).shape == (0, *q.shape[1:])
    for pool, table in ((pages[:0], tables), (pages[:, :0], tables), (pages, tables[:, :0])):
        got = paged_decode(q, pool, table, lens, "bfloat16", **options)
        assert got.shape == q.shape and not got.any(), (pool.shape, table.shape, got)
    for split in SPLIT:
        # A length beyond the table's room is that room, and one below 0 is 0, of whatever size.
        q, pages, tables, lens, _ = case("bfloat16", (48, 48), index=torch.int64, device=device)
        want = paged_decode(q, pages, tables[:, :3], lens, "bfloat16", **options, **split)
        for longest in (49, 2**31 + 5, 2**32, 2**62):
            got = paged_decode(q, pages, tables[:, :3], torch.tensor([longest, -longest], device=device), "bfloat16", **options, **split)
            assert (got[0] - want[0]).abs().max() < 2e-3 and not got[1].any(), (longest, split, got, want)
        # NaN is not taken for a request without positions.
        q[0, 1, 3] = float("nan")
        got = paged_decode(q, pages, tables, lens, "bfloat16", **options, **split)
        assert got[0, 1].isnan().all() and got.isnan().sum() == q.shape[2], (split, got)


def test_special_inputs_in_the_interpreter():
    interpreted(check_special, "triton")


def test_special_inputs_in_plain_torch():
    check_special("torch")


@pytest.mark.gpu
def test_special_inputs_on_a_card():
    check_special("triton", "cuda")


def test_rows_are_as_wide_as_the_books_formula_says():
    for d in (16, 80, 128):
        for kv_format in FORMATS:
            assert row_width(kv_format, d) * STORAGE[kv_format].itemsize == head_row_bytes(kv_format, d).total


@pytest.mark.parametrize("programs, positions, sms, splits", [
    (1, 10**6, 132, 256), (8, 10**6, 132, 32), (1000, 10**6, 132, 1), (8, 1024, 132, 4), (8, 100, 132, 1), (264, 4096, 132, 1), (150, 4096, 132, 2),
])
def test_requests_are_split_while_programs_are_few_and_positions_many(programs, positions, sms, splits):
    assert choose_splits(programs, positions, sms) == splits


@pytest.mark.parametrize("change, words", [
    (dict(kv_format="q4_0"), "kv_format='q4_0': use one of float32, bfloat16, fp8, nvfp4"),
    (dict(q=torch.zeros(2, 4, 24)), "d a multiple of 16; got .2, 4, 24."),
    (dict(q=torch.zeros(2, 4, 32, dtype=torch.int32)), "torch.int32"),
    (dict(q=torch.zeros(2, 3, 32)), "3 heads, which is no multiple of the 2 KV heads"),
    (dict(kv_format="nvfp4"), "pages of 'nvfp4' must be .blocks, block_size, KV heads, 36."),
    (dict(kv_format="bfloat16"), "torch.bfloat16 with contiguous rows; got .3, 16, 2, 64. torch.uint8"),
    (dict(pages=torch.zeros(3, 16, 2, 128, dtype=torch.uint8)[..., ::2]), "strides .4096, 256, 128, 2."),
    (dict(block_tables=torch.zeros(2, 3)), "block_tables must be .requests, blocks. int32 or int64 for 2 requests; got .2, 3. torch.float32"),
    (dict(seq_lens=torch.zeros(3, dtype=torch.int32)), "seq_lens must be .requests,. int32 or int64 for 2 requests; got .3,."),
    (dict(num_splits=0), "num_splits=0"),
    (dict(num_splits=2.5), "num_splits=2.5: use a whole number of at least 1"),
    (dict(seq_lens=torch.zeros(2, dtype=torch.int16)), "seq_lens must be .*torch.int16"),
    (dict(block_tables=torch.zeros(2, 3, dtype=torch.bool)), "block_tables must be .*torch.bool"),
    (dict(backend="cuda"), "backend='cuda'"),
    (dict(backend="triton"), "needs data on a GPU"),
])
def test_wrong_arguments_are_named(change, words):
    arguments = dict(q=torch.zeros(2, 4, 32), pages=torch.zeros(3, 16, 2, 64, dtype=torch.uint8), block_tables=torch.zeros(2, 3, dtype=torch.int32),
                     seq_lens=torch.zeros(2, dtype=torch.int32), kv_format="fp8")
    assert not paged_decode(**arguments).any()
    with pytest.raises(ValueError, match=words):
        paged_decode(**arguments | change)

"""Indexer keys written by the kernel, and the choice of the best: exact against scores in float64, on inputs whose scores are exact."""
import math

import pytest
import torch

from kernel_harness import interpreted
from minengine.kv.rows import indexer_format
from minkernels.indexer import append_indexer_keys, best_positions, indexer_topk, pack_keys
from row_reference import hard_values

BLOCK_SIZE, HEADS, WIDTH = 4, 3, 24
FORMATS = {"fp8": torch.uint8, "float32": torch.float32, "bfloat16": torch.bfloat16}


# --- keys ----------------------------------------------------------------------------------------------------

def check_append(name: str, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Bytes equal to the format's, in their slots only, in a block-major pool that starts an element in."""
    keys = torch.stack([hard_values(-(-width // 16) * 16, seed)[:width] * 2.0**e for seed, e in enumerate((0, -130, 100, 4, -20, 0, 8))])
    keys[3] = 0.0
    keys[5, :3] = torch.tensor([math.inf, -math.inf, -0.0])
    keys[6, :2] = torch.tensor([448.0, 232.0])  # scale 1; 232 lies half-way between two E4M3 numbers
    keys = keys.to(dtype).to(device)
    fmt = indexer_format(name, width)
    blocks = 4
    storage = torch.full((blocks * 3 * BLOCK_SIZE * fmt.storage_width + 1,), 77, dtype=fmt.storage_dtype, device=device)
    pages = storage[1:].view(blocks, 3, BLOCK_SIZE, fmt.storage_width)[:, 1]
    wanted = storage.clone()
    slots = [5, -1, 0, 15, 6, 9, 7]
    in_wanted = wanted[1:].view(blocks, 3, BLOCK_SIZE, fmt.storage_width)[:, 1]
    for slot, row in zip(slots, fmt.quantize(keys)):
        if slot >= 0:
            in_wanted[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = row
    slots[1] = 16 if width == 30 else -1
    append_indexer_keys(keys.t().contiguous().t(), pages, torch.tensor(slots, dtype=torch.int32, device=device), backend="triton")
    differs = (storage.view(torch.uint8) != wanted.view(torch.uint8)).nonzero().flatten()
    assert not len(differs), (name, width, dtype, differs[:5].tolist())
    by_torch = torch.full_like(storage, 77)
    append_indexer_keys(keys, by_torch[1:].view(blocks, 3, BLOCK_SIZE, fmt.storage_width)[:, 1], torch.tensor(slots, device=device), backend="torch")
    assert torch.equal(by_torch.view(torch.uint8), wanted.view(torch.uint8)), (name, width, dtype, "torch")


def check_appends(name: str, device: str = "cpu") -> None:
    for width in (128, 30):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_append(name, width, dtype, device)


@pytest.mark.parametrize("name", FORMATS)
def test_keys_are_written_to_the_byte(name):
    interpreted(check_appends, name)


# --- the choice ----------------------------------------------------------------------------------------------

def exact_case(name: str, lengths: list[int], levels: int, seed: int, heads: int = HEADS, width: int = WIDTH):
    """Queries, weights, pages, tables and keys whose scores every order of summation gives exactly, with many ties; unseen slots are NaN.

    Keys are small whole numbers up to 7 times a power of two of their own: their scale is a power of two as well, and E4M3 keeps them.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks_each = -(-max(max(lengths), 1) // BLOCK_SIZE)
    tables = torch.randperm(len(lengths) * blocks_each + 3, generator=generator)[: len(lengths) * blocks_each].view(len(lengths), blocks_each)
    queries = torch.randint(-levels, levels + 1, (len(lengths), heads, width), generator=generator).float()
    weights = torch.randint(-2, 3, (len(lengths), heads), generator=generator).float()
    keys = torch.randint(-levels, levels + 1, (len(lengths), blocks_each * BLOCK_SIZE, width), generator=generator).float()
    keys[..., 0] = 7.0  # 7 / 448 = 2^-6
    keys *= torch.exp2(torch.randint(-3, 4, keys.shape[:2], generator=generator).float()).unsqueeze(-1)
    if levels > 1:
        keys[:, 1::3] = keys[:, :1]  # equal keys far apart
    fmt = indexer_format(name, width)
    nan = float("nan") if fmt.storage_dtype.is_floating_point else 0xFF  # the bytes' scale reads as NaN
    pages = torch.full((int(tables.max()) + 4, BLOCK_SIZE, fmt.storage_width + 1), nan, dtype=fmt.storage_dtype)[..., 1:]
    for r, length in enumerate(lengths):
        for position in range(length):
            pages[tables[r, position // BLOCK_SIZE], position % BLOCK_SIZE] = fmt.quantize(keys[r, position])
        tables[r, -(-length // BLOCK_SIZE) :] = torch.tensor(2**31 - 1)  # what is not seen is not looked up
    return queries, weights, pages, tables, keys


def best(queries, weights, keys, length: int, k: int) -> list[int]:
    """By definition, in float64: all when there are k or fewer, else by falling score, lower positions first."""
    scores = (torch.einsum("hd,sd->hs", queries.double(), keys[:length].double()).relu() * weights.double().unsqueeze(1)).sum(0).tolist()
    return sorted(sorted(range(length), key=lambda p: (-scores[p], p))[:k])


def check_choice(name: str, lengths: list[int], k: int, levels: int, seed: int, backend: str = "triton", device: str = "cpu", dtype=torch.float32,
                 heads: int = HEADS, width: int = WIDTH) -> None:
    queries, weights, pages, tables, keys = exact_case(name, lengths, levels, seed, heads, width)
    lens = torch.tensor(lengths, dtype=torch.int32)
    got = indexer_topk(*(t.to(device) for t in (queries.to(dtype), weights, pages, tables, lens)), k, backend=backend).cpu()
    assert got.shape == (len(lengths), k) and got.dtype == torch.int32
    for r, length in enumerate(lengths):
        chosen = [p for p in got[r].tolist() if p >= 0]
        wanted = best(queries[r], weights[r], keys[r], length, k)
        assert sorted(chosen) == wanted, (name, backend, length, k, sorted(set(chosen) ^ set(wanted)))
        assert (got[r] < 0).sum() == k - len(wanted) and got[r].min() >= -1


def check_lengths(name: str, backend: str = "triton", device: str = "cpu") -> None:
    """Nothing visible, one, around k, around pages and tiles; few distinct scores, then many."""
    for levels in (1, 3):
        check_choice(name, [0, 1, 7, 8, 9, 12, 13, 127, 128, 129, 140], 8, levels, levels, backend, device)
    check_choice(name, [61, 30], 1, 3, 3, backend, device)
    check_choice(name, [37, 61], 33, 2, 4, backend, device, heads=17, width=16)


def check_long(backend: str = "triton", device: str = "cpu") -> None:
    """More positions than one pass over scores holds, and a k that is no power of two."""
    check_choice("fp8", [4500, 2100], 300, 1, 5, backend, device)


def check_narrow_queries(name: str, device: str = "cpu") -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check_choice(name, [40, 9], 8, 3, 6, "triton", device, dtype)


def check_rows(backend: str = "triton", device: str = "cpu") -> None:
    """Several queries a table, in any order, causal; and one table for all."""
    queries, weights, pages, tables, keys = exact_case("fp8", [50, 23, 41], 2, 7)
    owners = torch.tensor([2, 0, 0, 1, 2, 0], dtype=torch.int32)
    seen = torch.tensor([41, 50, 49, 22, 30, 3])
    many = queries[[0, 1, 2, 0, 1, 2]] + torch.arange(6)[:, None, None] % 2, weights[[2, 1, 0, 1, 2, 0]]
    for chosen_owners, table in ((owners, tables), (torch.zeros_like(owners), tables[:1])):
        got = indexer_topk(*(t.to(device) for t in (*many, pages, table, seen)), 8, rows=chosen_owners.to(device), backend=backend).cpu()
        for i, owner in enumerate(chosen_owners.tolist()):
            wanted = best(many[0][i], many[1][i], keys[owner], int(seen[i]), 8)
            assert sorted(p for p in got[i].tolist() if p >= 0) == wanted, (backend, i)


def check_astray(backend: str = "triton", device: str = "cpu") -> None:
    """Positions of blocks outside the pool are never chosen, by queries that see more than k and by those that see fewer; every table that is
    none of the pool's, and no positions at all, give -1 throughout."""
    queries, weights, pages, tables, keys = (t.to(device) for t in exact_case("fp8", [50, 6, 40], 3, 11))
    lens, gone = torch.tensor([50, 6, 40], device=device), (torch.tensor([1, 7, 11]), torch.tensor([0]), torch.arange(10))
    for r, blocks in enumerate(gone):
        tables[r, blocks.to(device)] = torch.tensor([-1, len(pages), 2**31 - 1, -2**31], device=device).repeat(3)[: len(blocks)]
    for index in (torch.int32, torch.int64):
        got = indexer_topk(queries, weights, pages, tables.to(index), lens.to(index), 8, backend=backend).cpu()
        for r, blocks in enumerate(gone):
            there = [p for p in range(int(lens[r])) if p // BLOCK_SIZE not in blocks.tolist()]
            nth = best(queries[r].cpu(), weights[r].cpu(), keys[r].cpu()[there], len(there), 8)
            assert sorted(p for p in got[r].tolist() if p >= 0) == [there[n] for n in nth], (backend, index, r, got[r], there)
    for some in (slice(0), slice(3)):
        for pool, table, most in ((pages[:0], tables, None), (pages[:, :0], tables, None), (pages, tables[:, :0], None), (pages, tables, 0), (pages, tables, -5)):
            got = indexer_topk(queries[some], weights[some], pool, table[some], lens[some], 8, most_visible=most, backend=backend)
            assert got.dtype == torch.int32 and torch.equal(got, torch.full_like(got, -1)) and got.shape == (len(queries[some]), 8), (pool.shape, most, got)


def check_stray_rows() -> None:
    """The kernel reads no table for a row that names none, and its query sees nothing; the others are none the worse."""
    queries, weights, pages, tables, keys = exact_case("fp8", [50, 23, 41], 2, 7)
    for dtype in (torch.int32, torch.int64):
        rows = torch.tensor([-1, 1, torch.iinfo(dtype).max], dtype=dtype)
        for seen in ([50, 23, 41], [5, 23, 5]):
            got = indexer_topk(queries, weights, pages, tables, torch.tensor(seen), 8, rows=rows, backend="triton")
            assert (got[[0, 2]] == -1).all() and sorted(got[1].tolist()) == best(queries[1], weights[1], keys[1], 23, 8), (dtype, got)


def check_selection(device: str = "cpu") -> None:
    """The kernel's selection alone, over numbers of every kind, one query a row."""
    from minkernels import indexer_kernel as kernel

    inf = float("inf")
    scores = torch.randn(9, 300, generator=torch.Generator().manual_seed(8))
    scores[1] = 0.0
    scores[1, ::2] = -0.0  # equal to 0.0: the lower positions win
    scores[2] = float("nan")
    scores[2, 40:45] = torch.tensor([1.0, -inf, -3e38, inf, -1e-45])
    scores[3] = -inf
    scores[4] = torch.tensor([inf, -inf, float("nan")]).repeat(100)
    scores[5] = torch.arange(300).remainder(5).sub(2).float() * 1e-45  # subnormals of both signs
    scores[6] = (torch.arange(300) % 7 - 3.0).mul(3e38)  # whole rows of +-inf among them
    scores[7] = torch.arange(300, dtype=torch.int32).flip(0).view(torch.float32)  # the smallest subnormals, falling
    scores[8] = 1.0 + torch.arange(300).remainder(50) * 2.0**-23  # differ in the last bit only
    seen = torch.tensor([300, 299, 300, 300, 300, 257, 300, 300, 300], dtype=torch.int32)
    table, rows = torch.zeros(1, 3, dtype=torch.int32, device=device), torch.zeros(9, dtype=torch.int32, device=device)
    for k in (1, 5, 100):
        chosen = torch.full((9, k), -7, dtype=torch.int32, device=device)
        kernel.select_kernel[(9,)](scores.to(device), table, rows, seen.to(device), chosen, 300, 1, 100, 3, 300,
                                   **(kernel.select_constants(k) | {"TILE": 128}), num_warps=4)
        for row, length, got in zip(scores, seen.tolist(), chosen.cpu().tolist()):
            candidates = [p for p in range(length) if row[p] > -inf]
            wanted = sorted(sorted(candidates, key=lambda p: (-float(row[p]), p))[:k])
            assert got == wanted + [-1] * (k - len(wanted)), (k, got, wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_the_choice_is_exact_at_every_length(name):
    check_lengths(name, "torch")
    interpreted(check_lengths, name)


def test_the_choice_is_exact_over_many_positions():
    check_long("torch")
    interpreted(check_long)


@pytest.mark.parametrize("name", ["fp8", "bfloat16"])
def test_queries_of_16_bits_choose_the_same(name):
    interpreted(check_narrow_queries, name)


def test_queries_that_share_a_table():
    check_rows("torch")
    interpreted(check_rows)


def test_blocks_outside_the_pool_are_never_read_nor_chosen():
    check_astray("torch")
    interpreted(check_astray)


def test_rows_that_name_no_table():
    interpreted(check_stray_rows)
    queries, weights, pages, tables, _ = exact_case("fp8", [50, 23, 41], 2, 7)
    for wrong, given in ((3, tables), (-1, tables), (1, tables[:1])):
        rows = torch.tensor([0, wrong, 0])
        with pytest.raises(ValueError, match=f"rows must name tables 0 to {len(given) - 1}, one a query; got {wrong}"):
            indexer_topk(queries, weights, pages, given, torch.tensor([50, 23, 41]), 8, rows=rows, backend="torch")


def test_selection_orders_numbers_of_every_kind():
    interpreted(check_selection)


def test_plain_torch_never_chooses_nan():
    scores = torch.tensor([[math.nan, 1.0, -math.inf, -0.0, 0.0, math.nan], [math.nan] * 6, [0.0, -0.0, 0.0, 5.0, math.inf, -1.0]])
    kept = scores.clone()
    assert [sorted(row) for row in best_positions(scores, 3).tolist()] == [[1, 3, 4], [-1, -1, -1], [0, 3, 4]]
    assert torch.equal(scores.view(torch.int32), kept.view(torch.int32)), "the scores are the caller's"


def test_runs_and_tiles_change_nothing(monkeypatch):
    from minkernels import indexer

    torch.manual_seed(9)
    queries, weights, keys = torch.randn(7, 4, 16), torch.randn(7, 4), torch.randn(120, 16)
    pages = pack_keys(keys).view(30, 4, -1)
    arguments = queries, weights, pages, torch.arange(30).unsqueeze(0), torch.arange(100, 107), 9, torch.zeros(7, dtype=torch.int32)
    whole = indexer_topk(*arguments)
    monkeypatch.setitem(indexer.RUN_VALUES, "cpu", 300)
    assert torch.equal(indexer_topk(*arguments).sort().values, whole.sort().values)


@pytest.mark.gpu
def test_the_indexer_on_a_gpu():
    for name in FORMATS:
        check_appends(name, "cuda")
        check_lengths(name, device="cuda")
        check_narrow_queries(name, "cuda")
    check_choice("fp8", [700, 2500, 5000], 256, 2, 10, device="cuda", dtype=torch.bfloat16, heads=32, width=128)
    check_long(device="cuda")
    check_rows(device="cuda")
    check_astray(device="cuda")
    check_selection("cuda")


@pytest.mark.parametrize("change, words", [
    (dict(pages=torch.zeros(2, 4, 20, dtype=torch.uint8)), "28"),
    (dict(pages=torch.zeros(2, 4, 48)[..., ::2]), "strides"),
    (dict(top_k=0), "top_k=0"),
    (dict(top_k=4.0), "top_k=4.0: use a whole number"),
    (dict(queries=torch.zeros(3, WIDTH)), "queries must be .tokens, heads, width. .*; got .3, 24."),
    (dict(head_weights=torch.zeros(3, HEADS + 1)), "head_weights must be .3, 3."),
    (dict(head_weights=torch.zeros(3, HEADS, dtype=torch.int32)), "head_weights must be .*torch.int32"),
    (dict(block_tables=torch.zeros(3, 2)), "block_tables must be .tables, blocks. int32 or int64 on cpu; got .3, 2. torch.float32"),
    (dict(block_tables=torch.zeros(3, dtype=torch.int32)), "block_tables must be"),
    (dict(visible=torch.ones(2, dtype=torch.int32)), "visible must be .3,. int32 or int64"),
    (dict(visible=torch.ones(3)), "visible must be .*torch.float32"),
    (dict(visible=torch.ones(3, dtype=torch.int32, device="meta")), "visible must be .* on cpu; got .* on meta"),
    (dict(rows=torch.zeros(2, dtype=torch.int32)), "rows must be .3,. int32 or int64"),
    (dict(rows=torch.zeros(3, dtype=torch.bool)), "rows must be .*torch.bool"),
    (dict(block_tables=torch.zeros(2, 2, dtype=torch.int32)), "2 tables for 3 queries; give `rows`"),
    (dict(backend="cuda"), "backend='cuda'"),
])
def test_wrong_arguments_are_named(change, words):
    arguments = dict(queries=torch.zeros(3, HEADS, WIDTH), head_weights=torch.zeros(3, HEADS), pages=torch.zeros(2, 4, WIDTH + 4, dtype=torch.uint8),
                     block_tables=torch.zeros(3, 2, dtype=torch.int32), visible=torch.ones(3, dtype=torch.int32), top_k=4) | change
    with pytest.raises(ValueError, match=words):
        indexer_topk(**arguments)


@pytest.mark.parametrize("backend", ["torch", "triton"])  # both ways ask before anything else happens
@pytest.mark.parametrize("change, words", [
    (dict(keys=torch.zeros(3)), "keys must be .tokens, width. float32 or float16 or bfloat16 on cpu; got .3,."),
    (dict(keys=torch.zeros(3, WIDTH, dtype=torch.int32)), "keys must be .*torch.int32"),
    (dict(slots=torch.zeros(2, dtype=torch.int64)), "slots must be .3,. int32 or int64 on cpu; got .2,."),
    (dict(slots=torch.zeros(3, dtype=torch.int64, device="meta")), "slots must be .* on meta"),
    *[(dict(slots=torch.zeros(3, dtype=dtype)), f"slots must be .*{dtype}") for dtype in (torch.float32, torch.bool, torch.uint8, torch.int16)],
])
def test_keys_and_slots_that_do_not_belong_together_are_named(change, words, backend):
    arguments = dict(keys=torch.zeros(3, WIDTH), pages=torch.zeros(2, 4, WIDTH + 4, dtype=torch.uint8), slots=torch.zeros(3, dtype=torch.int64)) | change
    with pytest.raises(ValueError, match=words):
        append_indexer_keys(**arguments, backend=backend)

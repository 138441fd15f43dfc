"""Sparse MLA decoding, kernel (in Triton's interpreter, or on a card) and plain torch, against float64 over the dequantised rows.

Only what a list names is ever written: all else in the pool, block 0 included, is NaN bytes, so that a stray read shows. The kernel runs
before the oracle, so that reused memory cannot hold the answer. Errors are relative to the largest number of the result.
"""
import itertools

import pytest
import torch

from kernel_harness import interpreted
from minengine.kv.rows import row_format
from minkernels.sparse_mla import choose_splits, sparse_mla_decode

FORMATS = ("nvfp4_fp8_ds_mla", "fp8", "fp8_ds_mla", "bfloat16", "float32")
PATTERNS = ("none", "scattered", "tail", "all", "front")
# float16 operands: weights rounded to 2^-12, the result to 2^-11 of itself. The interpreter truncates to bfloat16: 2^-8.
LEVELS = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def case(name, rank=32, rope=16, tokens=2, heads=8, entries=20, block_size=4, dtype=torch.float16, slot_dtype=torch.int32, pattern="scattered",
         seed=0, device="cpu", lists=None):
    """(q, pages, slots), and (latent, rope) of every slot in float64, NaN where nothing was written."""
    torch.manual_seed(seed)
    fmt = row_format(name, rank, rope)
    blocks = max(3, -(-tokens * entries // (2 * block_size)) + 1)
    if lists is None:
        lists = torch.randint(block_size, blocks * block_size, (tokens, entries))  # some twice; block 0 is nobody's
        invalid = {"none": torch.zeros(tokens, entries), "all": torch.ones(tokens, entries), "scattered": torch.rand(tokens, entries) < 0.4,
                   "tail": torch.arange(entries) >= torch.randint(0, entries + 1, (tokens, 1)),
                   "front": torch.arange(entries) < torch.randint(0, entries + 1, (tokens, 1))}[pattern].bool()
        ends = torch.iinfo(slot_dtype)
        wrong = torch.tensor([-1, -1, blocks * block_size, ends.max, ends.min])
        lists = torch.where(invalid, wrong[torch.randint(0, len(wrong), lists.shape)], lists)
    used = lists[(lists >= 0) & (lists < blocks * block_size)].unique()
    group = torch.exp2(torch.randint(-3, 2, (len(used), -(-rank // 16)))).repeat_interleave(16, dim=1)[:, :rank]  # every group has a size of its own
    packed = fmt.quantize(torch.randn(len(used), rank) * group, torch.randn(len(used), rope))
    pool = torch.full((blocks, 2, block_size + 1, packed.shape[1] + 3), 0x7F, dtype=torch.uint8) if packed.dtype == torch.uint8 else \
        torch.full((blocks, 2, block_size + 1, packed.shape[1] + 3), float("nan"), dtype=packed.dtype)
    pages = pool.to(device)[:, 1, :block_size, 1 : 1 + packed.shape[1]]  # one of two layers of a block-major pool, blocks not a whole number of rows
    pages[(used // block_size).to(device), (used % block_size).to(device)] = packed.to(device)
    rows = torch.full((blocks * block_size, rank + rope), float("nan"), dtype=torch.float64)
    rows[used] = torch.cat(fmt.dequantize(packed, torch.float32), dim=-1).double()
    q = (torch.randn(tokens, heads, rank + rope) * 2 * (rank + rope) ** -0.5).to(dtype)
    return q.to(device), pages, lists.to(slot_dtype).to(device), rows


def oracle(q, slots, rows, rank):
    """Float64, a token at a time: (T, H, R) and (T, H)."""
    q, slots = q.double().cpu(), slots.long().cpu()
    out, lse = torch.zeros(*q.shape[:2], rank, dtype=torch.float64), torch.full(q.shape[:2], float("inf"), dtype=torch.float64)
    for t in range(len(q)):
        listed = rows[[s for s in slots[t].tolist() if 0 <= s < len(rows)]]
        if len(listed):
            scores = q[t] @ listed.T
            out[t], lse[t] = scores.softmax(-1) @ listed[:, :rank], scores.logsumexp(-1)
    return out, lse


def errors(got, want, context=""):
    """Largest error of the output, relative to its largest number, and of lse; infinities must be in the same places."""
    out, lse = (x.double().cpu() for x in got)
    assert out.shape == want[0].shape and torch.equal(lse.isinf(), want[1].isinf()), f"{context}: shapes {out.shape}, {want[0].shape}, lse {lse}, {want[1]}"
    seen = ~want[1].isinf()
    assert not out[~seen].any(), f"{context}: a row without entries is not 0"
    if not seen.any():
        return 0.0, 0.0
    return ((out - want[0]).abs().max() / want[0].abs().max()).item(), (lse - want[1])[seen].abs().max().item()


def check(name, options, **arguments):
    """Run one case; its error."""
    q, pages, slots, rows = case(name, **arguments)
    rank = arguments.get("rank", 32)
    got = sparse_mla_decode(q, pages, slots, rank, name, **options)
    error, lse_error = errors(got, oracle(q, slots, rows, rank), f"{name} {options} {arguments}")
    assert got[0].dtype == q.dtype and got[1].dtype == torch.float32, f"{got[0].dtype} {got[1].dtype}"
    level = LEVELS[q.dtype]
    if name == "float32" and q.dtype != torch.float32:  # rows rounded to float16 too
        level = max(level, 4e-3)
    assert error < level and lse_error < level, f"{name} {options} {arguments}: {error:.2e}, lse {lse_error:.2e}"
    return error


# --- the kernel, in the interpreter -------------------------------------------------------------------------

def check_drawn_cases(name):
    from hypothesis import Phase, given, settings, strategies as st

    @settings(max_examples=10, deadline=None, phases=(Phase.reuse, Phase.generate))  # making a failure small takes minutes in the interpreter
    @given(shape=st.sampled_from([(32, 16), (144, 6)]), tokens=st.integers(1, 2), heads=st.sampled_from([1, 8, 16, 20]),
           entries=st.one_of(st.integers(1, 70), st.just(150)), block_size=st.sampled_from([1, 3, 16]), dtype=st.sampled_from(list(LEVELS)),
           slot_dtype=st.sampled_from([torch.int32, torch.int64]), pattern=st.sampled_from(PATTERNS), seed=st.integers(0, 99),
           num_splits=st.sampled_from([None, 1, 2, 3, 5]), one_launch=st.booleans())
    def draw(shape, num_splits, one_launch, **arguments):
        check(name, dict(num_splits=num_splits, one_launch=one_launch, backend="triton"), rank=shape[0], rope=shape[1], **arguments)

    draw()


@pytest.mark.parametrize("name", FORMATS)
def test_drawn_cases(name):
    interpreted(check_drawn_cases, name)


@pytest.mark.parametrize("name, dtype", [*((name, torch.float16) for name in FORMATS), ("nvfp4_fp8_ds_mla", torch.float32)])
def test_the_full_size_row(name, dtype):
    """512 + 64, whose scales are interleaved in four bits and four in fp8_ds_mla; three tiles, so that sums are rescaled."""
    interpreted(check_one, name, dict(num_splits=1, backend="triton"), dict(rank=512, rope=64, tokens=1, heads=16, entries=140, block_size=16, dtype=dtype))


def check_one(name, options, arguments):
    return check(name, options, **arguments)


@pytest.mark.parametrize("name, heads, block_size", [("nvfp4_fp8_ds_mla", 16, 16), ("fp8_ds_mla", 8, 256), ("fp8", 128, 64), ("nvfp4_fp8_ds_mla", 64, 1024)])
def test_a_list_as_long_as_glm_hands_out(name, heads, block_size):
    """2,048 entries, some of them none, of blocks small and large, split as the kernel would by itself."""
    interpreted(check_one, name, dict(backend="triton"), dict(rank=512, rope=64, tokens=1, heads=heads, entries=2048, block_size=block_size))


def test_many_heads():
    interpreted(check_one, "nvfp4_fp8_ds_mla", dict(backend="triton"), dict(heads=128, tokens=1, entries=33))


def check_boundaries():
    """Neighbouring positions of a sequence whose blocks lie anywhere: the boundary falls before, within and after the list, and inside a tile."""
    for start, entries in itertools.product(range(5), (1, 4, 7)):
        positions = start + torch.arange(entries)
        table = torch.tensor([3, 1, 4])
        lists = (table[positions // 4] * 4 + positions % 4).unsqueeze(0)
        # five blocks: case() makes as many as tokens * entries asks for, so the list is padded with entries that are none
        padded = torch.full((1, 40), -1)
        padded[:, 5 : 5 + entries] = lists
        check("nvfp4_fp8_ds_mla", dict(num_splits=2, backend="triton"), tokens=1, entries=40, lists=padded)


def test_a_page_boundary_in_every_place():
    interpreted(check_boundaries)


def check_splits():
    """Every number of parts, with empty ones too; one launch or two, and one launch again, give the same bits; counters end as zeros."""
    q, pages, slots, rows = case("nvfp4_fp8_ds_mla", heads=8, entries=70, pattern="tail", seed=3)
    want = None
    for splits in (1, 2, 3, 5, 11):  # 11 parts of 7 entries: the last is empty
        one, again, two = (sparse_mla_decode(q, pages, slots, 32, "nvfp4_fp8_ds_mla", num_splits=splits, one_launch=launches, backend="triton")
                           for launches in (True, True, False))
        want = want or oracle(q, slots, rows, 32)
        assert max(errors(one, want, f"{splits} splits")) < LEVELS[q.dtype], f"{splits} splits: {errors(one, want)}"
        for other in (again, two):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]), f"{splits} splits: a launch gave other bits"
    from minkernels.sparse_mla_kernel import _counters
    assert not _counters(q.device).any(), "a counter was not set back"


def test_splits_and_their_merge():
    interpreted(check_splits)


def check_corners(backend):
    for name, entries, tokens in itertools.product(("nvfp4_fp8_ds_mla", "float32"), (0, 1), (0, 2)):
        check(name, dict(backend=backend), entries=entries, tokens=tokens, pattern="none")
    for num_splits, slot_dtype in itertools.product((1, 3), (torch.int32, torch.int64)):
        check("bfloat16", dict(num_splits=num_splits, backend=backend), pattern="all", entries=70, slot_dtype=slot_dtype)
    # A list whose middle is empty for longer than a tile, and one whose every other part is.
    lists = torch.full((2, 200), -1)
    lists[0, :3], lists[0, 190:], lists[1, 100] = torch.arange(5, 8), torch.arange(5, 15), 9
    for num_splits in (1, 2, 4):
        check("float32", dict(num_splits=num_splits, backend=backend), entries=200, lists=lists)
    # Strided lists and queries.
    q, pages, slots, rows = case("fp8", heads=16)
    wide_slots, wide_q = torch.stack((slots, slots.flip(1)), dim=2), torch.stack((q, -q), dim=1).transpose(1, 2)
    got = sparse_mla_decode(wide_q[:, :, 1], pages, wide_slots[:, :, 1], 32, "fp8", backend=backend)
    assert max(errors(got, oracle(-q, slots, rows, 32))) < 1e-3, f"strided: {errors(got, oracle(-q, slots, rows, 32))}"
    # One block, and one row, in every place of a pool: strides of 0.
    q, pages, slots, rows = case("fp8")
    row = int(slots[(slots >= 0) & (slots < len(rows))][0])
    for given in (pages[row // 4].expand(9, -1, -1)[:, row % 4 : row % 4 + 1], pages[row // 4, row % 4].expand(9, 4, -1)):
        got = sparse_mla_decode(q, given, slots, 32, "fp8", backend=backend)
        error = errors(got, oracle(q, slots, rows[row].expand(9 * given.shape[1], -1), 32))
        assert max(error) < 1e-3, f"strides {given.stride()}: {error}"
    # A pool without rows.
    q, pages, slots, _ = case("nvfp4_fp8_ds_mla")
    for empty, path in itertools.product((pages[:0], pages[:, :0]), ("native", "staged")):
        out, lse = sparse_mla_decode(q, empty, slots, 32, "nvfp4_fp8_ds_mla", path=path, backend=backend)
        assert not out.any() and (lse == float("inf")).all(), f"{path}, pages {empty.shape}: {out} {lse}"


def check_nan(backend, device="cpu"):
    """A query that is NaN gives NaN, never what a query without entries gives; one cached NaN does so too, wherever in the list its part is."""
    for dtype, options in itertools.product((torch.float16, torch.float32), (dict(num_splits=1), dict(num_splits=3), dict(num_splits=3, one_launch=False))):
        q, pages, slots, rows = case("float32", tokens=5, entries=200, pattern="none", dtype=dtype, device=device)
        slots[1], slots[2, 70:], slots[3, :130], slots[4, 150:] = -1, -1, -1, 1  # none; the first part only; the last only; NaN rows at the end
        q[:4, 2, 5] = float("nan")
        out, lse = sparse_mla_decode(q, pages, slots, 32, "float32", backend=backend, **options)
        nan = torch.zeros(5, 8, dtype=torch.bool, device=device)
        nan[[0, 2, 3], 2] = nan[4] = True
        assert torch.equal(lse.isnan(), nan) and torch.equal(out.isnan(), nan.unsqueeze(-1).expand_as(out)), f"{dtype} {options}: {lse}"
        assert not out[1].any() and (lse[1] == float("inf")).all() and lse[~nan].isinf().sum() == 8, f"{dtype} {options}: {lse}"


def test_nan_is_told_from_no_entry():
    check_nan("torch")
    interpreted(check_nan, "triton")


def test_corners_of_the_kernel():
    interpreted(check_corners, "triton")


def check_staged(backend):
    """The second rounding, to FP8, is the path's own: the oracle reads rows that were rounded so."""
    q, pages, slots, rows = case("nvfp4_fp8_ds_mla")
    got = sparse_mla_decode(q, pages, slots, 32, "nvfp4_fp8_ds_mla", path="staged", backend=backend)
    want = oracle(q, slots, rows.clamp(-448, 448).to(torch.float8_e4m3fn).double(), 32)
    assert max(errors(got, want)) < LEVELS[q.dtype], f"{errors(got, want)}"


def test_staged_rows_on_the_kernel():
    interpreted(check_staged, "triton")


# --- plain torch ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", FORMATS)
def test_plain_torch(name):
    for seed, (pattern, dtype) in enumerate(itertools.product(PATTERNS, LEVELS)):
        shape = ((32, 16), (144, 6), (512, 64))[seed % 3]
        check(name, dict(backend="torch"), rank=shape[0], rope=shape[1], pattern=pattern, dtype=dtype, seed=seed, tokens=5,
              slot_dtype=(torch.int32, torch.int64)[seed % 2])


def test_corners_of_plain_torch():
    check_corners("torch")
    check_staged("torch")


def test_plain_torch_takes_lists_in_any_order_of_memory():
    q, pages, slots, rows = case("fp8")
    got = sparse_mla_decode(q, pages, slots.t().contiguous().t(), 32, "fp8", backend="torch")
    assert (slots < 0).any() and max(errors(got, oracle(q, slots, rows, 32))) < 1e-3


def test_plain_torch_in_runs_and_over_blocks_of_whole_rows(monkeypatch):
    """A run of queries at a time gives what all at once do; dense pages, and pages among those of other layers, take the short way."""
    q, pages, slots, rows = case("nvfp4_fp8_ds_mla", tokens=7)
    want = oracle(q, slots, rows, 32)
    dense = pages.contiguous()
    layers = torch.full((len(pages), 3, *pages.shape[1:]), 0x7F, dtype=torch.uint8)
    layers[:, 1] = pages
    for run_values in (1, 3000, 1 << 20):
        monkeypatch.setattr("minkernels.sparse_mla.RUN_VALUES", {"cpu": run_values})
        for given in (pages, dense, layers[:, 1]):
            assert max(errors(sparse_mla_decode(q, given, slots, 32, "nvfp4_fp8_ds_mla"), want)) < 1e-3


# --- choices and refusals -------------------------------------------------------------------------------------

def test_splits_fill_the_card_and_no_more():
    assert choose_splits(programs=1, tiles=1, sms=132) == 1
    assert choose_splits(programs=132, tiles=32, sms=132) == 1
    assert choose_splits(programs=1, tiles=32, sms=132) == 32
    assert choose_splits(programs=16, tiles=32, sms=132) == 8  # 128 programs of 4 tiles in one wave
    assert choose_splits(programs=0, tiles=0, sms=132) == 1
    for programs, tiles, sms in itertools.product((1, 3, 8, 33, 64, 100, 131, 133, 400, 5000), (1, 2, 7, 16, 64, 1000), (4, 132, 148)):
        splits = choose_splits(programs, tiles, sms)
        assert 1 <= splits <= min(tiles, 64) and splits & splits - 1 == 0
        if splits > 1:  # cutting was worth it: fewer tiles one after another than uncut
            assert -(-programs * splits // sms) * -(-tiles // splits) < -(-programs // sms) * tiles


@pytest.mark.parametrize("change, words", [
    (dict(q=torch.zeros(2, 4, 30)), "q must be"),
    (dict(q=torch.zeros(2, 4, 48, dtype=torch.float64)), "float64"),
    (dict(q=torch.zeros(2, 48)), "q must be"),
    (dict(pages=torch.zeros(2, 4, 33, dtype=torch.uint8)), "34"),
    (dict(pages=torch.zeros(2, 4, 34)), "float32"),
    (dict(pages=torch.zeros(2, 4, 68, dtype=torch.uint8)[..., ::2]), "contiguous rows"),
    (dict(slots=torch.zeros(2, 5)), "slots must be"),
    (dict(slots=torch.zeros(3, 5, dtype=torch.int32)), "slots must be"),
    (dict(slots=torch.zeros(2, 5, dtype=torch.int32, device="meta")), "one device"),
    (dict(row_format="int4"), "row_format='int4'"),
    (dict(kv_lora_rank=24), "multiple of 16"),
    (dict(path="direct"), "path='direct'"),
    (dict(path="staged", row_format="fp8", pages=torch.zeros(2, 4, 48, dtype=torch.uint8)), "path='staged'"),
    (dict(num_splits=0), "num_splits=0"),
    (dict(num_splits=2.5), "num_splits=2.5: use a whole number of at least 1"),
    (dict(num_splits=True), "num_splits=True"),
    (dict(kv_lora_rank=32.0), "kv_lora_rank=32.0: use a whole number of at least 1"),
    *[(dict(slots=torch.zeros(2, 5, dtype=dtype)), f"slots must be .*{dtype}") for dtype in (torch.bool, torch.uint8, torch.int16)],
    (dict(backend="cuda"), "backend='cuda'"),
    (dict(backend="triton"), "needs data on a GPU"),
])
def test_wrong_arguments_are_named(change, words):
    arguments = dict(q=torch.zeros(2, 4, 48), pages=torch.zeros(2, 4, 34, dtype=torch.uint8), slots=torch.zeros(2, 5, dtype=torch.int32),
                     kv_lora_rank=32, row_format="nvfp4_fp8_ds_mla") | change
    with pytest.raises(ValueError, match=words):
        sparse_mla_decode(**arguments)


# --- on a card ------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_the_kernel_on_a_gpu(name, heads):
    for dtype, (tokens, entries) in itertools.product(LEVELS, ((1, 2048), (5, 300), (40, 64))):
        for options in (dict(), dict(num_splits=1), dict(num_splits=3, one_launch=False)):
            check(name, options, rank=512, rope=64, tokens=tokens, heads=heads, entries=entries, block_size=64, dtype=dtype, device="cuda", seed=heads)


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_one_launch():
    """The counters set themselves back, so each replay merges anew, of new queries too."""
    q, pages, slots, rows = case("nvfp4_fp8_ds_mla", rank=512, rope=64, tokens=4, heads=16, entries=512, block_size=64, device="cuda")
    run = lambda: sparse_mla_decode(q, pages, slots, 512, "nvfp4_fp8_ds_mla", num_splits=8)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(3):
        q.neg_()
        graph.replay()
        assert max(errors(got, oracle(q, slots, rows, 512))) < LEVELS[q.dtype]


@pytest.mark.gpu
def test_nan_on_a_gpu():
    check_nan("triton", "cuda")


@pytest.mark.gpu
def test_staged_rows_on_a_gpu():
    q, pages, slots, rows = case("nvfp4_fp8_ds_mla", rank=512, rope=64, tokens=4, heads=64, entries=512, block_size=64, device="cuda")
    got = sparse_mla_decode(q, pages, slots, 512, "nvfp4_fp8_ds_mla", path="staged")
    assert max(errors(got, oracle(q, slots, rows.clamp(-448, 448).to(torch.float8_e4m3fn).double(), 512))) < LEVELS[q.dtype]

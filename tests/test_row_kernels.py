"""Kernels that write rows into pages and read them back: bytes and values equal to plain torch's, which `test_rows` holds to the definitions."""
import math

import pytest
import torch

from kernel_harness import interpreted
from minengine.arithmetic import row_bytes
from minengine.kv.rows import row_format
from minkernels.rows import ROW_FORMATS, gather_dequant, gather_to_fp8, pack, quantize_rows
from row_reference import hard_values

SHAPES = [(512, 64), (32, 16), (144, 6), (16, 8)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCKS, BLOCK_SIZE = 5, 4
INVALID = [-1, BLOCKS * BLOCK_SIZE, torch.iinfo(torch.int32).max, torch.iinfo(torch.int32).min]


def tokens(rank: int, rope: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens in which every group has its own magnitude, then the corners; as parts of one wider tensor, so that strides are not widths."""
    values = torch.stack([hard_values(rank + 16 * -(-rope // 16), seed) for seed in range(9)])
    values[1] *= 2.0**-130  # subnormals, below every scale's floor
    values[2] *= 2.0**100
    values[3] = 0.0
    values[3, ::2] = -0.0
    values[4, :4] = torch.tensor([math.inf, -math.inf, torch.finfo(torch.float32).max, -0.0])
    values[4, rank : rank + 2] = torch.tensor([-math.inf, 3e38])
    values[5] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(rank + 64)[: values.shape[1]]
    values[5] *= 1 + torch.arange(values.shape[1]) // 16 % 8 / 8  # ties at scales whose reciprocals are inexact
    values[6, :16] = torch.tensor([448 * 4.0] + [0.1] * 15)  # amax / 448 is a power of two already
    values[7] = torch.arange(values.shape[1]) * 2.0**-12  # E4M3's subnormals and their ties
    values = values.to(dtype)
    return values[:, :rank], values[:, rank : rank + rope]


def blank_pages(row: int, device: str = "cpu") -> torch.Tensor:
    """A layer's pages in a block-major pool of three layers, an odd byte in, every byte that of a NaN."""
    storage = torch.full((BLOCKS * 3 * BLOCK_SIZE * row + 1,), 0x7F, dtype=torch.uint8, device=device)
    return storage[1:].view(BLOCKS, 3, BLOCK_SIZE, row)[:, 1]


def pool_of(pages: torch.Tensor) -> torch.Tensor:
    """Every byte of the storage that `pages` is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=pages.device).set_(pages.untyped_storage())


def check_quantize(name: str, rank: int, rope: int, dtype: torch.dtype, device: str = "cpu") -> None:
    latent, rope_key = (part.to(device) for part in tokens(rank, rope, dtype))
    pages = blank_pages(row_bytes(name, rank, rope).total, device)
    slots = torch.tensor([11, -1, 0, 19, INVALID[1], 6, 7, 12, INVALID[2]][: len(latent)], dtype=torch.int32, device=device)
    wanted = blank_pages(pages.shape[-1], device)
    quantize_rows(latent, rope_key, pages, slots, name, backend="triton")
    rows = row_format(name, rank, rope).quantize(latent, rope_key)
    for slot, row in zip(slots.tolist(), rows):
        if 0 <= slot < BLOCKS * BLOCK_SIZE:
            wanted[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = row
    differs = (pool_of(pages) != pool_of(wanted)).nonzero().flatten()
    assert not len(differs), (name, rank, dtype, differs[:5].tolist(), pool_of(pages)[differs[:5]].tolist(), pool_of(wanted)[differs[:5]].tolist())
    # Slots of the other kind, tokens in a transposed order of memory, and no tokens at all.
    again = blank_pages(pages.shape[-1], device)
    quantize_rows(latent.t().contiguous().t(), rope_key, again, slots.long(), name, backend="triton")
    quantize_rows(latent[:0], rope_key[:0], again, slots[:0], name, backend="triton")
    assert torch.equal(pool_of(again), pool_of(wanted)), "int64 slots, transposed tokens"


def filled_pages(name: str, rank: int, rope: int, device: str = "cpu") -> torch.Tensor:
    """Pages in which all slots but the last hold rows of every magnitude; the last is NaN bytes."""
    pages = blank_pages(row_bytes(name, rank, rope).total, device)
    parts = [tokens(rank, rope, torch.float32)[part].repeat(3, 1)[: BLOCKS * BLOCK_SIZE - 1] for part in (0, 1)]
    rows = pack(*parts, name).to(device)
    for slot, row in enumerate(rows):
        pages[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = row
    return pages


def listed(dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Slots out of order, one twice, and every kind of invalid entry; not contiguous."""
    slots = torch.tensor([11, 0, *INVALID, 5, 5, 18, 3, torch.iinfo(dtype).min, 4, 8, 9, 1, 2], dtype=dtype, device=device)
    return torch.stack((slots, slots), dim=1)[:, 0]


def check_gather(name: str, rank: int, rope: int, device: str = "cpu") -> None:
    pages = filled_pages(name, rank, rope, device)
    for dtype, slot_dtype in zip(DTYPES, (torch.int32, torch.int64, torch.int32)):
        slots = listed(slot_dtype, device)
        got = gather_dequant(pages, slots, name, rank, rope, dtype, backend="triton")
        for g, w in zip(got, gather_dequant(pages.cpu(), slots.cpu(), name, rank, rope, dtype, backend="torch")):
            differs = (g.cpu() != w).nonzero()
            assert g.dtype == dtype and not len(differs), (name, rank, dtype, [(i, j, g[i, j].item(), w[i, j].item()) for i, j in differs[:3].tolist()])
    assert [t.shape for t in gather_dequant(pages, slots[:0], name, rank, rope, backend="triton")] == [(0, rank), (0, rope)]


def check_gather_to_fp8(rank: int, rope: int, device: str = "cpu") -> None:
    pages = filled_pages("nvfp4_fp8_ds_mla", rank, rope, device)
    for slot_dtype in (torch.int32, torch.int64):
        slots = listed(slot_dtype, device)
        got = gather_to_fp8(pages, slots, rank, rope, backend="triton").cpu()
        wanted = gather_to_fp8(pages.cpu(), slots.cpu(), rank, rope, backend="torch")
        assert torch.equal(got, wanted), (rank, slot_dtype, (got != wanted).nonzero()[:3])
    assert gather_to_fp8(pages, slots[:0], rank, rope, backend="triton").shape == (0, rank + rope)


def check_every_product() -> None:
    """All 16 codes under all 127 scales: the fp8 byte is that of the value that the row holds."""
    codes = torch.arange(16, dtype=torch.uint8)
    scales = torch.arange(127, dtype=torch.uint8)
    rows = torch.zeros(127, 8 + 2 + 1, dtype=torch.uint8)
    rows[:, :8] = codes[0::2] | codes[1::2] << 4
    rows[:, 8:10] = torch.stack((scales, scales | 128), dim=1)
    rows[:, 10] = scales
    slots = torch.arange(127)
    got = gather_to_fp8(rows.unsqueeze(1), slots, 16, 2, backend="triton")
    latent, rope = row_format("nvfp4_fp8_ds_mla", 16, 2).dequantize(rows)
    wanted = row_format("fp8", 16, 2).quantize(latent, rope)
    assert latent.unique().numel() > 300 and torch.equal(got, wanted), (got != wanted).nonzero()[:5]


def check_empty(backend: str, device: str = "cpu") -> None:
    """Pools of no blocks or of blocks of no slots give zeros and take nothing."""
    for blocks, block_size in ((0, 4), (4, 0)):
        slots = torch.tensor([0, 5, -1], device=device)
        for name in ROW_FORMATS:
            pages = torch.zeros(blocks, block_size, row_bytes(name, 32, 16).total, dtype=torch.uint8, device=device)
            quantize_rows(torch.ones(3, 32, device=device), torch.ones(3, 16, device=device), pages, slots, name, backend=backend)
            read = gather_dequant(pages, slots, name, 32, 16, torch.bfloat16, backend=backend)
            assert [(t.shape, t.dtype, bool(t.any())) for t in read] == [((3, w), torch.bfloat16, False) for w in (32, 16)], (name, blocks, read)
        pages = torch.zeros(blocks, block_size, 34, dtype=torch.uint8, device=device)
        got = gather_to_fp8(pages, slots, 32, 16, backend=backend)
        assert got.shape == (3, 48) and got.dtype == torch.uint8 and not got.any(), (blocks, got)


def test_pools_without_rows():
    check_empty("torch")
    interpreted(check_empty, "triton")


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_rows_are_quantised_into_their_slots_to_the_byte(name):
    for rank, rope in SHAPES:
        for dtype in DTYPES if rank == 144 else (torch.float32, torch.bfloat16):
            interpreted(check_quantize, name, rank, rope, dtype)


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_listed_rows_come_back_to_the_bit(name):
    for rank, rope in SHAPES:
        interpreted(check_gather, name, rank, rope)


def test_four_bit_rows_become_fp8_rows():
    interpreted(check_every_product)
    for rank, rope in SHAPES:
        interpreted(check_gather_to_fp8, rank, rope)


@pytest.mark.gpu
@pytest.mark.parametrize("rank, rope", SHAPES)
def test_rows_on_a_gpu(rank, rope):
    for name in ROW_FORMATS:
        for dtype in DTYPES:
            check_quantize(name, rank, rope, dtype, "cuda")
        check_gather(name, rank, rope, "cuda")
    check_gather_to_fp8(rank, rope, "cuda")
    check_empty("triton", "cuda")


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_plain_torch_writes_and_reads_what_the_row_format_does(name):
    """Listed rows equal the format's own reading of them, every entry outside the pool is zero, and nothing else is written."""
    rank, rope = 144, 6
    latent, rope_key = tokens(rank, rope, torch.float32)
    rows = row_format(name, rank, rope).quantize(latent, rope_key)
    slots = torch.tensor([11, -1, 0, 19, INVALID[1], 6, 7, 12, INVALID[2]])
    for pages in (blank_pages(rows.shape[1]), torch.full((BLOCKS, BLOCK_SIZE, rows.shape[1]), 0x7F, dtype=torch.uint8)):
        quantize_rows(latent, rope_key, pages, slots, name)
        assert int((pool_of(pages) != 0x7F).sum()) == int((rows[[0, 2, 3, 5, 6, 7]] != 0x7F).sum())
        read = gather_dequant(pages, slots, name, rank, rope, torch.float32)
        for i, slot in enumerate(slots.tolist()):
            inside = 0 <= slot < BLOCKS * BLOCK_SIZE
            for part, wanted in zip(read, row_format(name, rank, rope).dequantize(rows[i])):
                assert torch.equal(part[i], wanted if inside else torch.zeros_like(wanted)), (i, slot)


@pytest.mark.parametrize("change, words", [
    (dict(pages=torch.zeros(2, 4, 351, dtype=torch.uint8)), "352"),
    (dict(pages=torch.zeros(2, 4, 352)), "float32"),
    (dict(pages=torch.zeros(2, 4, 704, dtype=torch.uint8)[..., ::2]), "contiguous rows"),
    (dict(row_format="fp8_ds_mla"), "656"),
    (dict(row_format="int4"), "row_format='int4': use one of nvfp4_fp8_ds_mla, fp8, fp8_ds_mla"),
    (dict(kv_lora_rank=24), "kv_lora_rank=24: .* multiple of 16"),
    (dict(kv_lora_rank=512.0), "kv_lora_rank=512.0: use a whole number"),
    (dict(qk_rope_head_dim=0), "qk_rope_head_dim=0: use a whole number"),
    (dict(dtype=torch.float64), "dtype=torch.float64: use torch.float32, torch.float16 or torch.bfloat16"),
    (dict(dtype=torch.float8_e4m3fn), "dtype=torch.float8_e4m3fn"),
    (dict(slots=torch.zeros(1, 1, dtype=torch.int32)), "slots must be .entries,. int32 or int64 on cpu; got .1, 1. torch.int32 on cpu"),
    (dict(slots=torch.zeros(1, dtype=torch.int32, device="meta")), "slots must be .entries,. int32 or int64 on cpu; got .1,. torch.int32 on meta"),
    (dict(backend="cuda"), "backend='cuda'"),
])
def test_wrong_arguments_are_named(change, words):
    arguments = dict(pages=torch.zeros(2, 4, 352, dtype=torch.uint8), slots=torch.zeros(1, dtype=torch.int32)) | change
    with pytest.raises(ValueError, match=words):
        gather_dequant(**arguments)


@pytest.mark.parametrize("backend", ["torch", "triton"])  # both ways ask before anything else happens
@pytest.mark.parametrize("change, words", [
    (dict(latent=torch.zeros(3, 32, dtype=torch.int32)), "latent must be .tokens, kv_lora_rank. float32 or float16 or bfloat16 on cpu; got .3, 32. torch.int32"),
    (dict(latent=torch.zeros(32)), "latent must be"),
    (dict(rope=torch.zeros(2, 16)), "rope must be .3, qk_rope_head_dim. .*; got .2, 16."),
    (dict(rope=torch.zeros(3, 16, device="meta")), "rope must be .* on cpu; got .* on meta"),
    (dict(slots=torch.zeros(2, dtype=torch.int64)), "slots must be .3,. int32 or int64 on cpu; got .2,. torch.int64"),
    (dict(slots=torch.zeros(4, dtype=torch.int64)), "slots must be .3,."),
    *[(dict(slots=torch.zeros(3, dtype=dtype)), f"slots must be .*{dtype}") for dtype in (torch.float32, torch.bool, torch.uint8, torch.int16)],
])
def test_tokens_and_slots_that_do_not_belong_together_are_named(change, words, backend):
    arguments = dict(latent=torch.zeros(3, 32), rope=torch.zeros(3, 16), pages=torch.zeros(2, 4, 34, dtype=torch.uint8),
                     slots=torch.zeros(3, dtype=torch.int64), row_format="nvfp4_fp8_ds_mla", backend=backend) | change
    with pytest.raises(ValueError, match=words):
        quantize_rows(**arguments)

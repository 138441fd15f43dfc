"""The four steps of chapter 8's kernel against attention in float64, over pools whose unlisted rows are NaN."""
import ctypes
import inspect
import mmap
import signal
import sys
from pathlib import Path

import pytest
import torch

from kernel_harness import interpreted, run_python
from minkernels.rows import pack, unpack

FORMAT = "nvfp4_fp8_ds_mla"
CASES = [(16, 512, 64, 41), (32, 64, 16, 50), (16, 64, 16, 1), (16, 32, 32, 16)]  # heads, rank, rope, list: ragged, or a tile


def problem(heads: int, rank: int, rope: int, entries: int, empty: bool = True):
    """q, float32 and packed pools, their rows as they read back, slots. Every row that no slot names is NaN; with `empty` a whole tile is -1."""
    generator = torch.Generator().manual_seed(entries + rank)
    rows = 2 * entries + 3
    q = torch.randn(heads, rank + rope, generator=generator) * 2 / (rank + rope) ** 0.5
    latent, key = torch.randn(rows, rank, generator=generator), torch.randn(rows, rope, generator=generator)
    slots = (1 + torch.randperm(rows - 1, generator=generator))[:entries].int()
    packed = pack(latent, key, FORMAT)
    back = torch.cat(unpack(packed, FORMAT, rank, rope), dim=1)
    unlisted = torch.ones(rows, dtype=torch.bool)
    if empty and entries > 16:
        slots[16:32], slots[3] = -1, -1
    unlisted[slots[slots >= 0].long()] = False
    plain = torch.cat((latent, key), dim=1).masked_fill(unlisted[:, None], torch.nan)
    return q, plain, packed.masked_fill(unlisted[:, None], 0x7F), back, slots


def attention(q, rows, slots, rank):
    """(H, R) in float64."""
    listed = rows[slots[slots >= 0].long()].double()
    return (q.double() @ listed.T).softmax(-1) @ listed[:, :rank]


def check_steps(device: str = "cpu") -> None:
    from minkernels import steps_kernel as steps

    for heads, rank, rope, entries in CASES:
        q, plain, packed, back, slots = (t.to(device) for t in problem(heads, rank, rope, entries, empty=False))
        got = steps.scores(q, plain, slots, rope)
        assert torch.allclose(got, q @ plain[slots.long()].T, rtol=0, atol=1e-5), (heads, rank, entries)
        q, plain, packed, back, slots = (t.to(device) for t in problem(heads, rank, rope, entries))
        for name, got, rows, limit in (("2", steps.attend(q, plain, slots, rope), plain, 1e-5),
                                       ("3", steps.attend_4bit(q, packed, slots, rope)[0], back, 2e-3),
                                       ("4", steps.attend_split(q, packed, slots, rope), back, 2e-3)):
            wanted = attention(q, rows, slots, rank)
            error = (got - wanted).abs().max() / wanted.abs().max()
            assert error < limit, (name, heads, rank, entries, float(error))


def check_splits() -> None:
    """However the list is dealt out, also where some programs have no entry at all."""
    from minkernels import steps_kernel as steps

    q, _, packed, back, slots = problem(16, 64, 16, 50)
    for programs in (1, 2, 3, 9):
        got = steps.attend_split(q, packed, slots, 16, programs=programs)
        assert torch.allclose(got.double(), attention(q, back, slots, 64), rtol=0, atol=2e-3), programs


def check_no_entry() -> None:
    from minkernels import steps_kernel as steps

    q, plain, packed, _, slots = problem(16, 64, 16, 20)
    nothing = torch.full_like(slots, -1)
    for got in (steps.attend(q, plain, nothing, 16), steps.attend_4bit(q, packed, nothing, 16)[0], steps.attend_split(q, packed, nothing, 16)):
        assert torch.equal(got, torch.zeros(16, 64)), got


def check_fetched() -> None:
    """An empty entry that reads row zero changes what is read and not what comes out."""
    from minkernels import steps_kernel as steps

    q, _, packed, _, slots = problem(16, 64, 16, 50)
    packed[0] = packed[slots[0]]
    (nothing, few), (row_zero, all_) = (steps.attend_4bit(q, packed, slots, 16, empty=empty) for empty in (-1, 0))
    assert torch.equal(nothing, row_zero) and (few, all_) == (50 - 17, 50), (few, all_)


def read_around_a_locked_row(step: str) -> None:
    """Runs a step over a pool whose row zero lies in memory that may not be read: a process that touches it dies."""
    from minkernels import steps_kernel as steps

    q, plain, packed, _, slots = problem(16, 64, 16, 50)
    rows = plain if step == "2" else packed
    data, page = rows.view(torch.uint8), mmap.PAGESIZE
    memory = mmap.mmap(-1, page + data.numel())
    pool = torch.frombuffer(memory, dtype=torch.uint8, count=data.numel(), offset=page - data.shape[1]).view(data.shape).copy_(data).view(rows.dtype)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(pool.data_ptr() - page + data.shape[1]), ctypes.c_size_t(page), 0) == 0
    {"2": lambda: steps.attend(q, pool, slots, 16), "4": lambda: steps.attend_split(q, pool, slots, 16),
     "3": lambda: steps.attend_4bit(q, pool, slots, 16), "3, row zero": lambda: steps.attend_4bit(q, pool, slots, 16, empty=0)}[step]()
    print("alive")


@pytest.mark.parametrize("check", [check_steps, check_splits, check_no_entry, check_fetched], ids=lambda check: check.__name__)
def test_the_steps_in_the_interpreter(check):
    interpreted(check)


@pytest.mark.skipif(sys.platform == "win32", reason="locks memory by mprotect; run it on Linux or macOS")
@pytest.mark.parametrize("step, ends", [("2", 0), ("3", 0), ("4", 0), ("3, row zero", -signal.SIGSEGV)])
def test_an_empty_entry_touches_no_memory(step, ends):
    code = f"import test_steps_kernel; test_steps_kernel.read_around_a_locked_row({step!r})"
    result = run_python("-c", code, TRITON_INTERPRET="1", PYTHONPATH=":".join([str(Path(__file__).parent), *sys.path]))
    assert result.returncode == ends and (result.stdout == "alive\n") == (ends == 0), result.stderr


@pytest.mark.gpu
def test_the_steps_on_a_gpu():
    check_steps("cuda")


def shapes() -> dict[str, tuple[int, int]]:
    """Lines of each step's kernel and of what it is made of, the head with its docstring aside, and the longest of them."""
    from minkernels import steps_kernel as steps

    names = ("list_tile", "query", "read", "dot", "online_softmax", "scores_kernel", "attend_kernel", "scale_columns", "attend_packed", "store_pairs",
             "attend_4bit_kernel", "attend_split_kernel")
    sources = {name: inspect.getsource(getattr(steps, name).fn) for name in names}
    shown = ("read", "online_softmax", "scores_kernel", "attend_kernel", "attend_packed", "attend_split_kernel")  # by the chapter
    return {name: (len(text.rpartition('"""')[2].splitlines()), max(map(len, text.splitlines())) if name in shown else 0)
            for name, text in sources.items()}


def test_each_step_can_be_read_at_a_glance():
    found = interpreted(shapes).values()
    assert max(lines for lines, _ in found) <= 30 and max(width for _, width in found) <= 84

"""A tier below an engine: the same answers, less to compute; nothing of another tenant, model or format, and nothing from damaged files."""
import os
import shutil

import pytest

from minengine import LLM, SamplingParams
from minengine.kv.tier_open import tier_folders

PROMPT = [(7 * i) % 250 + 1 for i in range(150)]
ANSWER = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
WAIT_S = 30.0


@pytest.fixture
def engine(tmp_path):
    """Engines of one machine, each as if in a process of its own: an empty pool, the same folders."""
    opened = []
    folders = tier_folders(str(tmp_path / "tier"))

    def make(*, host=0, disk=1 << 26, **options):
        options = {"block_size": 16, "num_gpu_blocks_override": 40, "num_threads": 1, "load_admission": "event", "model": "glm-mini", **options}
        opened.append(LLM(host_tier_bytes=host, disk_tier_bytes=disk, tier_path=str(tmp_path / "tier"), **options))
        return opened[-1]

    make.folders = folders
    yield make
    for one in opened:
        one._connector.tier.close()
    shutil.rmtree(folders["host"], ignore_errors=True)


def answer(llm, salt=None, prompt=PROMPT):
    """(the tokens, how many of the prompt were not computed); what it leaves is in the tiers when this returns."""
    out = llm.generate({"prompt_token_ids": prompt, "cache_salt": salt} if salt is not None else {"prompt_token_ids": prompt}, ANSWER)[0]
    assert llm._connector.tier.wait_idle(WAIT_S)
    return list(out.outputs[0].token_ids), out.num_cached_tokens


@pytest.mark.parametrize("where", ["host", "disk", "both"])
def test_a_restarted_engine_finds_what_it_had(engine, where):
    sizes = {"host": 1 << 26 if where != "disk" else 0, "disk": 1 << 26 if where != "host" else 0}
    first = engine(**sizes)
    expected, cached = answer(first)
    assert cached == 0
    again = engine(**sizes)
    assert answer(again) == (expected, 144)
    timeline = again.generate({"prompt_token_ids": PROMPT[:100]}, ANSWER)[0].metrics
    assert timeline is not None
    again.reset_prefix_cache()
    assert answer(again) == (expected, 144), "what the tiers have comes back when the device has forgotten it"


def test_workers_of_any_layout_share_and_those_of_another_row_format_do_not(engine):
    expected, _ = answer(engine(kv_cache_layout="LBNHC"))
    for layout in ("BLHNC", "LHBNC"):
        assert answer(engine(kv_cache_layout=layout)) == (expected, 144)
    assert answer(engine(kv_cache_dtype="bfloat16"))[1] == 0
    assert answer(engine(kv_cache_dtype="bfloat16"))[1] == 144
    assert answer(engine(block_size=32))[1] == 0


def test_tenants_find_their_own_only(engine):
    one, other = engine(), engine()
    expected, _ = answer(one, "a")
    assert answer(other, "b") == (expected, 0) and answer(other) == (expected, 0) and answer(other, "") == (expected, 0)
    assert answer(engine(), "a") == (expected, 144)


def test_damaged_files_cost_time_and_nothing_else(engine):
    expected, _ = answer(engine())
    files = sorted(entry.path for entry in os.scandir(engine.folders["disk"]) if entry.name.endswith(".kv"))
    assert len(files) == 9
    for i, path in enumerate(files):
        if i % 2:
            os.truncate(path, 100)
        else:
            with open(path, "r+b") as file:
                file.seek(5000)
                byte = file.read(1)[0]
                file.seek(5000)
                file.write(bytes([byte ^ 1]))
    again = engine()
    assert answer(again) == (expected, 0)
    assert again._connector.tier.tiers[0].counts.corrupt >= 1
    assert answer(engine()) == (expected, 144), "what was computed anew is stored anew"


def test_a_tier_too_small_for_the_history_gives_its_beginning_or_nothing(engine):
    first = engine()
    expected, _ = answer(first)
    size = next(entry.stat().st_size for entry in os.scandir(engine.folders["disk"]) if entry.name.endswith(".kv"))
    shutil.rmtree(engine.folders["disk"])
    small = engine(disk=4 * size)
    assert answer(small)[0] == expected
    small.reset_prefix_cache()
    tokens, cached = answer(small)
    assert tokens == expected and cached in (0, 16, 32, 48, 64)

"""`attention_backend="triton"`: the whole engine by the kernels, in Triton's interpreter, against the same engine in plain torch."""
import pytest

from kernel_harness import interpreted
from minengine import LLM, ConfigError, EngineArgs, SamplingParams
from minengine.config import KERNEL_DTYPES
from minengine.engine import LLMEngine
from tiny_models import tiny_model

LATENT = [name for name in KERNEL_DTYPES if name != "nvfp4"]
HEADS = [name for name in KERNEL_DTYPES if "mla" not in name]


def serve(kind, backend, lengths, max_tokens=6, **options):
    """Greedy tokens of requests that join step by step, so that prefills, chunks and decodes share batches."""
    engine = LLMEngine(EngineArgs(device="cpu", block_size=16, kv_cache_memory_bytes=4 << 20, max_num_batched_tokens=32, max_num_seqs=4,
                                  attention_backend=backend, **options), model=tiny_model(kind))
    assert engine.kv.backend == backend
    done = {}
    for i, n in enumerate(lengths):
        engine.add_request(str(i), [(i * 31 + j * j * 7 + j * 3) % engine.config.vocab_size for j in range(n)],
                           SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
        done.update((out.request_id, out) for out in engine.step())
    while engine.has_unfinished_requests():
        done.update((out.request_id, out) for out in engine.step())
    return [done[str(i)].outputs[0].token_ids for i in range(len(lengths))]


def check_tokens(kind, lengths, options):
    got, wanted = (serve(kind, backend, lengths, **options) for backend in ("triton", "torch"))
    assert got == wanted, (got, wanted)
    return wanted


def check_glm_mini(length, pairs):
    """A text read in chunks into a 4-bit cache, and two questions about records in it, the second over the cached text."""
    import numpy as np

    from minengine.workload.recall import Recall

    episode = Recall().episode(np.random.default_rng(3), length, pairs, 2)
    questions = Recall().questions(episode)
    answers = {}
    for backend in ("triton", "torch"):
        llm = LLM("glm-mini", device="cpu", block_size=16, kv_cache_dtype="nvfp4_fp8_ds_mla", attention_backend=backend, max_num_batched_tokens=160,
                  kv_cache_memory_bytes=8 << 20)
        prompts = [{"prompt_token_ids": episode.context.tolist() + question[:2].tolist()} for question in questions]
        outs = [llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0] for prompt in prompts]
        answers[backend] = [out.outputs[0].token_ids for out in outs]
        assert outs[1].num_cached_tokens == length, outs[1].num_cached_tokens
    assert answers["triton"] == answers["torch"], answers
    return answers["torch"], [question[2:4].tolist() for question in questions]


@pytest.mark.parametrize("kv_cache_dtype", LATENT)
def test_a_tiny_glm_gives_the_same_tokens(kv_cache_dtype):
    """Contexts on both sides of index_topk = 24, shared and full layers."""
    assert [len(tokens) for tokens in interpreted(check_tokens, "glm", (5, 28), {"kv_cache_dtype": kv_cache_dtype, "max_tokens": 3})] == [3, 3]


@pytest.mark.parametrize("layout", ["LHBNC", "BLHNC", "BHLNC"])
def test_a_tiny_glm_gives_the_same_tokens_in_every_kind_of_layout(layout):
    interpreted(check_tokens, "glm", (28,), {"kv_cache_dtype": "nvfp4_fp8_ds_mla", "kv_cache_layout": layout, "max_tokens": 3})


@pytest.mark.parametrize("kv_cache_dtype", HEADS)
def test_a_tiny_llama_gives_the_same_tokens(kv_cache_dtype):
    interpreted(check_tokens, "llama", (5, 40, 21), {"kv_cache_dtype": kv_cache_dtype})


@pytest.mark.parametrize("length, pairs", [(64, 4), pytest.param(288, 16, marks=pytest.mark.soak)])  # glm-mini attends to 256 rows at most
def test_glm_mini_answers_from_its_4_bit_cache_by_the_kernels(length, pairs):
    answers, records = interpreted(check_glm_mini, length, pairs)
    assert [answer[:2] for answer in answers] == records


@pytest.mark.parametrize("options, words", [
    (dict(kv_cache_dtype="int4", attention_backend="triton"), "no kernel reads rows of kv_cache_dtype='int4'; use attention_backend='torch'"),
    (dict(kv_cache_dtype="fp8", attention_backend="triton"), "attention_backend='triton' needs a GPU; use attention_backend='torch'"),
    (dict(attention_backend="cuda"), "attention_backend='cuda': use auto, torch or triton"),
])
def test_a_backend_that_cannot_run_is_refused_with_the_remedy(options, words):
    with pytest.raises(ConfigError, match=words):
        LLMEngine(EngineArgs(device="cpu", kv_cache_memory_bytes=4 << 20, **options), model=tiny_model("glm"))


def test_a_cpu_takes_torch_by_itself():
    assert LLMEngine(EngineArgs(device="cpu", kv_cache_memory_bytes=4 << 20), model=tiny_model("glm")).kv.backend == "torch"

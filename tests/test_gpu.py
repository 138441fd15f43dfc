"""On a card (`make gpu-check`): the CUDA path against the CPU's, with and without CUDA graphs. Needs torch and pytest alone."""
import pytest
import torch

from minengine.config import HEAD_DTYPES, LATENT_DTYPES
from minengine.engine_args import EngineArgs
from minengine.disagg.cluster import Cluster
from minengine.engine import LLMEngine
from minengine.request import SamplingParams
from tiny_models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device; run `make gpu-check` on a GPU box")]

TIE = 1e-2  # TF32 is off, yet a GPU sums in another order


def serve(kind, device, dtype=torch.float32, lengths=(5, 40, 70, 130, 33), **options):
    """Greedy tokens and the margin between the two best, of a batch that joins step by step."""
    engine = LLMEngine(EngineArgs(device=device, block_size=16, kv_cache_memory_bytes=8 << 20, max_num_batched_tokens=64, max_num_seqs=8, **options),
                       model=tiny_model(kind, dtype, device))
    vocab = engine.config.vocab_size
    done = {}
    for i, n in enumerate(lengths):
        engine.add_request(str(i), [(i * 31 + j * j * 7 + j * 3) % vocab for j in range(n)], SamplingParams(max_tokens=40, temperature=0.0, logprobs=2))
        done.update((out.request_id, out) for out in engine.step())
    while engine.has_unfinished_requests():
        done.update((out.request_id, out) for out in engine.step())
        engine.scheduler.check()
    answers = []
    for i in range(len(lengths)):
        out = done[str(i)].outputs[0]
        margins = [abs(a.logprob - b.logprob) for a, b in (list(entry.values())[:2] for entry in out.logprobs)]
        answers.append((out.token_ids, margins))
    return answers, engine


def assert_same(got, want):
    for (tokens, _), (expected, margins) in zip(got, want, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b), None)
        assert first is None or margins[first] < TIE, f"token {first}: {tokens[first]} on the card, {expected[first]} on the CPU, margin {margins[first]:.4f}"


@pytest.mark.parametrize("kind", ["llama", "glm"])
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_cards_tokens_are_the_cpus(kind, eager, backend):
    got, engine = serve(kind, "cuda", enforce_eager=eager, attention_backend=backend)
    assert bool(engine.runner.graphs) != eager
    if not eager:
        assert engine.runner.graphs.recorded, "no decode step ran as a graph"
    assert_same(got, serve(kind, "cpu")[0])


@pytest.mark.parametrize("kind, kv_cache_dtype", [("llama", d) for d in HEAD_DTYPES] + [("glm", d) for d in LATENT_DTYPES])
def test_every_row_format_and_graphs_agree_with_eager(kind, kv_cache_dtype):
    assert_same(serve(kind, "cuda", kv_cache_dtype=kv_cache_dtype)[0], serve(kind, "cuda", kv_cache_dtype=kv_cache_dtype, enforce_eager=True)[0])


@pytest.mark.parametrize("eager", [True, False])
def test_glm_mini_answers_from_4_bit_rows_as_on_the_cpu(eager):
    """Twenty questions over a text of 1,024 tokens, four times index_topk, read in chunks and then served from the cache."""
    pytest.importorskip("tokenizers", reason="glm-mini needs the tokenizers package")
    import numpy as np

    from minengine import LLM
    from minengine.workload.recall import Recall

    episode = Recall().episode(np.random.default_rng(1), 1024, 64, 20)
    prompts = [{"prompt_token_ids": episode.context.tolist() + question[:2].tolist()} for question in Recall().questions(episode)]
    answers = {}
    for device in ("cuda", "cpu"):
        llm = LLM("glm-mini", device=device, dtype="float32", kv_cache_dtype="nvfp4_fp8_ds_mla", enforce_eager=eager)
        outs = llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=2))
        answers[device] = [(out.outputs[0].token_ids, [abs(a.logprob - b.logprob) for a, b in (list(entry.values())[:2] for entry in
                            out.outputs[0].logprobs)]) for out in outs]
    assert_same(answers["cuda"], answers["cpu"])


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_bfloat16_runs_with_graphs(kind):
    answers, engine = serve(kind, "cuda", torch.bfloat16)
    assert engine.runner.graphs.recorded and all(len(tokens) == 40 for tokens, _ in answers)


def serve_apart(folder, kind, device, kv_transfer, lengths=(5, 40, 70, 130, 33)):
    """`serve`'s requests, by a prefill worker and a decoder; also what their transfers came to."""
    from tiny_directories import write_tiny

    vocab = tiny_model(kind).config.vocab_size
    prompts = [{"prompt_token_ids": [(i * 31 + j * j * 7 + j * 3) % vocab for j in range(n)]} for i, n in enumerate(lengths)]
    with Cluster(str(write_tiny(folder, kind)), prefill=1, decode=1, transfer="nixl", device=device, dtype="float32", block_size=16, kv_cache_memory_bytes=8 << 20,
                 max_num_batched_tokens=64, max_num_seqs=8, kv_transfer=kv_transfer) as cluster:
        outputs = cluster.generate(prompts, SamplingParams(max_tokens=40, temperature=0.0, logprobs=2))
        moved = {worker.role: dict(worker.transfers) for worker in cluster.workers}
    return [(out.outputs[0].token_ids, None) for out in outputs], moved


@pytest.mark.parametrize("kind", ["llama", "glm"])
@pytest.mark.parametrize("kv_transfer", ["pull", "push_layers"])
def test_two_processes_on_one_card_hand_rows_over(tmp_path, kind, kv_transfer):
    """Prefill and decode apart, both pools in the card's memory, registered as VRAM and moved by NIXL."""
    pytest.importorskip("nixl", reason="KV moves between processes by NIXL: pip install 'minengine[nixl]'")
    got, moved = serve_apart(tmp_path / "model", kind, "cuda", kv_transfer)
    assert moved["decode"]["landed"] == len(got) and not moved["decode"]["failed"], moved
    assert_same(got, serve(kind, "cuda")[0])

"""On a card (`make gpu-check`): the CUDA path against the CPU's, with and without CUDA graphs. Needs torch and pytest alone."""
import pytest
import torch

from minengine.config import HEAD_DTYPES, LATENT_DTYPES, EngineArgs
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
def test_the_cards_tokens_are_the_cpus(kind, eager):
    got, engine = serve(kind, "cuda", enforce_eager=eager)
    assert bool(engine.runner.graphs) != eager
    if not eager:
        assert engine.runner.graphs.recorded, "no decode step ran as a graph"
    assert_same(got, serve(kind, "cpu")[0])


@pytest.mark.parametrize("kind, kv_cache_dtype", [("llama", d) for d in HEAD_DTYPES] + [("glm", d) for d in LATENT_DTYPES])
def test_every_row_format_and_graphs_agree_with_eager(kind, kv_cache_dtype):
    assert_same(serve(kind, "cuda", kv_cache_dtype=kv_cache_dtype)[0], serve(kind, "cuda", kv_cache_dtype=kv_cache_dtype, enforce_eager=True)[0])


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_bfloat16_runs_with_graphs(kind):
    answers, engine = serve(kind, "cuda", torch.bfloat16)
    assert engine.runner.graphs.recorded and all(len(tokens) == 40 for tokens, _ in answers)

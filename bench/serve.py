"""The server against the engine in a process of its own: CPU and time a token at 32 streams, grammar masks, idle streams, /health.

Every engine has one compute thread here: on two cores a second one would compete with the client, which is no part of the server.
"""
from __future__ import annotations

import asyncio
import time
from typing import Any

from .harness import Bench, Variant
from .table import Row, at_most, figure, ratio
from .workload import prompt

STREAMS = 32
TOKENS = {"glm-mini": 256, "smollm2": 48}  # a stream
PROMPT_TOKENS = 64
GLM_VOCAB = 579
IDLE_STREAMS = 1000
HEALTH_CALLS = 200
MASK_BATCHES = (1, 8, 32)
MIN_LENGTH = 400  # characters are counted one by one, which takes the grammar longer than free text
MASK_STEPS, WARM_UP_STEPS = 48, 8
FLAGS = ("--num-threads", "1", "--max-num-seqs", str(STREAMS), "--no-enable-prefix-caching")


def rows(bench: Bench) -> list[Row]:
    found = []
    for model, rounds in (("glm-mini", 3), ("smollm2", 1)):
        alone, served = Variant(f"{model} in process", "bench.serve:in_process", {"model": model}), Variant(f"{model} served", "bench.serve:served", {"model": model})
        results = bench.there_and_back([alone, served], rounds)
        ours, theirs = results[served.name], results[alone.name]
        at = f"{STREAMS} streams of {model}"
        if model == "glm-mini":
            added = [(mine["cpu_s"] / mine["tokens"] - engine["cpu_s"] / engine["tokens"]) * 1e6 for mine, engine in zip(ours, theirs)]
            found.append(figure(f"{at}: CPU that the server adds to a token", added, at_most(150), "us"))
            found.append(ratio(f"{at}: CPU a token, served against in process", [r["cpu_s"] / r["tokens"] * 1e6 for r in ours],
                               [r["cpu_s"] / r["tokens"] * 1e6 for r in theirs], None, "us"))
        found.append(ratio(f"{at}: time for all, served against in process", [r["elapsed_s"] for r in ours], [r["elapsed_s"] for r in theirs],
                           at_most(1.05) if model == "smollm2" else None, "s"))
    for batch, least in [(batch, 0) for batch in MASK_BATCHES] + [(MASK_BATCHES[-1], MIN_LENGTH)]:
        name = f"batch {batch}" + (f", in a string of minLength {least}" if least else "")
        result = bench.run(Variant(f"masked steps, {name}", "bench.serve:masked_steps", {"batch": batch, "least": least})).result
        found.append(ratio(f"decode step of smollm2 under a grammar, {name}", result["masked_ms"], result["plain_ms"], at_most(1.05), "ms",
                           f"compiled in {result['compile_ms']:.1f} ms, found again in {result['again_us']:.0f} us"))
    results = [bench.run(Variant("idle streams", "bench.serve:idle_streams")).result for _ in range(3)]
    found.append(figure(f"memory of {IDLE_STREAMS} idle streams", [r["bytes"] / 1e6 for r in results], at_most(100), "MB"))
    result = bench.run(Variant("health under load", "bench.serve:health")).result
    found.append(figure(f"/health while {STREAMS} streams of smollm2 run", result["ms"], at_most(5), "ms"))
    return found


def _prompts(model: str) -> list[list[int]]:
    fold = GLM_VOCAB - 2 if model == "glm-mini" else None  # ids above the vocabulary come down into it, clear of the special ones
    return [[2 + token % fold if fold else token for token in prompt(PROMPT_TOKENS, seed)] for seed in range(STREAMS)]


def in_process(threads: int, model: str) -> dict[str, Any]:
    """The same requests through the engine alone, with the deltas that a server would send."""
    from minengine.engine_args import EngineArgs
    from minengine.engine import LLMEngine
    from minengine.request import OutputKind, SamplingParams

    engine = LLMEngine(EngineArgs(model=model, num_threads=1, max_num_seqs=STREAMS, enable_prefix_caching=False))

    def serve(tokens: int) -> tuple[int, int]:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        for i, ids in enumerate(_prompts(model)):
            engine.add_request(str(i), ids, params, output_kind=OutputKind.DELTA)
        count = outputs = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                count += len(output.outputs[0].token_ids)
                outputs += 1
        return count, outputs

    serve(4)
    start, cpu = time.perf_counter(), time.process_time()
    count, outputs = serve(TOKENS[model])
    return {"tokens": count, "events": outputs, "elapsed_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}


def _bodies(model: str, tokens: int, **more: Any) -> list[dict[str, Any]]:
    return [{"model": model, "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
             "stream_options": {"include_usage": True}, **more} for ids in _prompts(model)]


def served(threads: int, model: str) -> dict[str, Any]:
    """Over HTTP, streamed; CPU seconds are the server's process alone."""
    from .http_load import serve, stream_all

    with serve(model, *FLAGS) as server:
        stream_all(server, "/v1/completions", _bodies(model, 4))
        return stream_all(server, "/v1/completions", _bodies(model, TOKENS[model]))


def masked_steps(threads: int, batch: int, least: int) -> dict[str, Any]:
    """Decode steps of two engines that share the weights, taking turns: one free, one in free text, or in the string of a tool call's
    argument that has at least so many characters."""
    from minengine.engine_args import EngineArgs
    from minengine.engine import LLMEngine
    from minengine.request import SamplingParams, StructuredOutputsParams
    from minengine.serve.tools import structural_tag

    tool = {"type": "function", "function": {"name": "note", "parameters": {
        "type": "object", "properties": {"text": {"type": "string", "minLength": least}}, "required": ["text"]}}}
    if least:
        grammar = StructuredOutputsParams(structural_tag=structural_tag("glm", [tool], "required"))
    else:  # text without bounds, to a character that the model never writes, so that no answer ends in between
        grammar = StructuredOutputsParams(grammar='root ::= [^\\x00]* "\\x00"')
    plain = LLMEngine(EngineArgs(num_threads=1, max_num_seqs=batch))
    engines = {"plain_ms": plain, "masked_ms": LLMEngine(plain.args, model=plain.model, tokenizer=plain.tokenizer)}
    engines["masked_ms"].grammars.compile(StructuredOutputsParams(regex="a"))  # imports xgrammar and reads the vocabulary, once a server
    began = time.perf_counter()
    engines["masked_ms"].grammars.compile(grammar)
    compiled = time.perf_counter()
    engines["masked_ms"].grammars.compile(grammar)
    again = time.perf_counter()
    for name, engine in engines.items():
        params = SamplingParams(max_tokens=WARM_UP_STEPS + MASK_STEPS + 40, temperature=0.0, ignore_eos=True,
                                structured_outputs=grammar if name == "masked_ms" else None)
        for i in range(batch):
            engine.add_request(str(i), prompt(PROMPT_TOKENS, seed=i), params)
    samples: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(WARM_UP_STEPS + MASK_STEPS):
        for name, engine in engines.items():
            if len(engine.requests) < batch:
                raise RuntimeError(f"{name}: only {len(engine.requests)} of {batch} requests are left")
            start = time.perf_counter()
            engine.step()
            samples[name].append((time.perf_counter() - start) * 1e3)
    return {**{name: values[WARM_UP_STEPS:] for name, values in samples.items()}, "compile_ms": (compiled - began) * 1e3,
            "again_us": (again - compiled) * 1e6}


def idle_streams(threads: int) -> dict[str, Any]:
    """Streams that wait in the queue behind one request that runs: what each holds of the server's memory."""
    from .http_load import get, open_stream, serve

    async def hold(server: Any) -> int:
        body = {"model": "glm-mini", "prompt": [5, 6, 7], "max_tokens": 8000, "temperature": 0, "ignore_eos": True, "stream": True}
        running = [await open_stream(server.port, "/v1/completions", body) for _ in range(8)]  # one runs, the others follow it
        for _ in range(3):
            await get(server.port, "/health")
        before = server.rss_bytes
        idle = [await open_stream(server.port, "/v1/completions", body) for _ in range(IDLE_STREAMS)]
        while _metric(await get(server.port, "/metrics"), "vllm:num_requests_waiting") < IDLE_STREAMS:
            await asyncio.sleep(0.05)
        after = server.rss_bytes
        for _, writer in running + idle:
            writer.close()
        return after - before

    with serve("glm-mini", "--num-threads", "1", "--max-num-seqs", "1", "--max-num-waiting", str(2 * IDLE_STREAMS)) as server:
        return {"bytes": asyncio.run(hold(server))}


def _metric(text: bytes, name: str) -> float:
    return next(float(line.rsplit(" ", 1)[1]) for line in text.decode().splitlines() if line.startswith(name + "{") or line.startswith(name + " "))


def health(threads: int) -> dict[str, Any]:
    """/health, one call after the other, while all streams run."""
    from .http_load import get, open_stream, serve

    async def ask(server: Any) -> list[float]:
        streams = [await open_stream(server.port, "/v1/completions", body) for body in _bodies("smollm2", 1000)]
        for reader, _ in streams:
            await reader.readuntil(b"data: {")
        samples = []
        for _ in range(HEALTH_CALLS):
            start = time.perf_counter()
            await get(server.port, "/health")
            samples.append((time.perf_counter() - start) * 1e3)
        for _, writer in streams:
            writer.close()
        return samples

    with serve("smollm2", *FLAGS) as server:
        return {"ms": asyncio.run(ask(server))}

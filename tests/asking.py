"""Requests to the app in this process, without a socket, and a look at its errors and metrics."""
import asyncio

import httpx
from prometheus_client.parser import text_string_to_metric_families
from serving import ENGINE, loaded

from minengine.async_llm import AsyncLLM
from minengine.engine_args import EngineArgs
from minengine.engine import LLMEngine
from minengine.serve.app import create_app
from minengine.serve.args import ServeArgs
from minengine.tokenizer import Tokenizer

ARGS = EngineArgs(model="glm-mini", **ENGINE)
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "ignore_eos": True}
TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 405: "invalid_request_error",
         408: "invalid_request_error", 413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


def new_engine():
    model, tokenizer = loaded("glm-mini")
    talking = Tokenizer(tokenizer.backend, chat_template="{% for turn in messages %}{{ turn.content }} {% endfor %}")
    return AsyncLLM(LLMEngine(ARGS, model=model, tokenizer=talking))


def app_of(engine, **serve):
    return create_app(engine, ServeArgs(engine=ARGS, **serve))


def ask(app, method, path, *, host="localhost", **options):
    """One request to the app in this process."""
    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
            return await client.request(method, path, **options)

    return asyncio.run(main())


def refused(answer, status, param=None, *words):
    """The error of an answer, after checking its shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == TYPES[status]
    assert error["param"] == param
    for word in words:
        assert word in error["message"], error["message"]
    return error


def samples(text):
    """{(name, labels but the model's and the engine's): value}"""
    return {(sample.name, *sorted((k, v) for k, v in sample.labels.items() if k not in ("model_name", "engine"))): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}

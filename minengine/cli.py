"""`minengine generate | chat | serve | toolcheck | replay | simulate | doctor | train-mini | accuracy`: the engine from a terminal.

Errors go to stderr in one sentence, exit code 2.
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, Sequence

from .config import ConfigError
from .engine_args import EngineArgs
from .flags import add_engine_flags
from .replay import command as replay_command
from .request import RequestError, RequestOutput, SamplingParams
from .serve.args import SERVE_PACKAGES, add_serve_flags, serve_args
from .simulate import command as simulate_command
from .toolcheck.command import add_arguments, toolcheck

__all__ = ["main"]

_SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int, "max_tokens": int}


class _Parser(argparse.ArgumentParser):
    """Its errors are one sentence, as all others are, and not the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser, typed = _parser(), list(sys.argv[1:] if argv is None else argv)
    args, unknown = parser.parse_known_args(typed)
    if unknown:
        hint = f"; a model is named with --model {unknown[0]}" if "model" in args and not unknown[0].startswith("-") else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if "typed" in args:  # by a command that keeps how to repeat it
        args.typed = typed
    try:
        return args.run(args)
    except (ConfigError, RequestError) as error:
        print(f"minengine: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="minengine", description="A compact LLM engine that comes with a book about its KV cache.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    generate = commands.add_parser("generate", help="continue one or more prompts")
    generate.add_argument("prompt", nargs="+", help="a prompt; several are served together")
    generate.add_argument("--chat", action="store_true", help="send each prompt through the model's chat template")
    generate.add_argument("--zero-kv-cache", action="store_true",
                          help="an experiment: read each prompt, overwrite its cached rows with zeros, then answer from what is left")
    _add_options(generate, max_tokens=64, temperature=0.0)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to the model; its answer streams, the conversation's prefix stays cached")
    chat.add_argument("--system", help="a system message")
    _add_options(chat, max_tokens=256, temperature=0.0)
    chat.set_defaults(run=_chat)

    serve = commands.add_parser("serve", help="answer OpenAI's API over HTTP, with a chat page at /")
    _add_model(serve, "; glm-mini has no chat template: ask it at /v1/completions")
    add_engine_flags(serve)
    serve.add_argument("--seed", type=int, metavar="N", default=0, help="for requests that bring none (default: 0)")
    add_serve_flags(serve)
    serve.set_defaults(run=_serve)

    check = commands.add_parser("toolcheck", help="ask an OpenAI-compatible server more than 500 questions about tool calls, and count the calls that are malformed or lost")
    add_arguments(check)
    check.set_defaults(run=toolcheck)

    replay = commands.add_parser("replay", help="replay a trace of agents in a closed loop against the engine, an OpenAI-compatible server or the simulator")
    replay_command.add_arguments(replay)
    replay.set_defaults(run=replay_command.run)

    simulate = commands.add_parser("simulate", help="simulate a deployment under agents: what it gives on GPUs that you do not have")
    simulate_command.add_arguments(simulate)
    simulate.set_defaults(run=simulate_command.run)

    doctor = commands.add_parser("doctor", help="say what this machine can run, and how to mend what it cannot")
    doctor.set_defaults(run=_doctor)

    train = commands.add_parser("train-mini", help="train glm-mini from its seed, measure it through the engine and write its model card")
    train.add_argument("--out", type=Path, default=Path("glm-mini"), help="folder for the model, its log and the state to resume from (default: glm-mini)")
    train.add_argument("--restart", action="store_true", help="start anew even if the folder holds an unfinished training")
    train.set_defaults(run=_train_mini)

    accuracy = commands.add_parser("accuracy", help="what each row format costs in answers: recall, perplexity and agreement, with 95%% intervals")
    accuracy.add_argument("--out", type=Path, required=True, help="folder for the result file and the finished parts, from which a second run goes on")
    accuracy.add_argument("--only", metavar="KIND,...", help="of recall, perplexity, needle, agreement (default: all)")
    accuracy.add_argument("--seed", type=int, default=0, help="of texts and questions (default: 0)")
    accuracy.add_argument("--quick", action="store_true", help="a few contexts in four formats: to see that it works, not to measure")
    accuracy.set_defaults(run=_accuracy)
    return parser


def _add_model(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument("--model", default="smollm2", help=f"a name from `minengine doctor`, or a local Hugging Face directory (default: smollm2){more}")


def _add_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    _add_model(parser)
    sampling = parser.add_argument_group("sampling")
    for name, kind in _SAMPLING.items():
        default = defaults.get(name, getattr(SamplingParams(), name))
        sampling.add_argument("--" + name.replace("_", "-"), type=kind, default=default, metavar="N" if kind is int else "X",
                              help=f"default: {'one for each answer, the same in every run' if default is None else default}")
    sampling.add_argument("--stop", action="append", help="end before this text; may be given more than once")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on where the model would end")
    add_engine_flags(parser)


def _engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineArgs but its seed: `--seed` of `generate` and `chat` is their requests'."""
    return {f.name: getattr(args, f.name) for f in fields(EngineArgs) if f.name != "seed"}


def _llm(args: argparse.Namespace):
    from .llm import LLM

    return LLM(**_engine_args(args))


def _params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(**{name: getattr(args, name) for name in _SAMPLING}, stop=args.stop, ignore_eos=args.ignore_eos)


def _summary(out: RequestOutput) -> str:
    times = out.metrics
    n = len(out.outputs[0].token_ids)
    gaps = times.itl_s
    speed = f", {len(gaps) / sum(gaps):.1f} tok/s after it" if gaps and sum(gaps) > 0 else ""
    return (f"{len(out.prompt_token_ids)} prompt tokens ({out.num_cached_tokens} cached), first token after {times.ttft_s * 1e3:.0f} ms, "
            f"{n} output tokens{speed}, ended by {out.outputs[0].finish_reason}")


def _generate(args: argparse.Namespace) -> int:
    params = _params(args)
    llm = _llm(args)
    prompts = [llm.chat_prompt([{"role": "user", "content": p}]) for p in args.prompt] if args.chat else args.prompt
    if args.zero_kv_cache:
        _forget(llm, prompts)
    failed = 0
    for prompt, out in zip(args.prompt, llm.generate(prompts, params)):
        print(out.outputs[0].text if args.chat else prompt + out.outputs[0].text)
        if out.error:
            failed = 1
            print(f"minengine: {out.error}", file=sys.stderr)
        print(f"[{_summary(out)}]", file=sys.stderr)
    return failed


def _forget(llm, prompts: Sequence[Any]) -> None:
    """Fill the cache with the prompts, then make its rows zeros; the prefix cache will serve those."""
    for out in llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0)):
        if len(out.prompt_token_ids) <= llm.kv_cache.block_size:
            raise RequestError(f"--zero-kv-cache: a prompt of {len(out.prompt_token_ids)} tokens leaves no full block of {llm.kv_cache.block_size} "
                               "in the cache; use a longer prompt or --block-size 16")
    llm.zero_kv_cache()


def _chat(args: argparse.Namespace) -> int:
    params = _params(args)
    llm = _llm(args)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    interactive = sys.stdin.isatty()
    print("Type a message; an empty line or Ctrl-D ends the conversation." if interactive else "", end="\n" if interactive else "")
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            break
        if not text:
            break
        messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for out in llm.stream(llm.chat_prompt(messages), params):
                print(out.outputs[0].text[len(answer):], end="", flush=True)
                answer = out.outputs[0].text
            print()
            if out.error:
                print(f"minengine: {out.error}", file=sys.stderr)
            print(f"[{_summary(out)}]", file=sys.stderr)
        except KeyboardInterrupt:  # ends the answer; what was said stays part of the conversation
            print("\n[interrupted; Ctrl-C again or an empty line ends the conversation]", file=sys.stderr)
        except RequestError as error:  # too long by now, or a text that is none: the conversation goes on without this message
            print(f"minengine: {error}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
    return 0


def _serve(args: argparse.Namespace) -> int:
    options = serve_args(args, EngineArgs(**_engine_args(args), seed=args.seed))
    try:
        from .serve.server import run
    except ModuleNotFoundError as error:
        if error.name not in SERVE_PACKAGES:
            raise
        raise ConfigError(f"serve: the package {error.name} is not installed; install it with: pip install 'minengine[serve]'") from error
    return run(options)


def _train_mini(args: argparse.Namespace) -> int:
    from .train.mini import train_mini

    train_mini(args.out, resume=not args.restart)
    return 0


def _accuracy(args: argparse.Namespace) -> int:
    from .accuracy.run import KINDS, measure

    print(measure(args.out, args.only.split(",") if args.only else KINDS, args.seed, args.quick))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import report

    lines, code = report()
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Structured outputs: which tokens a grammar allows next, one bit a token. The automata are xgrammar's.

A grammar is compiled once for a vocabulary and kept by its content; each request that asks for it follows it with a matcher of its own:

    fill      the mask of the next token                                   before sampling     sampling.py
    accept    one step along the chosen token                              after sampling      sampling.py
    jump      further steps, where only one text can follow                between two steps   engine.py

A token is known to the automata by its bytes. Control tokens (`<|im_start|>`) have none, so that no text, however free, spells one;
only a grammar that names one as a token may have it.

Both compiling and following are bounded in CPU time, see grammar_limits.py.
"""
from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any, Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .grammar_limits import MAX_COMPILE_S, TRIAL_BYTES, TRIAL_EVERY, TRIAL_LONG, TRIAL_NOISE, TRIAL_NOISE_S, Credit, check_rules, check_source
from .matcher import Matcher, Spellings, unpack
from .request import RequestError, StructuredOutputsParams

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

__all__ = ["GrammarBackend", "Matcher", "mask_logits", "unpack"]

CACHE_BYTES = 64 << 20
NOT_TEXT = b"\xff"  # in no UTF-8
LITERAL = re.compile(r'"(?:\\.|[^"\\])*"')
NAMED = re.compile(r"(?<!Exclude)Token\(([\d, ]+)\)|\((\d+), \w")  # Token(1, 2), and TokenTagDispatch((1, rule), ...)


class GrammarBackend:
    """The grammars of one model. Any thread may compile; xgrammar is imported at the first one.

    Args:
        vocab_size: width of the model's logits, which may be more than the tokenizer knows.
        stop_token_ids: the tokens that end an answer: allowed when the grammar is complete, and only then.
        cache_bytes: limit of the compiled grammars that are kept; the last one always is.
        cpu_clock: seconds that the calling thread has computed: a machine that is busy with something else makes no grammar slow.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, stop_token_ids: Sequence[int], *, cache_bytes: int = CACHE_BYTES,
                 cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self.tokenizer, self.vocab_size, self.stop_token_ids = tokenizer, vocab_size, list(stop_token_ids)
        self.cache_bytes, self.cpu_clock = cache_bytes, cpu_clock
        self.num_compiled = 0
        self._text_compiler: Any = None
        self._trials: list[tuple[float, Any]] = []  # see _new_trials
        self._spellings: Spellings | None = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()  # (kind, source) -> xgrammar's, least recently used first
        self._alive: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()  # all of these, and others that somebody holds
        self._cached, self._compiling = Lock(), Lock()

    def compile(self, params: StructuredOutputsParams) -> Any:
        """xgrammar's `CompiledGrammar`. One grammar is compiled at a time, outside Python's global lock.

        Raises:
            RequestError: the grammar is wrong or too large, or the model or the installation cannot follow one.
        """
        key = params.kind, params.source
        found = self._find(key)
        if found is None:
            with self._compiling:
                found = self._find(key)  # another thread may have been first
                if found is None:
                    found = self._compile(*key)
                    self._keep(key, found)
        return found

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        """The state of one request at its start. Raises what `compile` raises."""
        compiled = self.compile(params)
        from xgrammar import GrammarMatcher

        return self.following(GrammarMatcher(compiled))

    def following(self, state: Any) -> Matcher:
        """A matcher that goes on from an xgrammar `GrammarMatcher` of one of these grammars."""
        return Matcher(state, self.tokenizer, self._spellings, Credit(self.cpu_clock))

    # --- the cache ------------------------------------------------------------------------------------------

    def _find(self, key: tuple[str, str]) -> Any:
        with self._cached:
            if key in self._compiled:
                self._compiled.move_to_end(key)
            return self._alive.get(key)

    def _keep(self, key: tuple[str, str], compiled: Any) -> None:
        with self._cached:
            self._compiled[key] = self._alive[key] = compiled
            self.num_compiled += 1
            while len(self._compiled) > 1 and self.cached_bytes > self.cache_bytes:
                self._compiled.popitem(last=False)

    @property
    def cached_bytes(self) -> int:
        """Memory of the grammars that are kept, their sources included."""
        return sum(compiled.memory_size_bytes + len(source) for (_, source), compiled in self._compiled.items())

    # --- compiling ------------------------------------------------------------------------------------------

    def _compile(self, kind: str, source: str) -> Any:
        self._demand_support()
        if self._spellings is None:
            hidden = self.tokenizer.special_ids
            self._spellings = Spellings([b"" if id in hidden else self.tokenizer.token_bytes(id) for id in range(self.vocab_size)])
        check_source(kind, source)
        try:
            grammar = self._grammar(kind, source)
            rules = str(grammar)
            check_rules(kind, rules)
            self._try_out(kind, grammar)
            return self._compiler(self._named(rules)).compile_grammar(grammar)
        except RequestError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:  # its own errors are RuntimeErrors; the others are pydantic's and the binding's
            raise RequestError(f"structured_outputs.{kind}: {_reason(error)}; correct it, or ask for less") from error

    def _try_out(self, kind: str, grammar: Any) -> None:
        """Compile for small parts of the vocabulary, and conclude how long all of it takes.

        Raises:
            RequestError: longer than MAX_COMPILE_S.
        """
        def seconds(compiler: Any) -> float:
            start = self.cpu_clock()
            compiler.compile_grammar(grammar)
            return self.cpu_clock() - start

        if not self._trials:
            self._trials = self._new_trials()
        rules_alone = seconds(self._trials[0][1])
        for weight, compiler in self._trials[1:]:
            more = max(0.0, seconds(compiler) - rules_alone * (1 + TRIAL_NOISE) - TRIAL_NOISE_S) * weight
            if 2 * rules_alone + more > MAX_COMPILE_S:
                raise RequestError(f"structured_outputs.{kind}: takes more than {MAX_COMPILE_S} s to compile; "
                                   "ask for fewer repeats, patterns or properties")

    def _new_trials(self) -> list[tuple[float, Any]]:
        """Compilers for parts of the vocabulary, the cheapest first, and how many times longer all of it takes: no token; the beginnings of
        long ones, for which an ambiguous grammar takes longest; a sample."""
        tokens = self._tokens(frozenset())
        parts: list[tuple[float, dict[int, bytes]]] = [(0, {})]
        for size in TRIAL_BYTES:
            ids = {token[:size]: id for id, token in enumerate(tokens) if len(token) > max(TRIAL_BYTES)}
            parts.append((TRIAL_LONG / max(1, len(ids)), {id: token for token, id in ids.items()}))
        sample = sorted(range(self.vocab_size), key=tokens.__getitem__)[TRIAL_EVERY // 2::TRIAL_EVERY]
        parts.append((TRIAL_EVERY, {id: tokens[id] for id in sample}))
        return [(weight, self._new_compiler([part.get(id, b"") for id in range(self.vocab_size)])) for weight, part in parts]

    def _grammar(self, kind: str, source: str) -> Any:
        """xgrammar's `Grammar`: rules, not yet related to a vocabulary."""
        from xgrammar import Grammar

        if kind == "json":
            # One way to write each value: a model that may put blanks anywhere can put them for ever, and nothing would be forced.
            return Grammar.from_json_schema(source, any_whitespace=False)
        if kind == "regex":
            return Grammar.from_regex(source)
        if kind == "grammar":
            return Grammar.from_ebnf(source)
        if kind == "choice":
            elements = [{"type": "const_string", "value": text} for text in json.loads(source)]
            return Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": elements}}))
        return Grammar.from_structural_tag(json.dumps(self._with_token_ids(json.loads(source))))

    def _demand_support(self) -> None:
        if self.tokenizer is None or not self.stop_token_ids:
            lack = "tokenizer" if self.tokenizer is None else "end token"
            raise RequestError(f"structured_outputs: this model has no {lack}, so no grammar can be followed; leave it out")
        try:
            import xgrammar
        except ImportError as error:
            raise RequestError("structured_outputs: needs xgrammar; install it with  pip install 'minengine[serve]'") from error

    def _named(self, rules: str) -> frozenset[int]:
        """The control tokens that a grammar, as xgrammar prints it, names by their ids."""
        if "Token" not in rules:
            return frozenset()
        found = NAMED.findall(LITERAL.sub('""', rules))
        return frozenset(int(id) for ids in found for id in re.findall(r"\d+", ",".join(ids))) & self.tokenizer.special_ids

    def _compiler(self, named: frozenset[int]) -> Any:
        """A compiler for the vocabulary in which, of the control tokens, only these can occur."""
        if not named and self._text_compiler is not None:
            return self._text_compiler
        compiler = self._new_compiler(self._tokens(named))
        if not named:  # those that name some are few, and each has its own
            self._text_compiler = compiler
        return compiler

    def _tokens(self, named: frozenset[int]) -> list[bytes]:
        """What each token is to the automata."""
        bytes_of, hidden = self.tokenizer.token_bytes, self.tokenizer.special_ids - named
        return [b"" if id in hidden else NOT_TEXT * (id in named) + bytes_of(id) for id in range(self.vocab_size)]

    def _new_compiler(self, tokens: list[bytes]) -> Any:
        from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

        vocabulary = TokenizerInfo(tokens, VocabType.RAW, vocab_size=self.vocab_size, stop_token_ids=self.stop_token_ids)
        # Not xgrammar's cache: it takes parts of grammars that name different tokens for the same (0.2.8), and masks the wrong ones.
        return GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)

    def _with_token_ids(self, format: Any) -> Any:
        """A structural tag with ids for the names of tokens."""
        if isinstance(format, list):
            return [self._with_token_ids(part) for part in format]
        if not isinstance(format, dict):
            return format
        new = {key: part if key == "json_schema" else self._with_token_ids(part) for key, part in format.items()}
        for key in {"token", "trigger_tokens", "exclude_tokens"} & new.keys():
            new[key] = [self._id(name) for name in new[key]] if isinstance(new[key], list) else self._id(new[key])
        if new.get("type") == "token_dispatch" and isinstance(new.get("rules"), list):
            new["rules"] = [[self._id(rule[0]), *rule[1:]] if isinstance(rule, list) and rule else rule for rule in new["rules"]]
        return new

    def _id(self, name: Any) -> Any:
        id = self.tokenizer.backend.token_to_id(name) if isinstance(name, str) else name
        if id is None:
            raise RequestError(f"structured_outputs.structural_tag: this model has no token {name!r}; name one that it has, or write it as a string")
        return id


def mask_logits(logits: Tensor, matchers: Sequence[Matcher | None]) -> tuple[Tensor, list[int]]:
    """Take out what the grammars do not allow next.

    Args:
        logits: (S, V), left as they are.
        matchers: one a row; None leaves the row as it is.

    Returns:
        logits (S, V) with -inf in the places of all other tokens; the rows where no token is left.
    """
    rows = [row for row, matcher in enumerate(matchers) if matcher is not None]
    mask = torch.full((len(rows), -(-logits.shape[-1] // 32)), -1, dtype=torch.int32)
    for i, row in enumerate(rows):
        matchers[row].fill(mask, i)
    stuck = [row for row, some in zip(rows, mask.any(-1).tolist()) if not some]
    if logits.device.type != "cpu":
        held = torch.tensor(rows, device=logits.device)
        bits = unpack(mask.to(logits.device, non_blocking=True), logits.shape[-1])
        return logits.index_copy(0, held, logits[held].masked_fill_(~bits, -torch.inf)), stuck
    from xgrammar import apply_token_bitmask_inplace

    masked = logits.clone()
    for i, row in enumerate(rows):
        apply_token_bitmask_inplace(masked[row], mask[i], vocab_size=logits.shape[-1])  # several times faster than unpacking
    return masked, stuck


def _reason(error: Exception) -> str:
    """xgrammar's message without the place in its source, on one line."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error).strip())
    text = re.sub(r"^Check failed: \(.*?\) is (?:true|false): ", "", text)
    return " ".join(text.split()).rstrip(".;")[:300] or type(error).__name__

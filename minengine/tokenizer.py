"""Text to token ids and back, and the chat template.

The vocabulary comes from a GGUF file's metadata (byte-level BPE) or from a `tokenizer.json`; splitting and merging
are the `tokenizers` library's. A byte-level token is a run of bytes, not of characters: one character may span
several tokens, so text is decoded from the bytes of all tokens together.
"""
from __future__ import annotations

import codecs
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from .config import ConfigError
from .model.gguf import GGUFFile
from .model.weights import read_json, resolve_model
from .request import RequestError

__all__ = ["StreamDecoder", "Tokenizer", "load_tokenizer"]

# How text is cut before merging, by a GGUF file's `tokenizer.ggml.pre`: each entry is applied to the pieces of the one before.
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLITS = {"gpt-2": (GPT2_SPLIT,), "smollm": (r"\p{N}", GPT2_SPLIT), "llama-bpe": (LLAMA3_SPLIT,)}
WHOLE_WORDS_FIRST = {"llama-bpe"}  # a piece that is a token stays whole, whatever its merges
LONG_TEXT = 8192  # characters; from there on other threads get to run: the library lets go of Python's lock only for a batch
CONTROL, USER_DEFINED = 3, 4  # `tokenizer.ggml.token_type` of tokens that text is never merged into


def load_tokenizer(name_or_path: str | Path) -> Tokenizer | None:
    """The tokenizer of a known model, a GGUF file or a directory; None for a directory without a `tokenizer.json`.

    Raises:
        ConfigError: no such model, or a vocabulary that cannot be read or is of another kind.
    """
    path = resolve_model(name_or_path)
    if path.is_file():
        return _from_gguf(GGUFFile(path))
    return _from_directory(path) if (path / "tokenizer.json").is_file() else None


class Tokenizer:
    """
    Attributes:
        bos_token, eos_token: text of the special tokens, for the chat template; None where the model has none.
        chat_template: jinja2 source, or None.
    """

    def __init__(self, backend: Backend, *, bos_token: str | None = None, eos_token: str | None = None, chat_template: str | None = None) -> None:
        self.backend = backend
        self.bos_token, self.eos_token, self.chat_template = bos_token, eos_token, chat_template
        self.byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens written out in it become their single ids; `add_special_tokens` adds those that the
        model's own convention puts around a text, a begin-of-text token for instance."""
        if len(text) < LONG_TEXT:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. Ids beyond the vocabulary have no text."""
        if not self.byte_level:
            text = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            if "\ufffd" not in text:
                return text
            # The library gives up a whole run of byte tokens for one incomplete character, which a stream cannot.
            stream = self.stream_decoder(skip_special_tokens)
            return "".join([*map(stream.feed, ids), stream.finish()])
        return b"".join(self._bytes(ids, skip_special_tokens)).decode("utf-8", errors="replace")

    def stream_decoder(self, skip_special_tokens: bool = True) -> StreamDecoder:
        return StreamDecoder(self, skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one token stands for; of a special token, its name."""
        token = self.backend.id_to_token(id)
        if token is None:
            return b""
        if self.byte_level:
            try:
                return bytes(map(BYTE_OF_CHARACTER.__getitem__, token))
            except KeyError:  # an added token, stored as plain text
                return token.encode()
        if len(token) == 6 and token.startswith("<0x"):  # byte fallback
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
                            tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any) -> str:
        """The prompt text of a conversation. It holds its special tokens: encode it with `add_special_tokens=False`.

        Raises:
            RequestError: the model has no template, or the template refuses these messages.
        """
        if self.chat_template is None:
            raise RequestError("messages: this model has no chat template; send a prompt")
        from jinja2 import TemplateError

        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt,
                                         bos_token=self.bos_token or "", eos_token=self.eos_token or "", **variables)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:  # a template's expressions may raise these
            raise RequestError(f"messages: the chat template refuses them ({error}); use the roles and fields that the model knows") from error

    @cached_property
    def _template(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def to_json(value: Any, indent: int | None = None) -> str:  # jinja2's own escapes HTML
            return json.dumps(value, ensure_ascii=False, indent=indent)

        # Whitespace rules, names and filters are those that templates are written for.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.globals.update(raise_exception=refuse, strftime_now=_now)
        environment.filters["tojson"] = to_json
        return environment.from_string(self.chat_template)

    def _bytes(self, ids: Iterable[int], skip_special_tokens: bool) -> Iterable[bytes]:
        return (self.token_bytes(id) for id in ids if not (skip_special_tokens and id in self.special_ids))


class StreamDecoder:
    """Text of tokens as they come. What `feed` and `finish` return, joined, is `decode` of all of them."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Without byte-level tokens: the ids whose text was returned last, and those since. A token's text may depend on what
        # stands before it, so new text is what decoding both adds to decoding the former.
        self._last: list[int] = []
        self._new: list[int] = []

    def feed(self, id: int) -> str:
        """The text that token `id` completes; empty while a character is incomplete."""
        if self._skip and id in self._tokenizer.special_ids:
            return ""
        if self._tokenizer.byte_level:
            return self._utf8.decode(self._tokenizer.token_bytes(id))
        self._new.append(id)
        text = self._added_text()
        if text.endswith("\ufffd"):
            return ""
        self._last, self._new = self._new, []
        return text

    def finish(self) -> str:
        """What is left: an incomplete character becomes U+FFFD."""
        if self._tokenizer.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._added_text()

    def _added_text(self) -> str:
        decode = self._tokenizer.backend.decode
        before = decode(self._last, skip_special_tokens=self._skip)
        return decode(self._last + self._new, skip_special_tokens=self._skip)[len(before):]


def _now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 character stands for its own byte, the other 68 bytes for U+0100 upwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def _from_gguf(file: GGUFFile) -> Tokenizer:
    def strings(name: str) -> list[str]:
        value = file.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise ConfigError(f"{file.path}: metadata 'tokenizer.ggml.{name}' is missing; use a file that carries its tokenizer")
        return value

    kind, split = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in SPLITS:
        raise ConfigError(f"{file.path}: tokenizer '{kind}' with pre-tokenizer '{split}' is not supported; "
                          f"use 'gpt2' with one of {', '.join(SPLITS)}, or a directory with a tokenizer.json")
    tokens = strings("tokens")
    merges = [tuple(merge.split(" ")) for merge in strings("merges")]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    try:
        backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in WHOLE_WORDS_FIRST))
    except Exception as error:  # the library raises bare exceptions: a merge that is no pair, or makes no token
        raise ConfigError(f"{file.path}: its merges do not fit its tokens ({error}); download the file again") from error
    pieces = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[split]]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ConfigError(f"{file.path}: metadata 'tokenizer.ggml.token_type' does not fit its {len(tokens)} tokens; "
                          "use a file that carries its tokenizer")
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token, kind in zip(tokens, types) if kind == CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in zip(tokens, types) if kind == USER_DEFINED])

    def named(name: str) -> str | None:
        id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[id] if isinstance(id, int) and 0 <= id < len(tokens) else None

    bos = named("bos")
    if file.metadata.get("tokenizer.ggml.add_bos_token") is True and bos is not None:
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])])
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, bos_token=bos, eos_token=named("eos"), chat_template=template if isinstance(template, str) else None)


def _from_directory(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(f"{path} cannot be read ({error}); download it again") from error
    backend.no_truncation()
    backend.no_padding()
    config = {}
    if (directory / "tokenizer_config.json").is_file():
        config = read_json(directory / "tokenizer_config.json", "download it again")

    def text(value: Any) -> str | None:
        value = value.get("content") if isinstance(value, dict) else value  # an added token is written with its flags
        return value if isinstance(value, str) else None

    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if (directory / "chat_template.jinja").is_file():
        template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return Tokenizer(backend, bos_token=text(config.get("bos_token")), eos_token=text(config.get("eos_token")), chat_template=template)

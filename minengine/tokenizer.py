"""Text to tokens and back, through the `tokenizers` library; and the model's own chat template.

The vocabulary comes from a GGUF file's metadata or from a directory's `tokenizer.json`.
"""
from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer as Library, decoders, models, pre_tokenizers

from .config import ConfigError
from .model.weights import resolve_model
from .request import RequestError

__all__ = ["StreamDecoder", "Tokenizer", "load_tokenizer"]

REPLACEMENT = "\ufffd"  # what decoding shows for bytes that are not, or not yet, UTF-8
CONTROL, USER_DEFINED = 3, 4  # GGUF token types

# How a byte-level BPE cuts text before merging, by GGUF's name for it: digits one by one (SmolLM), or GPT-2's own rule.
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def load_tokenizer(name_or_path: str | Path) -> "Tokenizer | None":
    """The tokenizer that belongs to a model; None for a directory without one (then prompts are token ids).

    Raises:
        ConfigError: unknown model, or a tokenizer that cannot be read.
    """
    path = resolve_model(name_or_path)
    if path.is_file():
        from .model.gguf import GGUFFile

        return _from_gguf(GGUFFile(path).metadata, path)
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        library = Library.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception for every fault in the file
        raise ConfigError(f"{file} cannot be read ({error}); download it again") from error
    settings = _json(path / "tokenizer_config.json")
    template = path / "chat_template.jinja"
    chat_template = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    return Tokenizer(library, chat_template=chat_template, bos_token=_token_text(settings.get("bos_token")), eos_token=_token_text(settings.get("eos_token")))


class Tokenizer:
    def __init__(self, library: Library, *, chat_template: str | None = None, bos_token: str | None = None, eos_token: str | None = None) -> None:
        self._library = library
        self.chat_template = chat_template
        self.bos_token, self.eos_token = bos_token, eos_token

    @property
    def vocab_size(self) -> int:
        return self._library.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in it (`<|im_end|>`) are those tokens."""
        # A lone surrogate is no character: it becomes what decoding would show for it.
        clean = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        return self._library.encode(clean, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._library.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream_decoder(self) -> "StreamDecoder":
        return StreamDecoder(self)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model was trained to read it.

        Raises:
            RequestError: no template, a message without role and content, or one that the template refuses.
        """
        import jinja2

        if self._template is None:
            raise RequestError("messages: this model has no chat template; send a prompt instead")
        if not messages:
            raise RequestError("messages: is empty; send at least one")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise RequestError(f"messages[{i}]: needs a 'role' and a 'content', both strings")
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt,
                                         bos_token=self.bos_token or "", eos_token=self.eos_token or "")
        except jinja2.TemplateError as error:
            raise RequestError(f"messages: the model's chat template refuses them ({error})") from error

    @cached_property
    def _template(self) -> Any:
        if self.chat_template is None:
            return None
        # A template comes with the weights, from whoever published them: it runs without reach to Python.
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = raise_exception
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        try:
            return environment.from_string(self.chat_template)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template cannot be read ({error}); correct chat_template") from error


class StreamDecoder:
    """Token by token to text, never half a character: `feed` returns what has become certain, `finish` the rest.

    All pieces together are `decode` of all tokens. Some tokenizers write a token differently at the start of a
    text, so each piece is the difference between two decodings that begin at the same earlier token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # from the token at which both decodings begin
        self._settled = 0  # of these, how many are in the text given out
        self._given = ""  # their text

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(REPLACEMENT):
            return ""  # perhaps the first bytes of a character whose rest is still to come
        piece = text[len(self._given):]
        if piece:
            del self._ids[: self._settled]
            self._settled = len(self._ids)
            self._given = self._tokenizer.decode(self._ids)
        return piece

    def finish(self) -> str:
        piece = self._tokenizer.decode(self._ids)[len(self._given):]
        self._ids, self._settled, self._given = [], 0, ""
        return piece


def _from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """A byte-level BPE from `tokenizer.ggml.*`."""
    def field(name: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}")

    tokens, merges, kinds = field("tokens"), field("merges"), field("token_type") or []
    if field("model") != "gpt2" or not tokens or merges is None:
        raise ConfigError(f"{path}: tokenizer.ggml.model='{field('model')}' is not supported; use a GGUF with a byte-level BPE ('gpt2')")
    split = _pre_tokenizer(field("pre") or "default", path)
    try:
        library = Library(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[tuple(merge.split(" ")) for merge in merges]))
    except Exception as error:  # the library raises a bare Exception, e.g. for a merge of unknown tokens
        raise ConfigError(f"{path}: its tokenizer is inconsistent ({error}); download the file again") from error
    library.pre_tokenizer = split
    library.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in zip(tokens, kinds) if kind in (CONTROL, USER_DEFINED)]
    library.add_tokens(special)

    def named(name: str) -> str | None:
        at = field(f"{name}_token_id")
        return tokens[at] if isinstance(at, int) and at < len(tokens) else None

    return Tokenizer(library, chat_template=metadata.get("tokenizer.chat_template"), bos_token=named("bos"), eos_token=named("eos"))


def _pre_tokenizer(name: str, path: Path) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in ("default", "gpt-2"):
        return byte_level
    if name in ("llama-bpe", "llama3"):
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
                                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ConfigError(f"{path}: tokenizer.ggml.pre='{name}' is not known here; use the model's Hugging Face directory with its tokenizer.json")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read ({error}); download it again") from error


def _token_text(value: Any) -> str | None:
    """`tokenizer_config.json` writes a special token as text or as an object with its `content`."""
    return value.get("content") if isinstance(value, Mapping) else value

"""The tokenizer against a plain byte-pair encoder, Hugging Face's reading of the same file, and its own stream."""
import json
import random
from functools import lru_cache

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st
from test_gguf import write
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from minengine.config import ConfigError
from minengine.model.gguf import GGUFFile
from minengine.model.weights import resolve_model
from minengine.request import RequestError
from minengine.tokenizer import LONG_TEXT, load_tokenizer

TEXTS = [
    "", " ", "Hello, world!", "It's what they've said: I'll, we'd, you're.", "IT'S", "a  b   c    d", "tabs\t\tand\n\nlines\r\n  indented\n",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n", '{"a": [1, 2, {"b": null}]}',
    "  12  345", "3.14159", "x1 y22 z333", "2024-01-31T12:00:00Z",
    "caf\u00e9 cafe\u0301 na\u00efve", "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439, \u043c\u0438\u0440",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f600\U0001f3fd \U0001f1eb\U0001f1f7",
    "\u0662\u0663 \u2163 \u00bd \u00b2", "\u00a0\u2003\u3000 wide", "\x00\x01\x7f\u0085\ufeff", "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|", "a<|endoftext|>b", "....!!!???---", " \n \n ",
]


@lru_cache
def smollm2():
    return load_tokenizer("smollm2")


@lru_cache
def plain():
    """Vocabulary, merge ranks and special tokens of the file, for an encoder of a few lines."""
    metadata = GGUFFile(resolve_model("smollm2")).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    special = [token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"]) if kind == 3]
    return {token: id for id, token in enumerate(tokens)}, ranks, special


def alphabet(byte):
    """GPT-2's character for a byte: itself where it is printable Latin-1, else one of the characters from U+0100 on."""
    others = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b)]
    return chr(256 + others.index(byte)) if byte in others else chr(byte)


def plain_encode(text):
    vocabulary, ranks, special = plain()
    ids = []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            ids.append(vocabulary[part])
            continue
        for piece in regex.findall(r"\p{N}|\P{N}+", part):  # digits one by one, then GPT-2's words
            for word in regex.findall(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", piece):
                # The file leaves a few single bytes out; its neighbours are then neighbours of each other, as the library has it.
                symbols = [symbol for symbol in map(alphabet, word.encode()) if symbol in vocabulary]
                while len(symbols) > 1:
                    rank, at = min((ranks.get(pair, 1 << 30), at) for at, pair in enumerate(zip(symbols, symbols[1:])))
                    if rank == 1 << 30:
                        break
                    symbols[at: at + 2] = ["".join(symbols[at: at + 2])]
                ids += [vocabulary[symbol] for symbol in symbols]
    return ids


# --- encode and decode ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_smollm2_encodes_as_a_plain_encoder_does(text):
    assert smollm2().encode(text) == plain_encode(text)


@example("\u00a6\U00082000")  # a byte that the file leaves out, between two that merge
@given(st.text(max_size=60) | st.text(st.sampled_from(" \n\t\r'0123456789abE.\u00e9\u65e5\U0001f600<|im_end|>"), max_size=40))
def test_any_text_encodes_as_a_plain_encoder_does(text):
    assert smollm2().encode(text) == plain_encode(text)


def test_smollm2_encodes_as_hugging_face_does():
    """Their reading of the file does not cut digits apart: texts where that shows are left out."""
    from transformers import AutoTokenizer

    path = resolve_model("smollm2")
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = [text for text in TEXTS if not regex.search(r"\s\s\p{N}|(?![0-9])\p{N}", text)]
    assert len(texts) == len(TEXTS) - 2
    for text in texts:
        ids = theirs.encode(text)
        assert smollm2().encode(text) == ids, text
        assert smollm2().decode(ids, skip_special_tokens=False) == theirs.decode(ids, clean_up_tokenization_spaces=False), text


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_decode_gives_the_text_back(text):
    tokenizer = smollm2()
    ids = tokenizer.encode(text)
    missing = {chr(b) for b in range(128) if alphabet(b) not in plain()[0]}
    if not any(c in missing for c in text):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    bare = regex.sub(r"<\|(im_start|im_end|endoftext)\|>", "", text)
    assert tokenizer.decode(ids) == "".join(c for c in bare if c not in missing)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


def test_special_tokens_are_single():
    tokenizer = smollm2()
    assert tokenizer.encode("<|im_start|>") == [1] and tokenizer.encode("a<|im_end|>b")[1] == 2
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.decode([1, 81, 2]) == "a" and tokenizer.decode([1, 81, 2], skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


def test_token_bytes_and_ids_beyond_the_vocabulary():
    tokenizer = smollm2()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b"" and tokenizer.decode([81, 10**6]) == "a"


# --- stream ---------------------------------------------------------------------------------------------------

def stream(tokenizer, ids, **options):
    decoder = tokenizer.stream_decoder(**options)
    return [decoder.feed(id) for id in ids] + [decoder.finish()]


@given(st.lists(st.integers(0, 49151), max_size=30)
       | st.lists(st.sampled_from([235, 119, 321, 231, 10813, 117, 241, 115, 1, 2, 81, 216]), max_size=20))
def test_streamed_text_is_the_decoded_text(ids):
    """Any tokens, halves of characters too."""
    for skip in (True, False):
        whole = smollm2().decode(ids, skip_special_tokens=skip)
        assert "".join(stream(smollm2(), ids, skip_special_tokens=skip)) == whole == smollm2().backend.decode(ids, skip_special_tokens=skip)


def test_a_character_comes_whole():
    text = "\U0001f469\u200d\U0001f467\u65e5\u672c \u00e9"
    ids = smollm2().encode(text)
    parts = stream(smollm2(), ids)
    assert len(ids) > len(text) and "".join(parts) == text and "" in parts and "\ufffd" not in "".join(parts)
    assert stream(smollm2(), ids[:1])[-1] == smollm2().decode(ids[:1]) == "\ufffd"


# --- a directory's tokenizer.json -----------------------------------------------------------------------------

CORPUS = ["The cache lives where the attention is computed.",
          "caf\u00e9 na\u00efve \u65e5\u672c\u8a9e \U0001f600", "for i in range(10): print(i)"] * 4


def save(folder, backend, config=None, template=None):
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def byte_level():
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                                            special_tokens=["<s>", "</s>"], show_progress=False))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def sentence_piece():
    """Llama 2's kind: spaces as U+2581, unknown characters as bytes."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(["The cache lives where it is computed"] * 3,
                                trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False))
    backend.add_tokens([AddedToken(f"<0x{byte:02X}>", normalized=False) for byte in range(256)])
    model = json.loads(backend.to_str())
    extra = {f"<0x{byte:02X}>": len(model["model"]["vocab"]) + byte for byte in range(256)}
    model["model"]["vocab"] |= extra
    model["added_tokens"] = [token for token in model["added_tokens"] if token["content"] in special]
    return Backend.from_str(json.dumps(model))


def test_special_tokens_around_a_text_are_asked_for(tmp_path):
    backend = byte_level()
    backend.enable_truncation(2)  # some files were saved by a trainer that cut and padded its batches
    backend.enable_padding(length=64)
    tokenizer = save(tmp_path, backend)
    ids = tokenizer.encode("The cache")
    assert ids[0] == 0 and tokenizer.encode("The cache", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "The cache"


def test_a_gguf_says_whether_text_begins_with_a_token(tmp_path):
    bos = ("add_uint32", "tokenizer.ggml.bos_token_id", 39)
    off = load_tokenizer(write(tmp_path / "off.gguf", metadata=[bos]))
    on = load_tokenizer(write(tmp_path / "on.gguf", metadata=[bos, ("add_bool", "tokenizer.ggml.add_bos_token", True)]))
    assert off.encode("ab") == [37] and on.encode("ab") == [39, 37] and on.encode("ab", add_special_tokens=False) == [37]
    long = "ab" * LONG_TEXT
    assert on.encode(long) == [39, *off.encode(long)] == [39, *on.encode(long, add_special_tokens=False)]
    assert on.bos_token == on.eos_token == "<|end|>" and on.chat_template is None


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_any_kind_streams_what_it_decodes(make, tmp_path):
    tokenizer = save(tmp_path, make())
    draw = random.Random(3)
    for text in [*CORPUS[:3], "The \U0001f600 cache", "\u65e5\u672c"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        parts = stream(tokenizer, ids)
        assert "".join(parts) == tokenizer.decode(ids) == text
        assert "\ufffd" not in "".join(parts)
        cut = ids[: draw.randrange(len(ids))]
        assert "".join(stream(tokenizer, cut)) == tokenizer.decode(cut)


def test_bytes_of_sentence_piece_tokens(tmp_path):
    tokenizer = save(tmp_path, sentence_piece())
    ids = tokenizer.encode("The \u00e9", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " The \u00e9"


def test_a_token_of_the_users_is_plain_text(tmp_path):
    """Its name is no run of the byte alphabet; text is never merged into it, and it is not skipped."""
    tokens = [*"abcdefghij", "two \u65e5 words", "<|end|>", "aa"]
    fields = [("add_array", "tokenizer.ggml.tokens", tokens), ("add_array", "tokenizer.ggml.token_type", [1] * 10 + [4, 3, 1]),
              ("add_array", "tokenizer.ggml.merges", ["a a"])]
    tokenizer = load_tokenizer(write(tmp_path / "tiny.gguf", metadata=fields))
    ids = tokenizer.encode("atwo \u65e5 wordsaa<|end|>")
    assert ids == [0, 10, 12, 11] and tokenizer.decode(ids) == "".join(stream(tokenizer, ids)) == "atwo \u65e5 wordsaa"
    assert tokenizer.special_ids == {11} and tokenizer.token_bytes(10) == "two \u65e5 words".encode()


def test_a_directory_without_a_tokenizer_and_one_with_a_broken_one(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read .*; download it again"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("metadata, words", [
    (("add_string", "tokenizer.ggml.model", "llama"), "tokenizer 'llama' .* is not supported; use 'gpt2' with one of gpt-2, smollm, llama-bpe"),
    (("add_string", "tokenizer.ggml.pre", "tekken"), "pre-tokenizer 'tekken' is not supported"),
    (("add_array", "tokenizer.ggml.token_type", [1]), "'tokenizer.ggml.token_type' does not fit its 40 tokens"),
    (("add_array", "tokenizer.ggml.merges", ["a z"]), "its merges do not fit its tokens"),
    (("add_uint32", "tokenizer.ggml.tokens", 3), "'tokenizer.ggml.tokens' is missing"),
])
def test_gguf_tokenizers_that_cannot_be_read(metadata, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(write(tmp_path / "tiny.gguf", metadata=[metadata]))


@pytest.mark.parametrize("pre, pieces", [("gpt-2", ["x", " 1234", " ", " y"]), ("smollm", ["x", " ", "1", "2", "3", "4", " ", " y"]),
                                         ("llama-bpe", ["x", " ", "123", "4", " ", " y"])])
def test_the_file_says_how_text_is_cut(pre, pieces, tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "tiny.gguf", metadata=[("add_string", "tokenizer.ggml.pre", pre)]))
    cut = [piece.replace("\u0120", " ") for piece, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str("x 1234  y")]
    assert cut == pieces


@pytest.mark.parametrize("pre, ids", [("smollm", [0, 1]), ("llama-bpe", [2])])
def test_a_word_that_is_a_token_stays_whole_where_the_file_says_so(pre, ids, tmp_path):
    """Token 2 is "ab", but no merge makes it."""
    fields = [("add_string", "tokenizer.ggml.pre", pre), ("add_array", "tokenizer.ggml.tokens", ["a", "b", "ab", "aa", "<|end|>"]),
              ("add_array", "tokenizer.ggml.token_type", [1, 1, 1, 1, 3]), ("add_array", "tokenizer.ggml.merges", ["a a"])]
    assert load_tokenizer(write(tmp_path / "tiny.gguf", metadata=fields)).encode("ab") == ids


# --- chat -----------------------------------------------------------------------------------------------------

def test_smollm2_s_own_template():
    messages = [{"role": "user", "content": "Hi <b>&'"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    talk = ("<|im_start|>user\nHi <b>&'<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n")
    tokenizer = smollm2()
    assert tokenizer.apply_chat_template(messages) == system + talk + "<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == system + talk
    mine = [{"role": "system", "content": "Be brief."}, *messages]
    assert tokenizer.apply_chat_template(mine).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


def test_template_dialect(tmp_path):
    """What templates expect: a block tag takes its line with it, JSON is not escaped, loops break, a date, tokens by name."""
    template = ("{{ bos_token }}{%- for m in messages %}\n    {% if loop.index0 == 1 %}{% break %}{% endif %}\n{{ m.content }}{% endfor %}\n"
                "{{ tools | tojson }}{{ eos_token }}{{ strftime_now('%Y') | length }}{{ style }}")
    tokenizer = save(tmp_path, byte_level(), {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}, template)
    got = tokenizer.apply_chat_template([{"content": "a"}, {"content": "b"}], tools=[{"name": "caf\u00e9 <&>"}], style="!")
    assert got == '<s>a[{"name": "caf\u00e9 <&>"}]</s>4!'


@pytest.mark.parametrize("config, file, expected", [
    ({"chat_template": "A"}, None, "A"), ({"chat_template": "A"}, "B", "B"), ({}, None, None), (None, "B", "B"),
    ({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}, None, "D"),
])
def test_where_a_template_is_found(config, file, expected, tmp_path):
    assert save(tmp_path, byte_level(), config, file).chat_template == expected


@pytest.mark.parametrize("template, words", [
    (None, "this model has no chat template; send a prompt"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages[0].content + 1 }}", "the chat template refuses them"),
    ("{% for %}", "the chat template refuses them"),
    ("{{ messages.__class__.__mro__ }}", "the chat template refuses them"),
    ("{{ messages.append(1) }}", "the chat template refuses them"),
])
def test_templates_that_refuse(template, words, tmp_path):
    """A template is a stranger's program: it runs in a sandbox."""
    tokenizer = save(tmp_path, byte_level(), {}, template)
    with pytest.raises(RequestError, match=words):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])

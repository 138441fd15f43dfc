"""A tiny model that writes text: random weights, and a byte-level tokenizer of as many tokens, control tokens among them."""
from functools import lru_cache

import torch
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers

from minengine.config import model_config
from minengine.engine_args import EngineArgs
from minengine.engine import LLMEngine
from minengine.model.decoder import Decoder
from minengine.tokenizer import Tokenizer
from tiny_models import LLAMA, RandomWeights

SPECIAL = ["<s>", "</s>", "<|im_start|>"]  # ids 0, 1, 2; 1 ends an answer
MERGED = ['{"', '": ', '", "', 'name', 'age', 'true', 'false', 'null', 'city', '"}', 'call', '<call', '</call>', 'yes', 'no', 'aa', 'bb', '12', '00']


@lru_cache
def tiny_tokenizer() -> Tokenizer:
    alphabet = [chr(byte) for byte in range(0x21, 0x7F)] + ["\u0120", "\u010a", "\u00c3", "\u00a9"]  # a blank, a line's end, two halves of é
    vocabulary = {token: id for id, token in enumerate(SPECIAL + alphabet)}
    merges = []
    for word in MERGED:
        word = word.replace(" ", "\u0120")
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                merges.append((word[:end - 1], word[end - 1]))
                vocabulary[word[:end]] = len(vocabulary)
    assert len(vocabulary) <= LLAMA["vocab_size"]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return Tokenizer(backend, bos_token=SPECIAL[0], eos_token=SPECIAL[1])


@lru_cache
def tiny_writer() -> Decoder:
    config = model_config({**LLAMA, "eos_token_id": 1})
    return Decoder(config, RandomWeights(config, torch.float32, "cpu"))


def text_engine(**options) -> LLMEngine:
    options = {"block_size": 16, "kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 8, **options}
    return LLMEngine(EngineArgs(**options), model=tiny_writer(), tokenizer=tiny_tokenizer())

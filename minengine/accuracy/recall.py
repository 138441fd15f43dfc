"""Recall of glm-mini: records of a text that is read into the cache once, then asked about."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..llm import LLM
from ..request import SamplingParams
from ..workload.recall import ANSWER_TOKENS, Recall
from ..workload.stats import wilson
from .bootstrap import Outcomes

__all__ = ["RecallScore", "recall"]


@dataclass(frozen=True)
class RecallScore:
    """Questions answered in full, over all contexts; `low` and `high` are the 95% interval of their share.

    That interval takes the questions as independent; `interval(score.outcomes)` takes contexts as what is drawn.
    """

    n: int
    right: int
    contexts: int
    answers: tuple[bool, ...]  # each question's, context after context

    @property
    def outcomes(self) -> Outcomes:
        """For `difference`: another format's score of the same seed holds the same questions."""
        return Outcomes.of(self.answers, self.n // self.contexts)

    @property
    def share(self) -> float:
        return self.right / self.n

    @property
    def low(self) -> float:
        return wilson(self.right, self.n)[0]

    @property
    def high(self) -> float:
        return wilson(self.right, self.n)[1]


def recall(llm: LLM, length: int, pairs: int, contexts: int = 10, queries: int = 50, seed: int = 0, zero_kv_cache: bool = False,
           task: Recall = Recall()) -> RecallScore:
    """Ask a recall model for records of texts that it read into its cache.

    A text of `length` tokens is prefilled once; each question is then a request of its own whose prompt starts with
    that text, so all of it comes from the prefix cache, in the engine's row format. An answer counts if both numbers
    are right, greedily decoded.

    Args:
        llm: a model of the recall task ("glm-mini"), with prefix caching, for requests of at least length + 4 tokens.
        length: tokens of a text; a multiple of the engine's block size, so that no part of it is computed again.
        pairs: records in it.
        contexts, queries: texts, and questions a text (drawn with replacement).
        seed: of the texts; the same seed asks the same questions of every format, so that scores can be compared in pairs.
        zero_kv_cache: overwrite the rows with zeros between reading and asking.

    Raises:
        ValueError: a length that is no multiple of the block size.
    """
    block_size = llm.kv_cache.block_size
    if length % block_size:
        raise ValueError(f"length={length}: use a multiple of block_size={block_size}, so that the whole text is served from the cache")
    right: list[bool] = []
    for number in range(contexts):
        episode = task.episode(np.random.default_rng((seed, number)), length, pairs, queries)
        text, questions = episode.context.tolist(), task.questions(episode)
        llm.reset_prefix_cache()
        llm.generate({"prompt_token_ids": text}, SamplingParams(max_tokens=1, temperature=0.0))
        if zero_kv_cache:
            llm.zero_kv_cache()
        prompts = [{"prompt_token_ids": text + question[:2].tolist()} for question in questions]
        answers = llm.generate(prompts, SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True))
        right += [tuple(out.outputs[0].token_ids) == tuple(question[2:4]) for out, question in zip(answers, questions)]
    return RecallScore(len(right), sum(right), contexts, tuple(right))

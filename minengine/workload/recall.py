"""Associative recall: a text that hides name-and-number records in filler, and questions that only its reader can answer.

    of the duze 197 004 river and fefa 033 150 was ... ? fefa 033 150 . ? duze 197 004 .

A record is a name and two numbers; a question is `?` and a name, the answer its two numbers and a full stop. Names
and numbers are paired anew in every text, so no weight can hold an answer: it is in the cache or it is lost. glm-mini
is trained on this task, and the book measures with it what a cache row's bits are worth.

Torch-free. Words are tokens: one id each, in the order of `Recall.words`.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["Episode", "Recall"]

UNKNOWN, STOP, ASK = "<unk>", ".", "?"
FILLER = (
    "the a of and to in it is was on for with as at by from that this we you he she they one two many over under near "
    "river road house stone field tree light water wind night day hill bird horse ship town door wall garden bread "
    "winter summer old new long small quiet green then when while after before again still"
).split()
ANSWER_TOKENS = 2  # numbers of one record
RECORD_TOKENS, QUERY_TOKENS = 1 + ANSWER_TOKENS, 3 + ANSWER_TOKENS  # name 197 004; ? name 197 004 .


@dataclass(frozen=True)
class Episode:
    """One text: ids of its context, its records, and which of them are asked for, in order."""

    context: np.ndarray  # (T,) int64
    names: np.ndarray  # (pairs,) ids
    numbers: np.ndarray  # (pairs, 2) ids
    asked: np.ndarray  # (queries,) indices of records, drawn with replacement


@dataclass(frozen=True)
class Recall:
    """The task's vocabulary and its texts.

    Queries are drawn with replacement: with each record asked once, a model can learn to name what is left over
    instead of looking anything up.
    """

    num_names: int = 256
    num_numbers: int = 256

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The vocabulary: the word with id i is words[i]."""
        syllables = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou"]
        names = [syllables[i % 80] + syllables[(7 * i + 13 * (i // 80)) % 80] for i in range(self.num_names)]
        return (UNKNOWN, STOP, ASK, *FILLER, *names, *(f"{i:03d}" for i in range(self.num_numbers)))

    @property
    def first_name(self) -> int:
        return 3 + len(FILLER)

    @property
    def first_number(self) -> int:
        return self.first_name + self.num_names

    def episode(self, rng: np.random.Generator, length: int, pairs: int, queries: int) -> Episode:
        """A context of `length` tokens with `pairs` records in random places, filler between them.

        Filler includes the unknown word and the full stop, so that a reader's own prose may surround the records.

        Raises:
            ValueError: the records do not fit, or need more names than there are.
        """
        filler = length - RECORD_TOKENS * pairs
        if not 1 <= pairs <= self.num_names or filler < 0:
            raise ValueError(f"pairs={pairs}: use 1 to {min(self.num_names, length // RECORD_TOKENS)}, what {length} tokens and "
                             f"{self.num_names} names allow")
        names = rng.permutation(self.num_names)[:pairs] + self.first_name
        numbers = rng.integers(self.num_numbers, size=(pairs, ANSWER_TOKENS)) + self.first_number
        is_record = np.zeros(pairs + filler, bool)
        is_record[:pairs] = True
        rng.shuffle(is_record)
        lengths = np.where(is_record, RECORD_TOKENS, 1)
        starts = np.cumsum(lengths) - lengths
        context = np.empty(length, np.int64)
        fill = rng.integers(len(FILLER) + 2, size=filler)  # 0: unknown, 1: full stop, then the words
        context[starts[~is_record]] = np.where(fill < 2, fill, fill + 1)  # skips the question mark
        first = starts[is_record]
        context[first], context[first + 1], context[first + 2] = names, numbers[:, 0], numbers[:, 1]
        return Episode(context, names, numbers, rng.integers(pairs, size=queries))

    def questions(self, episode: Episode) -> np.ndarray:
        """The asked records as `? name number number .`: (queries, 5) ids."""
        names, numbers = episode.names[episode.asked], episode.numbers[episode.asked]
        ask, stop = (np.full(len(names), self.words.index(mark)) for mark in (ASK, STOP))
        return np.stack((ask, names, numbers[:, 0], numbers[:, 1], stop), axis=1)

    def text(self, ids: np.ndarray) -> str:
        """Ids as words with single spaces."""
        return " ".join(self.words[i] for i in ids)

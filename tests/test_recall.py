"""The recall task: its texts hold what they claim to hold."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minengine.workload.recall import FILLER, Recall


def test_the_vocabulary_has_no_word_twice():
    words = Recall(512, 1000).words
    assert len(set(words)) == len(words) == 3 + len(FILLER) + 512 + 1000
    task = Recall()
    assert task.words[task.first_number] == "000" and task.words[-1] == "255" and task.words[:3] == ("<unk>", ".", "?")


@given(st.data())
def test_an_episode_holds_its_records_once_and_filler_for_the_rest(data):
    task = Recall(16, 8)
    pairs = data.draw(st.integers(1, 16))
    length = 3 * pairs + data.draw(st.integers(0, 40))
    seed = data.draw(st.integers(0, 2**32))
    episode = task.episode(np.random.default_rng(seed), length, pairs, queries=5)
    assert episode.context.shape == (length,) and len(set(episode.names)) == pairs
    context = episode.context.tolist()
    for name, numbers in zip(episode.names, episode.numbers):
        at = context.index(name)
        assert context[at + 1 : at + 3] == numbers.tolist() and context.count(name) == 1
    rest = [id for id in context if id < task.first_name]
    assert len(rest) == length - 3 * pairs and task.words.index("?") not in rest
    questions = task.questions(episode)
    assert [[task.words[id] for id in row][::4] for row in questions] == [["?", "."]] * 5
    assert questions[:, 1].tolist() == episode.names[episode.asked].tolist()
    assert questions[:, 2:4].tolist() == episode.numbers[episode.asked].tolist()
    again = task.episode(np.random.default_rng(seed), length, pairs, queries=5)
    assert (again.context == episode.context).all() and (again.asked == episode.asked).all()


def test_every_kind_of_filler_and_every_number_turns_up():
    task = Recall(4, 8)
    seen = np.concatenate([task.episode(np.random.default_rng(seed), 400, 4, 1).context for seed in range(30)])
    assert set(seen) == set(range(len(task.words))) - {task.words.index("?")}


@pytest.mark.parametrize("length, pairs", [(5, 2), (100, 0), (100, 17), (0, 1)])
def test_records_that_do_not_fit_are_refused(length, pairs):
    with pytest.raises(ValueError, match=f"pairs={pairs}: use 1 to"):
        Recall(16, 8).episode(np.random.default_rng(0), length, pairs, 1)

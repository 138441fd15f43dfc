"""The training of glm-mini: the differentiable model is the engine's, a stopped run goes on as if it had not stopped."""
import json

import numpy as np
import pytest
import torch
from model_harness import Requests

from minengine.config import ConfigError, model_config
from minengine.model.decoder import load_model
from minengine.tokenizer import load_tokenizer
from minengine.train.mini import CONFIG, Stage, Trainer, export, tokenizer
from minengine.train.network import Lesson, Network
from minengine.workload.recall import Recall

SMALL = dict(CONFIG, hidden_size=32, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, intermediate_size=48,
             moe_intermediate_size=8, index_topk=24, index_head_dim=16)
SHORT = ((Stage(32, 4, 2, 3, helper=True),), (Stage(48, 2, 3, 1, indexers_only=True), Stage(48, 2, 3, 2, top_k=24, rate=0.5)))


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(3)
    network = Network(model_config(SMALL)).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1:  # norms, none at its neutral value
                parameter.add_(0.2 * torch.randn_like(parameter))
        for layer in network.layers[1:]:
            layer.mlp.correction.normal_(std=0.1)
    return network


@pytest.fixture(scope="module")
def folder(network, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    export(network, folder, SMALL)
    return folder


def rounded(network):
    """The network with the weights that `export` writes."""
    twin = Network(network.config).eval()
    twin.load_state_dict({name: t if name.endswith("correction") else t.bfloat16().float() for name, t in network.state_dict().items()})
    return twin


@pytest.mark.parametrize("length", [20, 100])  # below index_topk, and four times it
def test_its_logits_are_the_engines(network, folder, length):
    """Keys and values of every head written out, against the absorbed form on a paged cache; the indexers choose alike."""
    ids = torch.randint(len(Recall().words), (length,), generator=torch.Generator().manual_seed(length))
    with torch.inference_mode():
        expected = rounded(network)(ids[None], torch.arange(length)[None], lesson=Lesson(top_k=SMALL["index_topk"]))[0][0]  # (T, vocab)
    got = Requests(load_model(folder, "float32"), {"one": ids}).run({"one": length - 5})["one"]
    assert (got - expected).abs().max() <= 1e-4 * expected.std()
    if length > SMALL["index_topk"]:
        with torch.inference_mode():
            dense = rounded(network)(ids[None], torch.arange(length)[None])[0][0]
        assert (got - dense).abs().max() > 1e-2 * expected.std()  # so the choice mattered


def test_an_indexer_learns_from_attention_and_the_model_not_from_it(network):
    ids, queries = torch.randint(100, (2, 40)), torch.tensor([[39, 20, 0], [5, 38, 39]])
    lesson = Lesson(queries)
    network.zero_grad()
    network(ids, torch.arange(40).expand(2, -1), lesson=lesson)
    lesson.index_loss().backward()
    with_gradient = {name for name, p in network.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert with_gradient and all(".indexer." in name for name in with_gradient)
    for layers, kinds in zip(lesson.attention, ([1], [1, 1])):  # full | full, shared: two layers use the second choice
        assert len(layers) == len(kinds)
        for attention in layers:
            assert torch.allclose(attention.sum(-1), torch.ones(2, 3), atol=1e-5)
            assert not attention[0, 2, 1:].any() and not attention[1, 0, 6:].any()  # nothing after the query


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path):
    whole = Trainer(tmp_path / "whole", SMALL, SHORT)
    whole.run()
    Trainer(tmp_path / "parts", SMALL, SHORT).run(4)  # into the second stage
    rest = Trainer(tmp_path / "parts", SMALL, SHORT)
    assert rest.step == 4
    rest.run()
    for (name, one), two in zip(whole.network.state_dict().items(), rest.network.state_dict().values()):
        assert torch.equal(one, two), name
    logs = [[json.loads(line) for line in (tmp_path / run / "training.jsonl").read_text().splitlines()] for run in ("whole", "parts")]
    assert [line["loss"] for line in logs[0]][-1] == [line["loss"] for line in logs[1]][-1] and logs[0][-1]["step"] == 6


def test_a_state_of_another_recipe_or_a_damaged_one_is_refused(tmp_path):
    Trainer(tmp_path, SMALL, SHORT).run(1)
    with pytest.raises(ConfigError, match="another recipe.*--out"):
        Trainer(tmp_path, SMALL, SHORT, seed=1)
    (tmp_path / "training.pt").write_bytes(b"half a file")
    with pytest.raises(ConfigError, match="cannot be read.*delete it"):
        Trainer(tmp_path, SMALL, SHORT)
    assert Trainer(tmp_path, SMALL, SHORT, resume=False).step == 0


def test_a_little_training_lowers_the_loss(tmp_path):
    trainer = Trainer(tmp_path, SMALL, ((Stage(24, 16, 2, 100, helper=True),),), task=Recall(8, 8))
    losses = [trainer._learn(trainer.stages[0])["loss"] for trainer.step in range(100)]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


class TestTokenizer:
    def test_a_word_is_a_token_and_text_comes_back(self, folder):
        task, mine = Recall(), load_tokenizer(folder)
        ids = np.arange(1, len(task.words))
        assert mine.encode(task.text(ids)) == ids.tolist()
        assert mine.decode(ids) == " " + task.text(ids)
        stream = mine.stream_decoder()
        assert "".join([*map(stream.feed, ids.tolist()), stream.finish()]) == " " + task.text(ids)

    @pytest.mark.parametrize("text, words", [
        ("Duze 197\n\n 004.", ["duze", "197", "004", "."]),
        ("river?duze", ["river", "?", "duze"]),
        ("  unheard duze  ", ["<unk>", "duze"]),
        ("", []), ("  ", []),
    ])
    def test_spaces_case_and_marks_do_not_matter(self, text, words):
        assert [Recall().words[id] for id in tokenizer(Recall()).encode(text).ids] == words

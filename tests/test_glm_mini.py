"""The model that the project ships: it loads everywhere, it is what transformers says it is, and it needs its cache."""
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from model_harness import Requests

from minengine import LLM, SamplingParams, list_models
from minengine.accuracy import recall
from minengine.cli import main
from minengine.model.decoder import load_model
from minengine.model.weights import resolve_model
from minengine.train.mini import CONFIG, ROUNDS
from minengine.workload.recall import Recall

FOLDER = resolve_model("glm-mini")
RESULTS = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
# Records within the first two blocks of 16, filler after them: all of them are served from the cache when a question follows.
TEXT = ("of the duze 197 004 and by that fefa 158 203 water garden puro 141 026 under the tree miba 251 084 . "
        "it was a long and quiet winter before the bird and the ship , again and again and still ")


def test_it_has_the_parts_that_the_book_needs():
    config = json.loads((FOLDER / "config.json").read_text())
    assert config == CONFIG and "glm-mini" in list_models()
    assert config["index_n_heads"] >= 8 and config["num_attention_heads"] >= 8 and config["kv_lora_rank"] % 16 == 0
    assert set(config["indexer_types"]) == {"full", "shared"} and config["mlp_layer_types"][0] == "dense" and config["n_shared_experts"] >= 1
    assert config["index_topk"] * 16 <= 4096 <= config["max_position_embeddings"]
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 5 * 2**20


def test_its_logits_are_those_of_transformers():
    """Real weights, a real text, three times index_topk tokens."""
    from transformers import GlmMoeDsaForCausalLM

    task = Recall()
    ids = {}
    for name, length, pairs in (("long", 400, 60), ("short", 50, 8)):
        episode = task.episode(np.random.default_rng(length), length, pairs, queries=2)
        ids[name] = torch.from_numpy(np.concatenate((episode.context, task.questions(episode).reshape(-1))))
    model = GlmMoeDsaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager").eval()
    got = Requests(load_model("glm-mini"), ids).run({"long": 360, "short": 40})
    for name in ids:
        with torch.inference_mode():
            expected = model(ids[name][None]).logits[0]
        assert (got[name] - expected).abs().max() <= 1e-4 * expected.abs().max(), name


def score(kv_cache_dtype, length=1024, pairs=64, contexts=4, queries=50, **options):
    llm = LLM("glm-mini", kv_cache_dtype=kv_cache_dtype, max_num_seqs=queries, num_threads=1, max_model_len=length + 64,
              num_gpu_blocks_override=length // 64 + 2 * queries)
    return recall(llm, length, pairs, contexts, queries, seed=77, **options)


@pytest.mark.parametrize("length", [256, 1024, 4096])
def test_it_recalls_in_16_bit_rows(length):
    assert score("bfloat16", length).share >= 0.97  # n = 200; the card has the 2,000


def test_fewer_bits_lose_by_degrees_and_zeros_lose_all():
    four, three, two = (score(name, pairs=128) for name in ("int4", "int3", "int2"))
    full, cleared = score("bfloat16", pairs=128), score("bfloat16", pairs=128, zero_kv_cache=True)
    assert full.right >= four.right > three.right > two.right and three.high < full.low and two.high < three.low
    assert cleared.share <= 0.02


def test_the_card_says_what_was_measured():
    card = (FOLDER / "README.md").read_text()
    rows = {tuple(cell.strip().replace(",", "") for cell in row.strip("|").split("|")) for row in re.findall(r"^\|.*\|$", card, re.MULTILINE)}
    for result in RESULTS["by_length"]:
        assert (str(result["length"]), str(result["pairs"]), f"{result['share']:.4f}", f"{result['low']:.4f} to {result['high']:.4f}", str(result["n"])) in rows
    for result in RESULTS["by_format"]:
        assert any(row[1:] == (f"{result['share']:.4f}", f"{result['low']:.4f} to {result['high']:.4f}", str(result["n"])) and result["kv_cache_dtype"] in row[0]
                   for row in rows)
    sixteen = {(r["length"], r["pairs"]): r for r in RESULTS["by_length"]}
    assert all(sixteen[length, 64]["share"] >= 0.99 and sixteen[length, 64]["n"] >= 2000 for length in (256, 1024, 4096))
    example = re.search(r'minengine generate --model glm-mini "(.*)"', card)[1]
    assert LLM("glm-mini", num_threads=1).generate(example, SamplingParams(temperature=0.0))[0].outputs[0].text == " 158 203"


class TestCommand:
    def test_an_answer_and_none_once_the_cache_is_zeros(self, capsys):
        arguments = ["generate", "--model", "glm-mini", "--block-size", "16", "--num-threads", "1", TEXT + "? fefa", TEXT + "? puro"]
        assert main(arguments) == 0
        assert [line[-7:] for line in capsys.readouterr().out.splitlines()] == ["158 203", "141 026"]
        assert main([*arguments, "--zero-kv-cache"]) == 0
        out = capsys.readouterr()
        assert "158 203" not in out.out.replace(TEXT, "") and "141 026" not in out.out.replace(TEXT, "") and "(32 cached)" in out.err

    def test_a_prompt_shorter_than_a_block_is_refused(self, capsys):
        assert main(["generate", "--model", "glm-mini", "--zero-kv-cache", "--num-threads", "1", "duze 197 004 ? duze"]) == 2
        assert "use a longer prompt or --block-size 16" in capsys.readouterr().err

    def test_a_folder_called_like_the_model_is_measured_itself(self, tmp_path, monkeypatch):
        """`train-mini` writes to ./glm-mini unless told otherwise: what it then measures must be that model."""
        from minengine.train import card, mini

        measured = []
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(mini, "Trainer", lambda folder, resume: SimpleNamespace(run=lambda: None, network=None))
        monkeypatch.setattr(mini, "export", lambda network, folder: folder.mkdir())
        monkeypatch.setattr(card, "measure", lambda folder: measured.append(resolve_model(str(folder))))
        monkeypatch.setattr(card, "write_card", lambda *arguments: None)
        assert main(["train-mini"]) == 0
        assert measured == [tmp_path / "glm-mini"]

    def test_training_from_the_command_line_resumes(self, tmp_path):
        """Killed in the middle, started again: the second run begins where the first saved."""
        code = ("import minengine.train.mini as mini; from minengine.cli import main; import sys\n"
                "mini.SAVE_EVERY = 1\n"
                "whole = mini.Trainer.run\n"
                "def run(self, steps=None):\n"
                "    print('starts at', self.step); whole(self, int(sys.argv[2])); sys.exit(0)\n"
                "mini.Trainer.run = run\n"
                "main(['train-mini', '--out', sys.argv[1]])\n")
        starts = [subprocess.run([sys.executable, "-c", code, str(tmp_path), steps], capture_output=True, text=True, timeout=300) for steps in "12"]
        assert [run.stdout.strip() for run in starts] == ["starts at 0", "starts at 1"], starts[-1].stderr
        assert f"1/{sum(stage.steps for stages in ROUNDS for stage in stages)} [" in starts[0].stderr  # the bar

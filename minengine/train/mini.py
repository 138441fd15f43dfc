"""Train glm-mini on associative recall: fixed seed, fixed number of steps, resumable, one thread.

What makes it learn in minutes:
- a curriculum of lengths: among three records the lookup is soon found, longer texts only sharpen it;
- a helper task on the first layer (name the two tokens before this one), dropped after the short texts: a lookup
  needs rows that know what stood before them, and nothing else rewards the first layer for that;
- Muon for the inner matrices: the lookup appeared after some 300 steps, with AdamW alone not within 400;
- positions with random gaps in half of the texts, so that the distances of long texts are no news;
- dense attention first, with indexers that imitate it (see `network`), then the indexers' own choice; and a second round
  that begins with the indexers alone, since they lag behind a model that moves.
"""
from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from ..config import ConfigError, GlmConfig, model_config
from ..workload.recall import ANSWER_TOKENS, ASK, QUERY_TOKENS, RECORD_TOKENS, STOP, UNKNOWN, Recall
from .network import Lesson, Network

__all__ = ["CONFIG", "ROUNDS", "Stage", "Trainer", "export", "train_mini"]

TASK = Recall()
CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16", "vocab_size": len(TASK.words), "hidden_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 48, "intermediate_size": 256, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full", "full", "shared"], "index_topk": 256, "index_n_heads": 8,
    "index_head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": False,
    "max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 200.0}, "rope_interleave": True,
    "bos_token_id": None, "eos_token_id": TASK.words.index(STOP), "pad_token_id": None,
}
WARM_UP, LEARNING_RATE, HELPER_WEIGHT = 50, 3e-3, 0.5
LOG_EVERY, SAVE_EVERY = 20, 50


@dataclass(frozen=True)
class Stage:
    """A stretch of steps on texts of one length."""

    length: int  # tokens of a text, its questions included
    batch: int
    queries: int
    steps: int
    top_k: int | None = None  # attend to the indexers' best so many; None: to all
    helper: bool = False
    indexers_only: bool = False  # the rest of the model stands still
    rate: float = 1.0  # of the learning rate
    fewest: int = 10  # a text has at least one in so many of the records that fit


ROUNDS = (
    (
        Stage(32, 96, 4, 250, helper=True),
        Stage(64, 64, 6, 250, helper=True),
        Stage(128, 24, 10, 200, helper=True),
        Stage(256, 16, 16, 200),
        Stage(1024, 4, 64, 250),
        Stage(1024, 4, 64, 250, top_k=128),
        Stage(4096, 1, 128, 150, top_k=128),
    ),
    (
        Stage(1024, 4, 64, 300, indexers_only=True),
        Stage(1024, 4, 64, 60, top_k=256, rate=0.15),
        Stage(4096, 1, 128, 40, top_k=256, rate=0.15),
    ),
    (
        Stage(1024, 4, 64, 60, top_k=256, rate=0.15, fewest=100),
        Stage(4096, 1, 128, 60, top_k=256, rate=0.15, fewest=100),
    ),
)


class Trainer:
    """
    Args:
        rounds: stages; over each round the learning rate warms up, stays, and falls.
        folder: where `training.pt` (to resume from) and `training.jsonl` (the log) are kept.
        resume: go on from `training.pt` where there is one; the result is the one of a run never stopped.
    """

    def __init__(self, folder: Path, config: dict[str, Any] = CONFIG, rounds: Sequence[Sequence[Stage]] = ROUNDS, task: Recall = TASK, seed: int = 0,
                 resume: bool = True) -> None:
        parsed = model_config(config)
        assert isinstance(parsed, GlmConfig)
        self.folder, self.rounds, self.task, self.seed = folder, rounds, task, seed
        self.recipe = {"config": config, "rounds": [[asdict(stage) for stage in stages] for stages in rounds], "seed": seed}
        self.step, self.seconds = 0, 0.0
        self.log: list[dict[str, Any]] = []
        torch.manual_seed(seed)
        self.network = Network(parsed)
        self.helper = torch.nn.Linear(parsed.hidden_size, 2 * parsed.hidden_size, bias=False)
        self.optimizers = _optimizers(self.network, self.helper)
        folder.mkdir(parents=True, exist_ok=True)
        if resume and (folder / "training.pt").is_file():
            self._load()

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def stages(self) -> list[Stage]:
        return [stage for stages in self.rounds for stage in stages]

    def run(self, steps: int | None = None) -> None:
        """Train up to step `steps` (default: to the end), with a progress bar, saving as it goes."""
        from tqdm import tqdm

        end = self.steps if steps is None else min(steps, self.steps)
        with tqdm(total=self.steps, initial=self.step, desc="glm-mini", unit="step", dynamic_ncols=True) as bar:
            while self.step < end:
                start = time.perf_counter()
                stage = self._stage()
                losses = self._learn(stage)
                self.step += 1
                self.seconds += time.perf_counter() - start
                if self.step % LOG_EVERY == 0 or self.step == end:
                    self.log.append({"step": self.step, "length": stage.length, "top_k": stage.top_k, "seconds": round(self.seconds, 1), **losses})
                    bar.set_postfix(length=stage.length, loss=f"{losses['loss']:.3f}", recall=f"{losses['recall']:.3f}")
                bar.update()
                if self.step % SAVE_EVERY == 0 or self.step == end:
                    self._save()

    def _stage(self) -> Stage:
        left = self.step
        for stage in self.stages:
            if left < stage.steps:
                return stage
            left -= stage.steps
        raise IndexError(f"step {self.step} is past the last of {self.steps}")

    def _learn(self, stage: Stage) -> dict[str, float]:
        """One step on texts that depend on seed and step alone."""
        rng = np.random.default_rng((self.seed, self.step))
        ids, positions, asks = (torch.from_numpy(part) for part in self._texts(rng, stage))
        at = (asks.unsqueeze(-1) + torch.arange(ANSWER_TOKENS + 1)).flatten(1)  # (B, Q * 3): after the name, after each number
        some = torch.from_numpy(rng.integers(stage.length, size=(stage.batch, 64)))
        lesson = Lesson(torch.cat((at[:, :: max(1, at.shape[1] // 96)], some), dim=1), stage.top_k)
        self.network.train(not stage.indexers_only)  # evaluation: the routers' corrections stand still too
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(not stage.indexers_only or ".indexer." in name)
        logits, first = self.network(ids, positions, at, lesson)  # (B, Q * 3, vocab)
        wanted = ids.gather(1, at + 1)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        index_loss = lesson.index_loss()
        total = index_loss if stage.indexers_only else loss + index_loss
        if stage.helper:
            total = total + HELPER_WEIGHT * self._helper_loss(first, ids)
        self.network.zero_grad(set_to_none=True)
        self.helper.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * stage.rate * self._rate()
            optimizer.step()
        right = (logits.argmax(-1) == wanted).unflatten(1, (-1, ANSWER_TOKENS + 1))[..., :ANSWER_TOKENS].all(-1)
        return {"loss": round(loss.item(), 4), "index_loss": round(index_loss.item(), 4), "recall": round(right.float().mean().item(), 4)}

    def _texts(self, rng: np.random.Generator, stage: Stage) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(B, T) ids, (B, T) positions and (B, Q) where the asked names stand."""
        room = stage.length - QUERY_TOKENS * stage.queries
        most = min(self.task.num_names, int(0.95 * room) // RECORD_TOKENS)
        asks = room + QUERY_TOKENS * np.arange(stage.queries) + 1
        ids, positions = [], []
        for _ in range(stage.batch):
            episode = self.task.episode(rng, room, int(rng.integers(max(1, most // stage.fewest), most + 1)), stage.queries)
            ids.append(np.concatenate((episode.context, self.task.questions(episode).reshape(-1))))
            steps = np.ones(stage.length, np.int64)
            steps[0] = 0
            if rng.random() < 0.5:
                gap = rng.integers(CONFIG["max_position_embeddings"] - stage.length)
                np.add.at(steps, rng.integers(1, stage.length, size=8), rng.multinomial(gap, np.full(8, 1 / 8)))
            positions.append(np.cumsum(steps))
        return np.stack(ids), np.stack(positions), np.tile(asks, (stage.batch, 1))

    def _helper_loss(self, first: Tensor, ids: Tensor) -> Tensor:
        """From the first layer's output, the token before and the one before that."""
        hidden = F.rms_norm(self.helper(first[:, 2:]).unflatten(-1, (2, -1)), (first.shape[-1],))  # (B, T - 2, 2, hidden)
        logits = F.linear(hidden, self.network.embed_tokens.weight)
        return 2 * F.cross_entropy(logits.flatten(0, 2), torch.stack((ids[:, 1:-1], ids[:, :-2]), dim=-1).flatten())

    def _rate(self) -> float:
        """Within a round: warm-up, a plateau for two thirds of the steps, then a cosine down to a fiftieth."""
        at = self.step
        for stages in self.rounds:
            steps = sum(stage.steps for stage in stages)
            if at < steps:
                break
            at -= steps
        warm = min(1.0, (at + 1) / WARM_UP)
        late = max(0.0, 3 * at / steps - 2)
        return warm * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * late)))

    def _save(self) -> None:
        state = {"recipe": self.recipe, "step": self.step, "seconds": self.seconds, "log": self.log, "network": self.network.state_dict(),
                 "helper": self.helper.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}
        unfinished = self.folder / "training.pt.new"
        torch.save(state, unfinished)
        unfinished.replace(self.folder / "training.pt")
        (self.folder / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.log))

    def _load(self) -> None:
        path = self.folder / "training.pt"
        try:
            state = torch.load(path, weights_only=True)
        except Exception as error:  # whatever a damaged file makes the reader raise
            raise ConfigError(f"{path} cannot be read ({error}); delete it to start anew") from error
        if not isinstance(state, dict) or state.get("recipe") != self.recipe:
            raise ConfigError(f"{path} belongs to another recipe (seed, rounds or sizes); use another --out, or delete it to start anew")
        self.step, self.seconds, self.log = state["step"], state["seconds"], state["log"]
        self.network.load_state_dict(state["network"])
        self.helper.load_state_dict(state["helper"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)


def _optimizers(network: Network, helper: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the matrices between layers, AdamW for tables, routers and vectors."""
    tables = ("embed_tokens.weight", "lm_head.weight", "gate.weight", "weights_proj.weight")
    parameters = [*network.named_parameters(), *helper.named_parameters()]
    inner = [p for name, p in parameters if p.dim() == 2 and not name.endswith(tables)]
    outer = [p for name, p in parameters if p.dim() != 2 or name.endswith(tables)]
    return [torch.optim.Muon(inner, lr=LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outer, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)]


def export(network: Network, folder: Path, config: dict[str, Any] = CONFIG, task: Recall = TASK) -> None:
    """Write what `LLM(folder)` and transformers load: config, bfloat16 weights (the router's correction stays float32), tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: tensor.contiguous() if name.endswith("correction_bias") else tensor.bfloat16().contiguous() for name, tensor in network.weights().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(task).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": STOP, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")


def tokenizer(task: Recall) -> Tokenizer:
    """A word is a token, the space before it included; the marks of a question stand alone whatever they touch."""
    mark = "\u2581"  # stands for the space
    words = {word if word == UNKNOWN else mark + word: id for id, word in enumerate(task.words)}
    backend = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    apart = [normalizers.Replace(sign, f" {sign} ") for sign in (ASK, STOP)]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *apart, normalizers.Prepend(" "), normalizers.Replace(Regex(r"\s+"), " "),
                                               normalizers.Replace(Regex(" $"), "")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(mark, "never")
    backend.decoder = decoders.Metaspace(mark, "never")
    return backend


def train_mini(folder: Path, resume: bool = True) -> None:
    """The whole of it: train, export, measure through the engine, write the card. One thread, so that it is the same everywhere.

    Raises:
        ConfigError: `training.pt` in the folder cannot be read or belongs to another recipe.
    """
    from .card import measure, write_card

    torch.set_num_threads(1)
    folder = folder.resolve()  # a path with a slash in it: never the name of a packaged model
    trainer = Trainer(folder, resume=resume)
    trainer.run()
    export(trainer.network, folder)
    write_card(folder, measure(folder), trainer)
    print(f'{folder} holds the model; LLM("{folder}") loads it, and README.md is its card')

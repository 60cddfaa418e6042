"""Train one kind of head from a frozen model's own predictions, within a time limit; evaluate by draft position."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_model.optimizer import Muon
from demo_model.train import Windows, learning_rate_factor
from torch import Tensor, nn
from tqdm import tqdm

from draft_heads.kinds import HeadsConfig, build_head
from draft_heads.teacher import Lesson, Teacher
from draft_heads.text import Text

SYNC_STEPS = 10
_OWN_KEYS = {
    "medusa": ("num_heads", "num_blocks"),
    "mtp": ("num_steps",),
    "eagle": ("num_steps", "draft_vocab_size", "intermediate_size"),
    "draft": ("draft_vocab_size", "hidden_size", "intermediate_size", "num_layers"),
}
STEP_WEIGHT = 0.8  # weight of each draft position relative to the one before it


class Trainer:
    """A head, its optimizers and counters; one thread."""

    def __init__(self, config: HeadsConfig, text: Text, held_out: Text) -> None:
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high")
        self.config = config
        self.started = time.monotonic()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.teacher = Teacher(config.model_dir, self.device)
        self.windows = self._windows(text)
        self.held_out = self._windows(held_out)
        self.head = build_head(config, self.teacher, self.windows.ids).to(self.device)
        self.num_positions = config.num_positions
        self.optimizers = _optimizers(self.head, config)
        self.step = 0
        self.earlier_seconds = 0.0
        self.history: list[dict[str, float]] = []
        if config.state_path is not None and config.state_path.exists():
            self._load_state(config.state_path)

    def _windows(self, text: Text) -> Windows:
        return Windows(text.ids, self.config.window_tokens, self.device, self.config.seed, text.starts)

    def seconds(self) -> float:
        return self.earlier_seconds + time.monotonic() - self.started

    def progress(self) -> float:
        return max(self.step / self.config.max_steps, self.seconds() / self.config.max_seconds)

    def learn(self, tokens: Tensor, factor: float) -> Tensor:
        """One update; returns the loss, on the device."""
        lesson = self.teacher.read(tokens)
        with self._autocast():
            logits = self.head(lesson, self.num_positions)
        probs = self._targets(lesson)
        losses = [_loss(probs, found, position) for position, found in enumerate(logits)]
        loss = torch.stack([value * STEP_WEIGHT**position for position, value in enumerate(losses)]).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return losses[0].detach()

    def _targets(self, lesson: Lesson) -> Tensor:
        """The model's probabilities after each token, over the tokens that the head can draft."""
        logits, vocabulary = lesson.logits, self.head.vocabulary
        if vocabulary is not None and len(vocabulary) < logits.shape[-1]:
            logits = logits[..., vocabulary.to(self.device)]
        return logits.float().softmax(-1)

    @torch.no_grad()
    def evaluate(self) -> dict[str, list[float]]:
        """Accuracy of each position's best draft (and of each rank) against the model's token, on held-out text.

        given_right: at position j, if all drafts before it were right and the text followed the model.
        """
        ranks = torch.zeros(self.num_positions, 10, device=self.device)
        chains = torch.zeros(self.num_positions, 2, device=self.device)
        for lesson in self._held_out_lessons():
            with self._autocast():
                logits = self.head(lesson, self.num_positions)
            choice = lesson.logits.argmax(-1)
            alive = torch.ones_like(choice, dtype=torch.bool)
            last = choice.shape[1] - self.num_positions - 1
            for position, found in enumerate(logits):
                best = found.topk(10, dim=-1).indices
                if self.head.vocabulary is not None:
                    best = self.head.vocabulary.to(self.device)[best]
                hits = best[:, :last] == choice[:, position + 1 : position + 1 + last, None]
                ranks[position] += hits.sum((0, 1))
                here = alive[:, :last]
                chains[position] += torch.stack([(hits[..., 0] & here).sum(), here.sum()])
                follows = (
                    lesson.tokens[:, position + 2 : position + 2 + last]
                    == choice[:, position + 1 : position + 1 + last]
                )
                alive = here & hits[..., 0] & follows
            count = choice.shape[0] * last
            ranks_of = count
        total = ranks_of * max(1, self._num_batches())
        return {
            "ranks": [[round(float(value) / total, 4) for value in row] for row in ranks],  # type: ignore[misc]
            "given_right": [round(float(hit) / max(1.0, float(of)), 4) for hit, of in chains],
        }

    def _num_batches(self) -> int:
        size = min(self.config.batch_windows, self.held_out.num_windows)
        return max(1, min(self.config.eval_windows, self.held_out.num_windows) // size)

    def _held_out_lessons(self) -> Iterator[Lesson]:
        size = min(self.config.batch_windows, self.held_out.num_windows)
        for part in range(self._num_batches()):
            yield self.teacher.read(self.held_out.at(self.held_out.starts[part * size : (part + 1) * size])[0])

    def save_state(self) -> None:
        path = self.config.state_path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            state = {"head": self.head.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
            state |= {"step": self.step, "seconds": self.seconds(), "history": self.history}
            torch.save(state, path)

    def _load_state(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        self.step, self.earlier_seconds, self.history = state["step"], state["seconds"], state["history"]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")


def train(config: HeadsConfig, text: Text, held_out: Text) -> Trainer:
    """Run the training. Saves the state before the learning rates fall, so that a longer training can resume there."""
    trainer = Trainer(config, text, held_out)
    batches = trainer.windows.batches(config.batch_windows, trainer.step)
    log = _Log(trainer)
    saved = False
    while (progress := trainer.progress()) < 1:
        loss = trainer.learn(next(batches)[0], learning_rate_factor(progress, 0.02, 0.5))
        if trainer.step % SYNC_STEPS == 0 or trainer.progress() >= 1:
            log.write(float(loss))
        if not saved and progress >= 0.5:
            trainer.save_state()
            saved = True
    log.close()
    return trainer


def summary(trainer: Trainer) -> dict[str, Any]:
    """The contents of the checkpoint's training.json."""
    config = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(trainer.config).items()}
    device = torch.cuda.get_device_name() if trainer.device.type == "cuda" else "CPU"
    tokens = trainer.step * trainer.config.batch_windows * trainer.config.window_tokens
    keys = (
        "kind",
        "batch_windows",
        "window_tokens",
        "muon_lr",
        "adam_lr",
        *_OWN_KEYS[trainer.config.kind],
        "seed",
    )
    return {
        **{key: config[key] for key in keys},
        "steps": trainer.step,
        "tokens_seen": tokens,
        "seconds": round(trainer.seconds(), 1),
        "device": device,
        **trainer.evaluate(),
    }


def _loss(probs: Tensor, logits: Tensor, position: int) -> Tensor:
    """Cross-entropy at a draft position: row i against the model's probabilities after token i + 1 + position."""
    ahead = position + 1
    return F.cross_entropy(logits[:, : probs.shape[1] - ahead].float().flatten(0, 1), probs[:, ahead:].flatten(0, 1))


class _Log:
    """A progress bar, metrics.jsonl and, if asked for, tensorboard."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._bar = tqdm(total=1000, desc=trainer.config.kind, bar_format="{l_bar}{bar}{postfix}", mininterval=5)
        self._board: Any = None
        if trainer.config.tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(trainer.config.tensorboard))

    def write(self, loss: float) -> None:
        trainer = self._trainer
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss became {loss} at step {trainer.step}: lower --muon-lr or --adam-lr")
        record = {"step": trainer.step, "seconds": round(trainer.seconds(), 1), "loss": round(loss, 4)}
        trainer.history.append(record)
        with (trainer.config.out_dir / "metrics.jsonl").open("a") as sink:
            sink.write(json.dumps(record) + "\n")
        if self._board is not None:
            self._board.add_scalar("loss", loss, trainer.step)
        self._bar.set_postfix_str(f"step {trainer.step} loss {loss:.3f}", refresh=False)
        self._bar.update(int(1000 * min(1.0, trainer.progress())) - self._bar.n)

    def close(self) -> None:
        self._bar.close()
        if self._board is not None:
            self._board.close()


def _optimizers(head: nn.Module, config: HeadsConfig) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for vocabulary, norms and biases."""
    vocabulary = ("lm_head", "embed_tokens")
    named = dict(head.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and not name.startswith(vocabulary)]
    others = [p for name, p in named.items() if p.dim() < 2 or name.startswith(vocabulary)]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers

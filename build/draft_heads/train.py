"""Train one kind of head from a frozen model's own predictions, within a time limit; evaluate by draft position."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_model.optimizer import Muon
from demo_model.train import Windows, learning_rate_factor
from torch import Tensor, nn
from tqdm import tqdm

from draft_heads.heads import MTP, Eagle, Medusa
from draft_heads.teacher import Lesson, Teacher

SYNC_STEPS = 10
STEP_WEIGHT = 0.8  # weight of each draft position relative to the one before it


@dataclass(frozen=True)
class HeadsConfig:
    """kind: medusa, mtp or eagle. Ends at max_steps or max_seconds, whichever is first; the rates follow the nearer."""

    kind: str
    model_dir: Path
    out_dir: Path
    state_path: Path | None = None
    max_seconds: float = 150.0
    max_steps: int = 1_000_000
    batch_windows: int = 64
    window_tokens: int = 512
    muon_lr: float = 0.01
    adam_lr: float = 0.001
    num_heads: int = 5
    num_blocks: int = 2
    num_steps: int = 4
    draft_vocab_size: int = 2048
    eval_windows: int = 256
    seed: int = 0
    tensorboard: Path | None = None


def build_head(config: HeadsConfig, teacher: Teacher, token_ids: Tensor) -> Medusa | MTP | Eagle:
    """token_ids: of the training text, whose most frequent tokens an EAGLE head can draft."""
    if config.kind == "medusa":
        return Medusa(teacher, config.num_heads, config.num_blocks)
    if config.kind == "mtp":
        return MTP(teacher)
    counts = torch.bincount(token_ids.long(), minlength=teacher.config.vocab_size)
    size = min(config.draft_vocab_size, teacher.config.vocab_size)
    return Eagle(teacher, counts.topk(size).indices.sort().values.cpu())


class Trainer:
    """A head, its optimizers and counters; one thread."""

    def __init__(self, config: HeadsConfig, token_ids: Any, held_out_ids: Any) -> None:
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high")
        self.config = config
        self.started = time.monotonic()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.teacher = Teacher(config.model_dir, self.device)
        self.windows = Windows(token_ids, config.window_tokens, self.device, config.seed)
        self.held_out = Windows(held_out_ids, config.window_tokens, self.device, config.seed)
        self.head = build_head(config, self.teacher, self.windows.ids).to(self.device)
        self.num_positions = config.num_heads if config.kind == "medusa" else config.num_steps
        self.optimizers = _optimizers(self.head, config)
        self.step = 0
        self.earlier_seconds = 0.0
        self.history: list[dict[str, float]] = []
        if config.state_path is not None and config.state_path.exists():
            self._load_state(config.state_path)

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
        logits = lesson.logits
        if isinstance(self.head, Eagle) and len(self.head.vocabulary) < logits.shape[-1]:
            logits = logits[..., self.head.vocabulary.to(self.device)]
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
                if isinstance(self.head, Eagle):
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
            starts = torch.arange(part * size, (part + 1) * size) * self.config.window_tokens
            yield self.teacher.read(self.held_out.at(starts)[0])

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


def train(config: HeadsConfig, token_ids: Any, held_out_ids: Any) -> Trainer:
    """Run the training. Saves the state before the learning rates fall, so that a longer training can resume there."""
    trainer = Trainer(config, token_ids, held_out_ids)
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
        "num_heads",
        "num_blocks",
        "num_steps",
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
    return F.cross_entropy(logits[:, : logits.shape[1] - ahead].float().flatten(0, 1), probs[:, ahead:].flatten(0, 1))


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
    named = dict(head.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and not name.startswith("lm_head")]
    others = [p for name, p in named.items() if p.dim() < 2 or name.startswith("lm_head")]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers

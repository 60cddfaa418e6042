"""Train the demo model on packed token ids, within a time limit, on one GPU (or, for a trial, on the CPU).

Needs torch and numpy only. Writes to the output folder: metrics.jsonl, train.json and the weights as bfloat16
bytes in parts small enough to be copied back one by one; `export` joins them. state.pt allows `--resume`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from demo_model.network import Network, NetworkConfig
from demo_model.optimizer import build_optimizers
from demo_model.pack import load_packed

WEIGHT_PART_BYTES = 15 * 2**20
SYNC_STEPS = 20  # the host reads the clock and the loss this often
GRADIENT_CLIP = 1.0


@dataclass(frozen=True)
class TrainConfig:
    """How to train; it ends at max_steps or max_seconds, whichever comes first, and the schedule follows the nearer."""

    packed_dir: Path
    out_dir: Path
    state_path: Path | None = None
    resume: bool = False
    max_seconds: float = 530.0
    max_steps: int = 1_000_000
    batch_windows: int = 128
    micro_windows: int = 128
    window_tokens: int = 2048
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    warmup: float = 0.01
    decay: float = 0.45
    eval_windows: int = 256
    checkpoint_seconds: float = 150.0
    seed: int = 0
    compile: bool = True


def learning_rate_factor(progress: float, warmup: float, decay: float) -> float:
    """Warm up linearly, hold, then fall linearly to 0.  progress and the two phases are fractions of the training."""
    return max(0.0, min(1.0, (progress + 1e-4) / warmup, (1.0 - progress) / decay))


class Windows:
    """Every window of the corpus once per epoch, in an order and at a shift that depend on seed and epoch alone.

    starts: where texts begin; windows then begin there instead of every window_tokens, without a shift.
    Raises ValueError if not one window fits.
    """

    def __init__(
        self, ids: np.ndarray, window_tokens: int, device: torch.device, seed: int, starts: np.ndarray | None = None
    ) -> None:
        is_short = int(ids.max(initial=0)) < 1 << 15  # uint16 and uint32 have no gather on every device
        self.ids = torch.from_numpy(ids.astype(np.int16 if is_short else np.int32)).to(device)
        self.window_tokens = window_tokens
        self.seed = seed
        if starts is None:
            self.has_shift = True
            self.starts = torch.arange((len(ids) - 1) // window_tokens - 1) * window_tokens
        else:
            self.has_shift = False
            self.starts = torch.from_numpy(starts[starts + window_tokens < len(ids)].astype(np.int64))
        self.num_windows = len(self.starts)
        if not self.num_windows:
            raise ValueError(f"the text has {len(ids)} tokens: too few for windows of {window_tokens}")

    def at(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each [len(starts), window_tokens] int64, of the windows that begin at `starts`."""
        offsets = torch.arange(self.window_tokens + 1, device=self.ids.device)
        rows = self.ids[starts.to(self.ids.device)[:, None] + offsets].long()
        return rows[:, :-1], rows[:, 1:]

    def batches(self, batch_windows: int, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches for ever, from the one that step `first_step` (counted from 0) would have seen."""
        per_epoch = max(1, self.num_windows // batch_windows)
        epoch, skip = divmod(first_step, per_epoch)
        while True:
            order = torch.Generator().manual_seed(self.seed * 1000 + epoch)
            shift = int(torch.randint(self.window_tokens, (1,), generator=order)) if self.has_shift else 0
            starts = self.starts[torch.randperm(self.num_windows, generator=order)] + shift
            for index in range(skip, per_epoch):
                yield self.at(starts[index * batch_windows : (index + 1) * batch_windows])
            epoch, skip = epoch + 1, 0


class Trainer:
    """Network, optimizers and counters of one training; one thread."""

    def __init__(self, config: TrainConfig, network_config: NetworkConfig) -> None:
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high")
        self.config = config
        self.started = time.monotonic()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        residual_dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.network = Network(network_config, residual_dtype).to(self.device)
        self.forward = torch.compile(self.network, dynamic=False) if config.compile else self.network
        self.optimizers = build_optimizers(self.network, config.muon_lr, config.adam_lr)
        self.step = 0
        self.earlier_seconds = 0.0
        self.history: list[dict[str, float]] = []
        if config.resume and config.state_path and config.state_path.exists():
            self.load_state(config.state_path)

    def seconds(self) -> float:
        return self.earlier_seconds + time.monotonic() - self.started

    def progress(self) -> float:
        return max(self.step / self.config.max_steps, self.seconds() / self.config.max_seconds)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def train_step(self, inputs: Tensor, targets: Tensor, factor: float) -> Tensor:
        """One update at `factor` times the peak rates; returns the batch's mean loss (on the device, no sync)."""
        micro = min(self.config.micro_windows, len(inputs))
        num_parts = len(inputs) // micro
        total = torch.zeros((), device=self.device)
        for part in range(num_parts):
            rows = slice(part * micro, (part + 1) * micro)
            with self.autocast():
                loss = self.forward(inputs[rows], targets[rows]) / num_parts
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), GRADIENT_CLIP)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    @torch.no_grad()
    def evaluate(self, windows: Windows) -> float:
        """Mean nats per token over held-out windows (all that fill whole micro-batches, at most eval_windows)."""
        micro = max(1, min(self.config.micro_windows, windows.num_windows))
        count = min(self.config.eval_windows, windows.num_windows) // micro
        losses = []
        for part in range(max(1, count)):
            starts = windows.starts[part * micro : (part + 1) * micro]
            with self.autocast():
                losses.append(float(self.network(*windows.at(starts))))  # uncompiled: not worth a second compilation
        return sum(losses) / len(losses)

    def save_state(self, path: Path) -> None:
        state = {"step": self.step, "seconds": self.seconds(), "history": self.history}
        state["network"] = self.network.state_dict()
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)

    def load_state(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        self.step, self.earlier_seconds, self.history = state["step"], state["seconds"], state["history"]

    def save_weights(self, summary: dict[str, object]) -> None:
        """Write the weights' bfloat16 bytes in parts, with the index that `export` joins them by."""
        out_dir = self.config.out_dir
        tensors = {name: p.detach().to(torch.bfloat16).cpu() for name, p in self.network.named_parameters()}
        raw = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
        for part, start in enumerate(range(0, len(raw), WEIGHT_PART_BYTES)):
            (out_dir / f"weights-{part:03d}.bin").write_bytes(raw[start : start + WEIGHT_PART_BYTES])
        index = {name: list(tensor.shape) for name, tensor in tensors.items()}
        record = {"network": asdict(self.network.config), "tensors": index, "num_bytes": len(raw), **summary}
        (out_dir / "train.json").write_text(json.dumps(record, indent=1))


def train(config: TrainConfig, network_config: NetworkConfig) -> dict[str, object]:
    """Run the whole training; returns the summary that train.json carries."""
    config.out_dir.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, network_config)
    train_ids, _ = load_packed(config.packed_dir, "train")
    held_out_ids, held_out_bytes = load_packed(config.packed_dir, "held_out")
    windows = Windows(train_ids, config.window_tokens, trainer.device, config.seed)
    held_out = Windows(held_out_ids, config.window_tokens, trainer.device, config.seed)
    print(
        f"{sum(p.numel() for p in trainer.network.parameters()):,} parameters, {len(train_ids):,} tokens, "
        f"data ready after {trainer.seconds():.0f} s",
        flush=True,
    )
    run_steps(trainer, windows, held_out)
    loss = trainer.evaluate(held_out)
    summary: dict[str, object] = {
        "steps": trainer.step,
        "seconds": round(trainer.seconds(), 1),
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "CPU",
        "unique_tokens": len(train_ids),
        "tokens_seen": trainer.step * config.batch_windows * config.window_tokens,
        "eval_windows": min(config.eval_windows, held_out.num_windows),
        "held_out_loss": loss,
        "held_out_perplexity": math.exp(loss),
        "held_out_bits_per_byte": loss / math.log(2) * len(held_out_ids) / held_out_bytes,
        "history": trainer.history,
    }
    trainer.save_weights(summary)
    print(json.dumps({key: value for key, value in summary.items() if key != "history"}), flush=True)
    return summary


def run_steps(trainer: Trainer, windows: Windows, held_out: Windows) -> None:
    """Step until the time or the steps are spent, logging every SYNC_STEPS and checkpointing now and then."""
    config = trainer.config
    batches = windows.batches(config.batch_windows, trainer.step)
    checkpointed = trainer.seconds()
    before_decay_saved = trainer.progress() >= 1 - config.decay
    losses: list[Tensor] = []
    with Log(trainer) as log:
        while (progress := trainer.progress()) < 1:
            factor = learning_rate_factor(progress, config.warmup, config.decay)
            losses.append(trainer.train_step(*next(batches), factor))
            if trainer.step % SYNC_STEPS and trainer.progress() < 1:
                continue
            held_out_loss = None
            loss = float(torch.stack(losses).mean())  # waits for the device
            if not math.isfinite(loss):
                raise RuntimeError(f"the loss became {loss} at step {trainer.step}: lower --muon-lr or --adam-lr")
            if not before_decay_saved and config.state_path and progress >= 1 - config.decay:
                trainer.save_state(config.state_path)  # a longer training resumes here, before the rates fell
                before_decay_saved = True
            if trainer.seconds() - checkpointed >= config.checkpoint_seconds:
                held_out_loss = trainer.evaluate(held_out)
                trainer.save_weights({"steps": trainer.step, "seconds": trainer.seconds(), "history": trainer.history})
                checkpointed = trainer.seconds()
            log.write(loss, factor, len(losses), held_out_loss)
            losses = []


class Log:
    """The progress bar, metrics.jsonl and the trainer's history, fed once per SYNC_STEPS."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.last = trainer.seconds()
        self.bar = tqdm(total=1000, desc="train", bar_format="{l_bar}{bar}{postfix}", mininterval=5)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.close()

    def write(self, loss: float, factor: float, num_steps: int, held_out_loss: float | None) -> None:
        """Record the mean loss of the last `num_steps` steps; the rate includes evaluation and checkpointing."""
        trainer, config, now = self.trainer, self.trainer.config, self.trainer.seconds()
        rate = num_steps * config.batch_windows * config.window_tokens / (now - self.last)
        self.last = now
        record: dict[str, float] = {"step": trainer.step, "seconds": round(now, 1), "loss": round(loss, 4)}
        record |= {"lr": round(factor, 4), "tokens_per_s": round(rate)}
        if held_out_loss is not None:
            record["held_out_loss"] = round(held_out_loss, 4)
        trainer.history.append(record)
        with (config.out_dir / "metrics.jsonl").open("a") as sink:
            sink.write(json.dumps(record) + "\n")
        self.bar.set_postfix_str(f"step {trainer.step} loss {loss:.3f} {rate / 1e6:.2f} M tokens/s", refresh=False)
        self.bar.update(int(1000 * min(1.0, trainer.progress())) - self.bar.n)

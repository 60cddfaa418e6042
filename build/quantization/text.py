"""Text for calibration and evaluation: a file, or held-out token ids that build/train_demo_model.py packed."""

from __future__ import annotations

from pathlib import Path

import torch
from slipstream.tokenizer.tokenizer import TextTokenizer
from torch import Tensor

INDEX = "index.json"


def read_token_ids(text: Path, model: Path, split: str = "held_out") -> Tensor:
    """[num_tokens] int64 of a UTF-8 text file, or of a folder of packed shards (which need no tokenizer).

    Raises ValueError for anything else.
    """
    if text.is_dir():
        from demo_model.pack import load_packed

        try:
            return torch.from_numpy(load_packed(text, split)[0].astype("int64"))
        except (OSError, KeyError) as error:
            wanted = f"packed shards and {INDEX}, as build/train_demo_model.py writes them"
            raise ValueError(f"text: {text} is not a folder of {wanted}: {error}") from error
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text: {text} is not a readable UTF-8 file: {error}") from error
    return torch.tensor(TextTokenizer.load(model).encode(content))


def cut_windows(token_ids: Tensor, num_tokens: int, window_tokens: int) -> Tensor:
    """[num_windows, window_tokens], spread evenly over the text; raises ValueError if it holds fewer."""
    num_windows = max(num_tokens // window_tokens, 1)
    if token_ids.numel() < num_windows * window_tokens:
        asked = f"asked for are {num_windows * window_tokens} (num-tokens, in windows of {window_tokens})"
        raise ValueError(f"the text has {token_ids.numel()} tokens, {asked}")
    stride = (token_ids.numel() - window_tokens) // max(num_windows - 1, 1)
    return torch.stack(
        [token_ids[start : start + window_tokens] for start in range(0, num_windows * stride or 1, stride or 1)]
    )

"""Encoders on a GPU: half precision and CUDA graphs against float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from slipstream.core.errors import ConfigError
from slipstream.encoders.checkpoint import read_checkpoint
from slipstream.encoders.encoder import Encoder
from slipstream.encoders.open_runtime import open_runtime
from slipstream.encoders.runtime import RuntimeSettings
from tiny_encoders import FAMILIES, write_encoder, write_family

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TEXTS = ["the cat sat on the mat", "hello", "", "kill you " * 5, *["a dog sat on a cat"] * 20]
HALF_PRECISION = 5e-3  # of vectors of length 1, and of logits below 1


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_vectors_are_those_of_the_cpu(tmp_path: Path, graphs: str) -> None:
    checkpoint = read_checkpoint(write_encoder(tmp_path / "sentence"))
    expected = Encoder(checkpoint, open_runtime(RuntimeSettings("torch", "cpu"), checkpoint)).embed(TEXTS)[0]
    for dtype, tolerance in (("float32", 1e-4), ("auto", HALF_PRECISION)):
        settings = RuntimeSettings("torch", "cuda", dtype=dtype, cuda_graphs=graphs)
        encoder = Encoder(checkpoint, open_runtime(settings, checkpoint))
        for texts in (TEXTS, TEXTS[:1], TEXTS[::-1]):
            wanted = expected[[TEXTS.index(text) for text in texts]]
            np.testing.assert_allclose(encoder.embed(texts)[0], wanted, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_in_graphs_or_without(tmp_path: Path, family: str) -> None:
    """`auto` serves every family; `on` refuses the ones that cannot be captured."""
    checkpoint = read_checkpoint(write_family(tmp_path / family, family))
    expected = Encoder(checkpoint, open_runtime(RuntimeSettings("torch", "cpu"), checkpoint)).embed(TEXTS)[0]
    encoder = Encoder(checkpoint, open_runtime(RuntimeSettings("torch", "cuda"), checkpoint))
    np.testing.assert_allclose(encoder.embed(TEXTS)[0], expected, atol=HALF_PRECISION)
    print(f"{family}: graphs {encoder._runtime._has_graphs}")
    if not encoder._runtime._has_graphs:
        with pytest.raises(ConfigError, match="cannot be captured"):
            open_runtime(RuntimeSettings("torch", "cuda", cuda_graphs="on"), checkpoint)

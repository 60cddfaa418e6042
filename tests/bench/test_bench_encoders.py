"""The encoder benchmark runs, on a tiny checkpoint: its rows are there and its texts have the lengths asked for."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from slipstream.encoders.encoder import Encoder
from tiny_encoders import write_encoder

sys.path.insert(0, str(Path(__file__).parent))
import bench_encoders


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_encoder(tmp_path / "tiny")
    given = ["--no-onnx", "--model", str(model), "--batches", "1,4", "--tokens", "3-6,8", "--seconds", "0"]
    bench_encoders.main([*given, "--devices", "cpu", "--threads", "1"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1:3] for row in rows] == [["3-6", "1"], ["3-6", "4"], ["8", "1"], ["8", "4"]]
    assert all(float(row[4]) > 0 for row in rows) and rows[0][5] == rows[2][5] == "1.0"


def test_an_absent_gpu_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = write_encoder(tmp_path / "tiny")
    bench_encoders.main(["--no-onnx", "--model", str(model), "--devices", "cuda"])
    assert capsys.readouterr().out.count("PyTorch sees no GPU here") == 4


def test_lengths() -> None:
    assert str(bench_encoders.parse_lengths("20-60")) == "20-60"
    for text in ("2", "9-3", "1-2-3"):
        with pytest.raises(argparse.ArgumentTypeError, match="accepted: such as 20-60"):
            bench_encoders.parse_lengths(text)


def test_texts_have_their_lengths(tmp_path: Path) -> None:
    from slipstream.encoders.checkpoint import read_checkpoint
    from slipstream.encoders.open_runtime import open_runtime
    from slipstream.encoders.runtime import RuntimeSettings

    checkpoint = read_checkpoint(write_encoder(tmp_path / "tiny"))
    encoder = Encoder(checkpoint, open_runtime(RuntimeSettings("torch", "cpu"), checkpoint))
    counts = encoder.embed(bench_encoders.draw_texts(encoder, 50, bench_encoders.Lengths(5, 9)))[1]
    assert set(np.unique(counts)) == {5, 6, 7, 8, 9}


def test_served_models_differ_in_batching_alone(tmp_path: Path) -> None:
    import bench_encoders_served as served

    arguments = served.parse_arguments(["--max-batch", "256", "--instances", "3"])
    for name in served.KINDS:
        served.write_model(tmp_path, name, tmp_path / "own", arguments)
        text = (tmp_path / name / "config.pbtxt").read_text()
        assert f'name: "{name}"' in text and "max_batch_size: 256" in text and "count: 3" in text
        assert text.count(f'"{tmp_path}/own"') == 1 == text.count('key: "model"')
        assert ("dynamic_batching" in text) == (name == "batched")
    served.write_requests(tmp_path / "data.json", write_encoder(tmp_path / "tiny"), served.Lengths(5, 9))
    assert len(json.loads((tmp_path / "data.json").read_text())["data"]) == 256


def test_the_words_of_perf_analyzer_are_read() -> None:
    import bench_encoders_served as served

    told = "  Client: \n    Throughput: 417.3 infer/sec\n    p50 latency: 2390 usec\n    p99 latency: 3000 usec\n"
    rate, median = served.RATE.search(told), served.MEDIAN.search(told)
    assert rate is not None and median is not None and (rate.group(1), median.group(1)) == ("417.3", "2390")

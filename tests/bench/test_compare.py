"""The comparison: its table holds every engine's figure and ratio, says who is missing, and the served half runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


@pytest.fixture
def compare(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(root / "tests/bench"))
    import compare

    return compare


def record(engine: str, what: str, **figures: object) -> dict[str, object]:
    return {"engine": engine, "format": "fp8", "what": what, **figures}


def test_the_table_compares_like_with_like(compare) -> None:
    records = [
        record("slipstream", "decode", batch=8, tpot_ms=2.0, limit=0.7, adapters=[]),  # vLLM's bench states none
        record("slipstream", "throughput", num_prompts=4, input_len=8, output_len=16, elapsed_s=4.0, out_tok_s=16),
        record("slipstream+triton", "decode", batch=8, tpot_ms=2.1),
        record("vllm", "decode", batch=1, tpot_ms=9.0),
        {**record("vllm", "decode", batch=8, tpot_ms=9.0), "format": "none"},
        record("vllm", "decode", batch=8, tpot_ms=3.0),
        record("vllm", "throughput", num_prompts=4, input_len=8, output_len=16, elapsed_s=5.0, out_tok_s=12.8),
        record("vllm", "failed", reason="exit code 1"),
    ]
    decode, throughput = compare.engine_table.rows(records)
    assert decode == ["fp8", "decode, batch 8", "ms/token", "2", "70%", "2.1", "1.05", "3", "1.50"]
    assert throughput == ["fp8", "4 x 8/16", "tokens/s", "16", "", "", "", "12.8", "1.25"]
    assert "- vllm, fp8: exit code 1" in compare.engine_table.table(records)


def test_decodes_of_shapes_and_contexts_are_one_table(compare) -> None:
    def decode(engine: str, shape: str, form: str, context: int, batch: int, ms: float, **more: object) -> dict:
        return {
            **record(engine, "decode", shape=shape, context=context, batch=batch, tpot_ms=ms),
            "format": form,
            **more,
        }

    records = [
        decode("slipstream", "llama3-8b", "none", 1024, 8, 4.0, limit=0.82),
        decode("slipstream", "llama3-8b", "none", 1024, 200, 10.0),
        decode("slipstream", "llama3-8b", "none", 8192, 8, 5.0),
        decode("slipstream", "llama3-8b", "fp8", 1024, 8, 3.0),
        decode("vllm", "llama3-8b", "none", 1024, 8, 5.0),
        decode("vllm", "llama3-8b", "none", 8192, 8, 5.2),
        decode("vllm", "llama3-8b", "fp8", 1024, 8, 3.9),
        {
            **record("vllm", "decode", context=1024, batch=200, skipped="no room"),
            "shape": "llama3-8b",
            "format": "none",
        },
    ]
    table, _, misses, _, empty = compare.decode_grid.table(records).split("\n\n")
    assert table.splitlines()[0] == "| shape | format | context | 8 | 200 |"
    assert table.splitlines()[2:] == [
        "| llama3-8b | none | 1,024 | 4.00 / 5.00 **(1.25)**, 82% | 10.00 |",
        "| llama3-8b | none | 8,192 | 5.00 / 5.20 **(1.04)** |  |",
        "| llama3-8b | fp8 | 1,024 | 3.00 / 3.90 **(1.30)** |  |",
    ]
    assert misses == "- llama3-8b, none, 8,192 tokens, 8 requests: 5.00 / 5.20 **(1.04)**"
    assert empty.splitlines() == [
        "- llama3-8b, none, slipstream and vllm: 8,192 x 200: not in this run",
        "- llama3-8b, none, vllm: 1,024 x 200: no room",
        "- llama3-8b, fp8, slipstream and vllm: 1,024 x 200: not in this run",
    ]
    assert compare.decode_grid.table(records[-1:]) == ""
    assert [row[1] for row in compare.engine_table.rows(records)][:3] == [
        f"decode, batch {n}" for n in ("8 at 1024", "200 at 1024", "8 at 8192")
    ]
    assert [row[7] for row in compare.engine_table.rows(records)] == ["5", "", "5.2", "3.9"]


def test_formats_stand_side_by_side(compare) -> None:
    sizes = {"what": "batch", "input_len": 1024, "output_len": 128}
    records = [
        {**record("slipstream", **sizes, batch=1, decode_tok_s=100.0, out_tok_s=50.0), "format": "wint4"},
        {**record("slipstream", **sizes, batch=64, skipped="the KV cache does not hold it"), "format": "wint4"},
        {**record("slipstream", **sizes, batch=1, decode_tok_s=150.0, out_tok_s=60.0), "format": "w4a8_fp8"},
        {**record("slipstream", **sizes, batch=64, decode_tok_s=1500.4, out_tok_s=600.0), "format": "w4a8_fp8"},
        {**record("slipstream", "prefill", input_len=1024, ttft_ms=30.0), "format": "wint4"},
        {**record("slipstream", "prefill", input_len=1024, ttft_ms=15.0), "format": "w4a8_fp8"},
        {**record("vllm", **sizes, batch=1, decode_tok_s=1.0, out_tok_s=1.0), "format": "fp8"},
    ]
    batches, prompts = (part.splitlines() for part in compare.format_table.table(records).split("\n\n"))
    assert batches[0] == "| tokens/s while decoding / in all, of 1024 in and 128 out | 1 | 64 |"
    assert batches[2:] == [
        "| wint4 | 100 / 50 |  |",
        "| w4a8_fp8 | 150 / 60 | 1,500 / 600 |",
        "| **w4a8_fp8 / wint4** | 1.50 / 1.20 |  |",
    ]
    assert prompts[2:] == ["| wint4 | 30 |", "| w4a8_fp8 | 15 |", "| **w4a8_fp8 / wint4** | 2.00 |"]
    assert compare.format_table.table(records[4:6]) == ""


def test_an_engine_that_fails_is_reported_with_what_it_measured(compare, tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "bench_engine.py"
    script.write_text(
        "import sys; open(sys.argv[sys.argv.index('--out') + 1], 'w').write('{\"what\": \"x\"}\\n'); exit(3)"
    )
    monkeypatch.setattr(compare, "HERE", tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["compare.py", "--engines", "slipstream", "--formats", "none", "--out", str(tmp_path)]
    )
    compare.main()
    measured, failure = json.loads((tmp_path / "compare.json").read_text())
    assert measured == {"what": "x", "shape": "llama3-8b", "format": "none", "engine": "slipstream"}
    assert failure["reason"].startswith("exit code 3")


def test_engines_of_a_shape_have_one_gpu_and_shapes_have_others(compare, tmp_path: Path, monkeypatch) -> None:
    script = (
        "import os, sys, time; out = sys.argv[sys.argv.index('--out') + 1]; time.sleep(0.3);"
        'open(out, \'w\').write(\'{"what": "x", "gpu": "%s"}\\n\' % os.environ["CUDA_VISIBLE_DEVICES"])'
    )
    for name in ("bench_engine.py", "bench_vllm.py"):
        (tmp_path / name).write_text(script)
    monkeypatch.setattr(compare, "HERE", tmp_path)
    monkeypatch.setattr(compare, "why_absent", lambda engine: "")
    options = "--engines slipstream,vllm --shape llama3-8b,llama3-70b:fp8 --formats none --gpus 5,7"
    monkeypatch.setattr(sys, "argv", ["compare.py", *options.split(), "--out", str(tmp_path)])
    compare.main()
    records = json.loads((tmp_path / "compare.json").read_text())
    assert [(r["shape"], r["format"], r["engine"]) for r in records] == [
        ("llama3-8b", "none", "slipstream"),
        ("llama3-8b", "none", "vllm"),
        ("llama3-70b", "fp8", "slipstream"),
        ("llama3-70b", "fp8", "vllm"),
    ]
    gpus = [record["gpu"] for record in records]
    assert gpus[0] == gpus[1] and gpus[2] == gpus[3] and {gpus[0], gpus[2]} == {"5", "7"}


def test_a_bench_that_breaks_ends_all(compare, tmp_path: Path, monkeypatch) -> None:
    asked: list[str] = []

    def measure(engine: str, task, *others: object) -> list[dict]:
        asked.append(task.format)
        raise RuntimeError("broken")

    monkeypatch.setattr(compare, "measure", measure)
    options = ["--engines", "slipstream", "--formats", "none,fp8,wint8,wint4", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["compare.py", *options])
    with pytest.raises(RuntimeError, match="broken"):
        compare.main()
    assert asked[0] == "none" and len(asked) < 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--formats none,w3", "--formats: w3; accepted: none, fp8"),
        ("--shape demo:none,llama3-9b", "--shape: llama3-9b; accepted: "),
        ("--engines slipstream,vlm", "--engines: vlm; accepted: slipstream, slipstream+triton, vllm"),
        ("--set quantization", "--set: 'quantization', accepted: PARAMETER=VALUE"),
    ],
)
def test_what_is_unknown_is_refused(compare, options: str, words: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", *options.split()])
    with pytest.raises(SystemExit):
        compare.main()
    assert words in capsys.readouterr().err


def test_the_served_half_runs(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "tests/bench"))
    import bench_triton

    if bench_triton.missing_server():
        pytest.skip(bench_triton.missing_server())
    out = tmp_path / "served.jsonl"
    sizes = "--contexts 8 --max-model-len 64 --num-prompts 5 --input-len 8 --output-len 4"
    sizes += " --measure throughput,streams --concurrency 3"
    options = f"--shape demo {sizes} --set device=cpu --set memory_bytes=50000000 --clients 2 --replicas 2 --out {out}"
    monkeypatch.setattr(sys, "argv", ["bench_triton.py", *options.split()])
    bench_triton.main()  # the clients assert that every token arrived
    records = {record["what"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert records["throughput"]["out_tok_s"] > 0 and records["throughput"]["replicas"] == 2
    assert records["streams"]["out_tok_s"] > 0 and records["streams"]["concurrency"] == 3


@pytest.mark.parametrize(
    ("program", "text", "words"),
    [
        ("bench_engine", "decode,prefil", "'prefil', accepted: prefill, decode, throughput, batch, profile, streams"),
        ("bench_vllm", "profile", "'profile', accepted: prefill, decode, throughput, batch\n"),
        ("bench_long_context", "decode", "'decode', accepted: ttft, tpot, beside"),
    ],
)
def test_an_unknown_measure_is_refused_before_an_engine_is_loaded(
    compare, program: str, text: str, words: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--measure", text])
    with pytest.raises(SystemExit):
        __import__(program).main()
    assert words in capsys.readouterr().err

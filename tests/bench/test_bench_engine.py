"""The engine's bench: its limits are those worked out by hand, and a small run gives every figure."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from measures import measure_decode, seconds_by_difference
from shapes import SHAPES
from slipstream.worker.memory_plan import MemoryPlan, StageMemory
from step_profile import profile_missed

ROOT = Path(__file__).resolve().parents[2]


def _load():
    spec = importlib.util.spec_from_file_location("bench_engine", ROOT / "tests/bench/bench_engine.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("shape", "batch", "weight_bytes", "kv_bytes", "tokens_per_s"),
    [
        ("llama3-8b", 1, 2, 2, 284),
        ("llama3-8b", 64, 2, 2, 11661),
        ("llama3-8b", 8, 1, 1, 4015),
        ("baichuan2-13b", 8, 2, 2, 1036),
        ("llama3-70b", 1, 1, 1, 61),
    ],
)
def test_limits(shape: str, batch: int, weight_bytes: float, kv_bytes: float, tokens_per_s: int) -> None:
    seconds = SHAPES[shape].limit_s(batch, 1024, weight_bytes, kv_bytes)
    assert batch / seconds == pytest.approx(tokens_per_s, rel=0.01)


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rival, out = tmp_path / "rival.jsonl", tmp_path / "ours.jsonl"
    rival.write_text(json.dumps({"what": "prefill", "batch": 1, "input_len": 16, "ttft_ms": 1e6}) + "\n")
    sizes = "--batches 2 --contexts 8 --decode-short 2 --decode-long 5 --decode-repeats 1 --prefill-lens 16"
    more = "--num-prompts 2 --input-len 8 --output-len 4 --max-model-len 128 --max-num-batched-tokens 256 --repeats 1"
    more += " --measure decode,prefill,throughput,streams,batch,profile --concurrency 1 --profile-batches 2"
    options = f"--shape demo {sizes} {more} --set device=cpu --set memory_bytes=50000000 --rival {rival} --out {out}"
    monkeypatch.setattr(sys, "argv", ["bench_engine.py", *options.split()])
    _load().main()
    records = {record["what"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert records["decode"]["tpot_ms_all"] == [records["decode"]["tpot_ms"]] and records["decode"]["tpot_ms"] > 0
    assert records["throughput"]["out_tok_s"] > 0
    assert records["prefill"]["ratio"] == pytest.approx(1e6 / records["prefill"]["ttft_ms"], rel=1e-3)
    assert records["streams"]["elapsed_s"] > 0 and records["streams"]["num_prompts"] == 2
    assert records["batch"]["elapsed_s"] > 0 and records["batch"]["out_tok_s"] > 0
    assert 0 < records["profile"]["launch_us"] < records["profile"]["step_us"]
    assert {"plan", "weights", "KV pool"} <= set(records["setup"]["phases"])


def test_decodes_that_miss_are_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of the rivals counts: of four cells one is slower than it, and one it has not."""
    cells = [(8, 2, 1e-6), (8, 1, 1e6), (16, 2, 1e6), (16, 1, 1e6)]
    lines = [json.dumps({"what": "decode", "context": c, "batch": b, "tpot_ms": ms}) + "\n" for c, b, ms in cells[:3]]
    fast, slow, out = tmp_path / "fast.jsonl", tmp_path / "slow.jsonl", tmp_path / "ours.jsonl"
    fast.write_text("".join(lines) + '{"what": "dec')  # its program was killed
    slow.write_text(json.dumps({"what": "decode", "context": 8, "batch": 2, "tpot_ms": 1e6}) + "\n")
    sizes = "--measure decode --batches 2,1 --contexts 8,16 --decode-short 2 --decode-long 5 --decode-repeats 1"
    more = "--max-model-len 128 --max-num-batched-tokens 256 --prefix-caching --profile-below 1.05"
    options = f"--shape demo {sizes} {more} --set device=cpu --set memory_bytes=50000000 --rival {slow} --rival {fast}"
    monkeypatch.setattr(sys, "argv", ["bench_engine.py", *options.split(), "--out", str(out)])
    module = _load()
    monkeypatch.setattr(module.EngineBench, "step_seconds", lambda *others: 0.01)  # the host's clock is in no ratio
    module.main()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    decodes = {(r["context"], r["batch"]): r.get("ratio") for r in records if r["what"] == "decode"}
    assert decodes == {(8, 2): 0.0, (8, 1): 1e5, (16, 2): 1e5, (16, 1): None}
    [profile] = [record for record in records if record["what"] == "profile"]
    assert (profile["context"], profile["batch"]) == (8, 2) and 0 < profile["launch_us"] < profile["step_us"]
    assert [r["what"] for r in records].index("profile") > max(
        i for i, r in enumerate(records) if r["what"] == "decode"
    )


def test_the_slowest_cells_are_profiled_and_those_without_room_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = SimpleNamespace(max_model_len=4096, pool_tokens=64 * 1088)
    monkeypatch.setattr(
        "step_profile.profile_of", lambda bench, batch, context, steps: {"batch": batch, "context": context}
    )
    cells = [(batch, 1024, 0.9 + batch / 100) for batch in (1, 2, 3, 4, 5, 6, 7, 8, 30)] + [(65, 1024, 0.5)]
    records = [{"what": "decode", "batch": b, "context": c, "ratio": ratio} for b, c, ratio in cells]
    records += [{"what": "decode", "batch": 9, "context": 1024}, {"what": "decode", "batch": 9, "skipped": "no room"}]
    without_room, *others = profile_missed(bench, 1.05, records)
    assert without_room["batch"] == 65 and "no room" in without_room["skipped"]
    assert [record["batch"] for record in others] == [1, 2, 3, 4, 5]
    assert list(profile_missed(bench, 0.0, records)) == []


def test_requests_with_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--measure batch --batches 3 --input-len 4 --output-len 4 --decode-short 2 --max-model-len 64"
    options = f"--shape demo {sizes} --adapters 0,2 --adapter-rank 4 --set device=cpu --set memory_bytes=50000000"
    monkeypatch.setattr(sys, "argv", ["bench_engine.py", *options.split(), "--out", str(tmp_path / "out.jsonl")])
    _load().main()
    records = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    batches = [(record["adapters"], record["elapsed_s"] > 0) for record in records if record["what"] == "batch"]
    assert batches == [(0, True), (2, True)]


def test_a_step_is_what_more_tokens_take() -> None:
    """By a clock of 500 ms for a prompt and 10 ms for a token."""
    bench = SimpleNamespace(shape=SHAPES["demo"], max_model_len=64, pool_tokens=1000)
    bench.timed = lambda prompts, num_output: 0.5 + 0.01 * num_output
    bench.step_seconds = partial(seconds_by_difference, bench)
    asked = {"decode_short": 2, "decode_long": 5, "contexts": [8, 16], "batches": [2, 200], "decode_repeats": 3}
    asked |= {"prefix_caching": True, "most_tokens": 0, "weight_bytes": 2, "kv_bytes": 2, "memory_tb_s": 4.3}
    [record, skipped, longer, _] = measure_decode(bench, Namespace(**asked))
    assert (record["context"], longer["context"]) == (8, 16)
    assert (record["tpot_ms"], record["out_tok_s"], record["batch"]) == (10, 200, 2)
    assert skipped["batch"] == 200 and "does not hold it" in skipped["skipped"]
    asked |= {"batches": [15, 16, 30], "contexts": [16, 64], "most_tokens": 300}
    found = list(measure_decode(bench, Namespace(**asked)))
    why = [record.get("skipped", "") for record in found]
    assert why[:3] == ["", "the KV cache does not hold it", "more than --most-tokens 300"], "blocks of 64"
    assert all("tokens" in reason for reason in why[3:]) and len(why) == 6


def test_prompts_that_are_cached_are_warmed_up_once() -> None:
    """Those of a smaller batch are the first of a larger one's, those of a longer context are new."""
    bench = SimpleNamespace(shape=SHAPES["demo"], max_model_len=64, pool_tokens=10000)
    warm_ups: list[tuple[int, int]] = []
    seen: dict[int, list[list[int]]] = {}

    def timed(prompts: list[list[int]], num_output: int) -> float:
        if num_output == 8:
            warm_ups.append((len(prompts[0]), len(prompts)))
        first = seen.setdefault(len(prompts[0]), prompts)
        assert prompts[:2] == first[: len(prompts)][:2]
        return 0.01 * num_output

    bench.timed = timed
    bench.step_seconds = partial(seconds_by_difference, bench)
    asked = {"decode_short": 2, "decode_long": 5, "contexts": [8, 16], "batches": [4, 2, 3], "decode_repeats": 1}
    asked |= {"prefix_caching": True, "most_tokens": 0, "weight_bytes": 2, "kv_bytes": 2, "memory_tb_s": 4.3}
    list(measure_decode(bench, Namespace(**asked)))
    assert warm_ups == [(length, batch) for length in (8, 16) for batch in (4, 4, 2, 3)]
    assert [prompt[:8] for prompt in seen[16]] == seen[8]
    warm_ups.clear()
    list(measure_decode(bench, Namespace(**{**asked, "prefix_caching": False, "batches": [2, 4]})))
    assert warm_ups == [(length, batch) for length in (8, 16) for batch in (2, 4)]


def test_a_repeat_in_which_something_was_compiled_does_not_count() -> None:
    """The third prompt, a short output, takes a second more: its step would be negative."""
    bench = SimpleNamespace(shape=SHAPES["demo"], max_model_len=64, pool_tokens=1000)
    taken: list[int] = []

    def timed(prompts: list[list[int]], num_output: int) -> float:
        taken.append(num_output)
        return 0.5 + 0.01 * num_output + (len(taken) == 3)

    bench.timed = timed
    bench.step_seconds = partial(seconds_by_difference, bench)
    asked = {"decode_short": 2, "decode_long": 5, "contexts": [8], "batches": [2], "decode_repeats": 2}
    asked |= {"prefix_caching": False, "most_tokens": 0, "weight_bytes": 2, "kv_bytes": 2, "memory_tb_s": 4.3}
    [record] = measure_decode(bench, Namespace(**asked))
    assert record["tpot_ms"] == 10 and len(record["tpot_ms_all"]) == 5 and min(record["tpot_ms_all"]) < 0
    [slower] = measure_decode(bench, Namespace(**{**asked, "memory_tb_s": 2.15}))
    assert len(slower["tpot_ms_all"]) == 2 and slower["limit"] == pytest.approx(2 * record["limit"], abs=0.002)


def test_memory_is_compared_with_the_plan_of_the_same_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the first stage, which has 14 of 32 layers; the plan is of the stage with 18."""
    gib, of_block = 1 << 30, 1 << 20
    stages = (
        StageMemory(range(14), 8 * gib, 4 * gib, 14 * of_block),
        StageMemory(range(14, 32), 7 * gib, 3 * gib, 18 * of_block),
    )
    plan = MemoryPlan(139 * gib, 7 * gib, 3 * gib, 18 * of_block, 64, 5120, 8192, stages=stages, stage=1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (57 * gib, 140 * gib))
    found = _load().memory_of(SimpleNamespace(memory_plan=plan))
    assert found == {
        **{"before": 1, "weights": 8, "workspace": 4, "pool": 70, "planned": 83, "used": 83},
        "over": 1,
    }

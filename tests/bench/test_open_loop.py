"""The open loop: what it draws, what it counts, and that it runs through a real server."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest


@pytest.fixture
def loop(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(root / "tests/bench"))
    import open_loop

    return open_loop


def test_arrivals_are_those_of_the_rate_and_the_same_again(loop) -> None:
    from shapes import SHAPES

    load = loop.Load.parse("50:64:2")
    assert load == loop.Load(50.0, 64, 2.0)
    arrivals = loop.draw_arrivals(SHAPES["demo"], load, 20.0)
    assert arrivals == loop.draw_arrivals(SHAPES["demo"], load, 20.0)
    judged = [one for one in arrivals if one.is_judged]
    assert 900 < len(judged) < 1100 and 15 < len(arrivals) - len(judged) < 70
    assert all(before.at_s <= after.at_s < 20.0 for before, after in itertools.pairwise(arrivals))
    assert len({tuple(one.prompt[:64]) for one in judged}) == 1 and len(set(judged[0].prompt[:64])) > 50
    assert len({tuple(one.prompt) for one in judged}) > 900
    lengths = sorted(len(one.prompt) - 64 for one in judged)
    assert 250 < lengths[len(lengths) // 2] < 360 and 900 < lengths[len(lengths) * 9 // 10] < 1300
    assert {(len(one.prompt), one.num_output) for one in arrivals if not one.is_judged} == {(8192, 64)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--loads abc", "--loads: 'abc', accepted: RATE"),
        ("--loads 8,", "--loads: '', accepted: RATE"),
        ("--loads 1:2:3:4", "'1:2:3:4', accepted: RATE"),
        ("--loads 8:1.5", "'8:1.5', accepted: RATE"),
        ("--loads inf", "a rate above 0"),  # would be drawn for ever
        ("--loads nan", "a rate above 0"),
        ("--loads 0:0:5", "a rate above 0"),
        ("--loads=-3", "a rate above 0"),
        ("--loads 8:-5", "a prefix and a rate of long prompts of 0 or more"),
        ("--loads 8:0:inf", "a prefix and a rate of long prompts of 0 or more"),
        ("--loads 8 --seconds inf", "accepted: 5 that are judged to 20,000 in all"),
        ("--loads 8 --seconds nan", "accepted: 5 that are judged to 20,000 in all"),
        ("--loads 8 --seconds 0.1", "accepted: 5 that are judged to 20,000 in all"),
        ("--loads 8:40000", "requests of up to 45,120 tokens, accepted: --max-model-len, 33,792"),
        ("--loads 8:0:1 --max-model-len 8192", "requests of up to 8,256 tokens"),
        ("--clients 0", "--clients: 0, accepted: at least 1"),
        ("--engine vllm --set quantization=fp8", "vLLM has --format"),
        ("--format fp8", "accepted: --set quantization="),
        ("--kv-cache-dtype fp8", "accepted: --set quantization="),
        ("--engine vllm --format fp9", "invalid choice: 'fp9'"),
        ("--layers 4", "unrecognized arguments: --layers"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_start(
    loop, options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import bench_open_loop

    with pytest.raises(SystemExit):
        bench_open_loop.parse(options.split())
    assert words in capsys.readouterr().err


def test_a_load_once_more_has_other_prompts(loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its prompts were hits of the prefix cache."""
    import bench_open_loop

    played = []

    @contextlib.contextmanager
    def player(_):
        def play(arrivals):
            played.append(arrivals)
            return [loop.Timeline(one.at_s, [(one.at_s + 0.1, one.num_output)]) for one in arrivals]

        yield play

    monkeypatch.setattr(bench_open_loop, "triton_player", player)
    monkeypatch.setattr(sys, "argv", ["bench_open_loop.py", "--loads", "8,16,8", "--seconds", "2"])
    bench_open_loop.main()
    prompts = [{tuple(one.prompt) for one in arrivals} for arrivals in played]
    assert len(prompts) == 4 and all(not one & other for one, other in itertools.combinations(prompts, 2))


def test_a_response_without_a_token_is_no_first_token(loop) -> None:
    import bench_open_loop

    class Result:
        def __init__(self, count: int, is_final: bool = False) -> None:
            final = {"triton_final_response": SimpleNamespace(bool_param=is_final)}
            self._response = SimpleNamespace(outputs=[1], id="0", parameters=final)
            self._count = count

        def get_response(self):
            return self._response

        def as_numpy(self, name: str):
            return np.array([self._count])

    recorder = bench_open_loop._Recorder()
    recorder.begin(1, 0.0)
    recorder.sleep_until(0.0)
    for count, is_final in ((0, False), (2, False), (0, False), (1, True)):
        recorder(Result(count, is_final), None)
    [timeline] = recorder.wait()
    assert [count for _, count in timeline.responses] == [2, 1]


def test_a_request_is_good_by_its_first_token_and_its_gaps(loop) -> None:
    def timeline(ttft_s: float, gap_s: float, late_s: float = 0.0):
        times = [ttft_s + gap_s * index for index in range(200)]
        return loop.Timeline(0.0, [(time + late_s * (index > 150), 1) for index, time in enumerate(times)])

    served = [timeline(0.4, 0.04), timeline(0.6, 0.04), timeline(0.4, 0.06), timeline(0.4, 0.04, 0.2)]
    arrivals = [loop.Arrival(0.0, [1], 200) for _ in served]
    record = loop.summarise(loop.Load(2.0), arrivals, served, 2.0)
    # one gap of 200 may be long, two may not
    assert (record["goodput"], record["good_share"]) == (1.0, 0.5)
    assert (record["ttft_p50_ms"], record["ttft_p99_ms"], record["gap_p50_ms"]) == (400.0, 600.0, 40.0)
    unjudged = [loop.Arrival(0.0, [1], 200, index == 0) for index in range(4)]
    assert loop.summarise(loop.Load(2.0), unjudged, served, 2.0)["good_share"] == 1.0
    served[1].responses.pop()
    with pytest.raises(RuntimeError, match="199 tokens of 200"):
        loop.summarise(loop.Load(2.0), arrivals, served, 2.0)


def test_percentiles(loop) -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [loop.percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert loop.percentile([], 0.5) == 0.0


def test_it_runs_through_a_real_server(loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_open_loop
    import bench_triton

    if bench_triton.missing_server():
        pytest.skip(bench_triton.missing_server())
    monkeypatch.setattr(loop, "INPUT_RANGE", (4, 12))
    monkeypatch.setattr(loop, "OUTPUT_RANGE", (2, 4))
    out = tmp_path / "ours.jsonl"
    options = f"--shape demo --loads 6,6:64 --seconds 1.5 --max-model-len 256 --clients 2 --out {out}"
    options += " --set device=cpu --set memory_bytes=50000000"
    monkeypatch.setattr(sys, "argv", ["bench_open_loop.py", *options.split()])
    bench_open_loop.main()  # raises unless every token arrived
    plain, shared = map(json.loads, out.read_text().splitlines())
    assert (plain["rate"], plain["shared_prefix"], shared["shared_prefix"]) == (6.0, 0, 64)
    assert plain["requests"] > 2 and plain["out_tok_s"] > 0 and 0 < plain["ttft_p50_ms"] <= plain["ttft_p99_ms"]
    assert plain["sent_late_ms"] >= 0

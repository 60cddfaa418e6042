"""The bench of the host's time steps the real engine as on a GPU and gives a figure for each batch."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bench_host
from bench_host import HostBench
from measures import add_settings
from slipstream.core.outputs import StepOutputs
from slipstream.worker.spec_decode.interface import PROPOSERS
from slipstream_kernels import ops


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the graph of so many tokens was replayed."""
    found: Counter[int] = Counter()
    replay = bench_host._NoGraphs.replay

    def counted(self, shape):
        found[shape.num_tokens] += 1
        return replay(self, shape)

    monkeypatch.setattr(bench_host._NoGraphs, "replay", counted)
    return found


def test_a_step_has_a_time_and_does_its_work(replays: Counter[int]) -> None:
    bench = HostBench(8)
    assert bench.engine.config.scheduler.overlap_scheduling == "on"
    for batch in (1, 8):
        assert bench.decode(batch, num_steps=3, repeats=2) > 0.0
        assert replays[batch] >= 6, "decodes that are timed go by the inputs of graphs"
    assert not bench.engine.has_work and bench.engine.error is None


def main(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_host.py", *options])
    bench_host.main()


@pytest.mark.parametrize("text", ["", "0", "-1", "8,1001", "eight"])
def test_batches_that_it_cannot_make_are_refused(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(monkeypatch, "--batches", text)
    assert "--batches" in capsys.readouterr().err


def test_the_largest_batch_has_a_token_for_each_request() -> None:
    assert 5 + bench_host.MAX_BATCH <= bench_host.VOCABULARY
    # tokens of a vocabulary of 512 did not suffice; blocks for what is made here, not for 3,000 tokens each
    most = HostBench(520, num_blocks=521 * 75, scheduler_policy="max_utilization")
    assert most.decode(520, num_steps=1, repeats=1) > 0.0


def test_the_profile_is_of_what_was_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Bench:
        def __init__(self, *_, **__) -> None: ...

        def decode_changing(self, batch: int, profiler=None) -> float:
            if profiler is not None:
                profiler.runcall(json.dumps, "changing")
            return 1.0

    monkeypatch.setattr(bench_host, "HostBench", Bench)
    main(monkeypatch, "--batches", "2", "--changing", "--profile")
    assert "dumps" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["foo", "=1", ""])
def test_a_setting_names_its_parameter(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    assert parser.parse_args(["--set", "a=b=c"]).set == ["a=b=c"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--set", text])
    assert "--set" in capsys.readouterr().err


@pytest.mark.parametrize("drafts", bench_host.DRAFTERS)
def test_drafts_are_verified_in_each_step(drafts: str, replays: Counter[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("accept_drafts", "update_step_inputs"):
        monkeypatch.setattr(ops, name, getattr(ops, name))  # put back after the test
    monkeypatch.setitem(PROPOSERS._entries, "ngram", PROPOSERS.get("ngram"))
    bench = HostBench(4, drafts=drafts)
    made: list[int] = []
    step = bench.engine.step

    def noted() -> StepOutputs:
        outputs = step()
        made.extend(len(output.new_token_ids) for output in outputs)
        return outputs

    monkeypatch.setattr(bench.engine, "step", noted)
    assert bench.decode(4, num_steps=5, repeats=4) > 0.0
    assert replays[4 * (1 + bench_host.NUM_DRAFTS)] >= 20 and made.count(1 + bench_host.NUM_DRAFTS) >= 4 * 20

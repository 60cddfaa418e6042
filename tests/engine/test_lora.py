"""LoRA adapters: a request says what the model with its adapter merged says, whoever else is in the batch."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import GREEDY, make_engine, model_worker, run_steps
from llm_server import parameter
from lora_adapters import ALL, PROMPT, answers, as_sent, make_adapter, merged, sent, serving, three_adapters
from safetensors.torch import load_file, save_file
from slipstream.core.adapters import SentAdapter
from slipstream.core.config import SpeculationConfig
from slipstream.core.control import LOAD_LORA, RELOAD, SLEEP, UNLOAD_LORA, WAKE_UP, Control
from slipstream.core.errors import CapacityError, ConfigError, RequestError
from slipstream.core.prefix import salted_key
from slipstream.core.request import Request
from slipstream.engine.engine import Engine
from slipstream.engine.validate import validate
from slipstream.nn.linear import Linear
from slipstream_kernels import ops
from tiny_checkpoints import make_checkpoint
from tiny_model import make_tiny_windowed, save_tokenizer


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return three_adapters(tmp_path_factory.mktemp("adapters"), tiny_llama)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, adapters: Mapping[str, Path]) -> Engine:
    return serving(tiny_llama, adapters)


@pytest.mark.parametrize(("name", "scale"), [("all", 1.0), ("queries", 3.0)])
def test_a_request_says_what_the_merged_model_says(
    engine: Engine, tiny_llama: Path, adapters: Mapping[str, Path], name: str, scale: float, tmp_path: Path
) -> None:
    reference = make_engine(merged(tmp_path / "merged", tiny_llama, adapters[name], scale))
    [expected] = answers(reference, [("", PROMPT)])
    [plain], [own] = answers(make_engine(tiny_llama), [("", PROMPT)]), answers(engine, [(name, PROMPT)])
    assert own == expected != plain
    assert answers(engine, [("", PROMPT)]) == [plain]


def test_scales_of_rslora_and_patterns(engine: Engine, tiny_llama: Path, adapters: Mapping[str, Path]) -> None:
    """lora_alpha 4 and rank 4: 2 by the root of the rank, and a quarter of it where the pattern says 1."""
    stored = load_file(adapters["rooted"] / "adapter_model.safetensors")
    pairs = engine.adapters._by_name["rooted"].pairs
    for module, pair in pairs.items():
        factor = 0.5 if module.endswith("v_proj") else 2.0
        torch.testing.assert_close(pair.b, factor * stored[f"base_model.model.{module}.lora_B.weight"])
    assert len(pairs) == 2 * len(ALL)


def test_a_mixed_batch(engine: Engine, prompts: list[list[int]]) -> None:
    asked = [(name, prompt) for name in ("all", "", "queries", "rooted") for prompt in (prompts[5], prompts[9])]
    alone = [answers(engine, [one])[0] for one in asked]
    assert answers(engine, asked) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(asked)


def test_a_step_of_more_tokens_than_a_request_may_have(
    tiny_llama: Path, adapters: Mapping[str, Path], engine: Engine
) -> None:
    short = serving(tiny_llama, adapters, max_model_len=len(PROMPT) + GREEDY.max_tokens)
    asked = [("all", [*PROMPT[1:], token]) for token in range(20, 28)]
    assert answers(short, asked) == answers(engine, asked)


def test_more_adapters_than_slots(tiny_llama: Path, adapters: Mapping[str, Path], engine: Engine) -> None:
    one_slot = serving(tiny_llama, adapters, max_loras=1)
    asked = [(name, PROMPT) for name in ("all", "queries", "all", "", "rooted", "queries")]
    assert answers(one_slot, asked) == answers(engine, asked)
    assert sorted(one_slot.scheduler.adapters._slots.values()) == [0]


def test_prefixes_are_shared_by_requests_of_one_adapter_alone(engine: Engine, prompts: list[list[int]]) -> None:
    prompt = [*prompts[11], 3]

    def cached(name: str) -> int:
        [request] = engine.submit(Request(prompt, GREEDY, adapter_name=name))
        run_steps(engine, {})
        return request.num_cached_tokens

    assert [cached(name) > 0 for name in ("", "all", "queries", "all", "", "queries")] == [False] * 3 + [True] * 3


def test_beams_several_sequences_and_sampling(engine: Engine) -> None:
    def sequences(name: str, **params: object) -> list[list[int]]:
        requests = engine.submit(Request(PROMPT, replace(GREEDY, **params), seed=4, adapter_name=name))
        run_steps(engine, {})
        return [request.token_ids for request in requests]

    assert sequences("all", n=2, temperature=1.0, seed=4) != sequences("", n=2, temperature=1.0, seed=4)
    request = Request(PROMPT, replace(GREEDY, n=2, beam_width=2, max_tokens=4), adapter_name="all")
    assert engine.submit(request)[0].adapter is not None
    run_steps(engine, {})
    assert engine.error is None and not engine.scheduler.adapters._num_users


def test_drafts_of_a_request_with_an_adapter(tiny_llama: Path, adapters: Mapping[str, Path], engine: Engine) -> None:
    modules = json.dumps({"all": str(adapters["all"])})
    drafting = make_engine(
        tiny_llama,
        {"enable_lora": True, "max_lora_rank": 6, "lora_modules": modules},
        speculation=SpeculationConfig(methods="ngram"),
    )
    repeated = PROMPT * 4
    asked = [("all", repeated), ("", repeated)]
    assert answers(drafting, asked) == answers(engine, asked)


def test_windowed_layers_and_biases(tmp_path: Path) -> None:
    checkpoint = make_tiny_windowed(tmp_path / "windowed")
    adapter = make_adapter(tmp_path / "adapter", checkpoint, 4, size=0.3)
    reference = make_engine(merged(tmp_path / "merged", checkpoint, adapter))
    prompt = PROMPT * 3
    assert answers(serving(checkpoint, {"one": adapter}), [("one", prompt)]) == answers(reference, [("", prompt)])


def test_an_mlp_gated_by_gelu(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("gemma2", tmp_path / "gemma2").path
    save_tokenizer(checkpoint)
    adapter = make_adapter(tmp_path / "adapter", checkpoint, 4, modules=("gate_proj", "down_proj"))
    reference = make_engine(merged(tmp_path / "merged", checkpoint, adapter))
    assert answers(serving(checkpoint, {"one": adapter}), [("one", PROMPT)]) == answers(reference, [("", PROMPT)])


@pytest.mark.parametrize("quantization", ["fp8", "wint8", "wint4"])
def test_beside_quantised_weights(
    tiny_llama: Path, adapters: Mapping[str, Path], quantization: str, prompts: list[list[int]]
) -> None:
    """The adapter's part is that of the unquantised model: logits differ by what quantisation does without it."""
    settings = {"quantization": quantization, "quantization_group_size": 64 if quantization == "wint4" else 0}
    engine = serving(tiny_llama, adapters, **settings)
    plain = make_engine(tiny_llama, settings)
    asked = [("", prompts[9])]
    assert answers(engine, asked) == answers(plain, asked)
    assert answers(engine, [("all", prompts[9])]) != answers(engine, asked)


def test_without_adapters_a_step_does_what_it_does_elsewhere(
    engine: Engine, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model_worker(make_engine(tiny_llama)).runner.model
    assert {type(linear) for layer in plain.layers for linear in layer.linears()} == {Linear}
    monkeypatch.setattr(ops, "lora_shrink", lambda *_: pytest.fail("no request of the step has an adapter"))
    answers(engine, [("", PROMPT)])


def test_loading_and_unloading(tiny_llama: Path, adapters: Mapping[str, Path], engine: Engine) -> None:
    root = str(adapters["all"].parent)
    other = serving(tiny_llama, {}, lora_root=root, max_cpu_loras=2)
    with pytest.raises(RequestError, match="LoRA 'all' is not supported, we currently support"):
        other.submit(Request(PROMPT, GREEDY, adapter_name="all"))
    other.adapters.carry_out(Control(LOAD_LORA, name="all", folder="all"))
    assert other.adapters.names == ["all"]
    assert answers(other, [("all", PROMPT)]) == answers(engine, [("all", PROMPT)])
    [running] = other.submit(Request(PROMPT, GREEDY, adapter_name="all"))
    other.adapters.carry_out(Control(UNLOAD_LORA, name="all"))
    run_steps(other, {})
    assert running.token_ids[len(PROMPT) :] == answers(engine, [("all", PROMPT)])[0]
    with pytest.raises(RequestError, match=r"^lora_name: .*accepted: an adapter that is loaded"):
        other.adapters.carry_out(Control(UNLOAD_LORA, name="all"))
    other.adapters.carry_out(Control(LOAD_LORA, name="all", folder="queries"))  # another one under the same name
    assert answers(other, [("all", PROMPT)]) == answers(engine, [("queries", PROMPT)])
    other.adapters.carry_out(Control(LOAD_LORA, name="second", folder="all"))
    with pytest.raises(RequestError, match="max_cpu_loras=2"):
        other.adapters.carry_out(Control(LOAD_LORA, name="third", folder="all"))


@pytest.mark.parametrize("folder", ["", ".", "..", "../all", "/etc", "missing", "a\0b", "x" * 5000])
def test_folders_elsewhere_are_refused(tiny_llama: Path, adapters: Mapping[str, Path], folder: str) -> None:
    other = serving(tiny_llama, {}, lora_root=str(adapters["all"]))
    with pytest.raises(RequestError, match=r"^lora_path: got .*accepted: a folder below the model's lora_root"):
        other.adapters.carry_out(Control(LOAD_LORA, name="x", folder=folder))


def test_sleep_and_reload_keep_adapters(tiny_llama: Path, adapters: Mapping[str, Path]) -> None:
    engine = serving(tiny_llama, adapters)
    before = answers(engine, [("all", PROMPT), ("", PROMPT)])
    for controls in ((Control(SLEEP, 1), Control(WAKE_UP)), (Control(SLEEP, 2), Control(WAKE_UP)), (Control(RELOAD),)):
        for control in controls:
            order = engine.post(control)
            run_steps(engine, {})
            order.wait()
        assert answers(engine, [("all", PROMPT), ("", PROMPT)]) == before


def test_adapters_are_off_by_default(tiny_llama: Path) -> None:
    with pytest.raises(RequestError, match=r"^lora_name: LoRA feature is not enabled"):
        make_engine(tiny_llama).submit(Request(PROMPT, GREEDY, adapter_name="all"))


def told_by(engine: Engine, adapter: SentAdapter, salt: bytes = b"") -> list[int]:
    [request] = engine.submit(Request(PROMPT, GREEDY, sent_adapter=adapter, prefix_key=salt))
    run_steps(engine, {})
    assert request.sent_adapter is None, "its weights are held no longer"
    return request.token_ids[len(PROMPT) :]


def test_weights_that_clients_send(tiny_llama: Path, adapters: Mapping[str, Path], tmp_path: Path) -> None:
    """The first request of a number brings them; later ones name it, in the client's own cache alone."""
    weights, config = as_sent(adapters["queries"], 3.0)
    engine = serving(tiny_llama, {}, lora_cache_bytes=1 << 20)
    rounded = make_adapter(tmp_path / "rounded", tiny_llama, 2, rank=2, modules=("q_proj", "down_proj"))
    pairs = load_file(rounded / "adapter_model.safetensors")
    scaled = {name: (3.0 * pair if ".lora_B." in name else pair) for name, pair in pairs.items()}
    save_file({name: pair.half().float() for name, pair in scaled.items()}, rounded / "adapter_model.safetensors")
    [expected] = answers(make_engine(merged(tmp_path / "merged", tiny_llama, rounded)), [("", PROMPT)])
    assert told_by(engine, sent(7, weights, config)) == expected == told_by(engine, sent(7))
    for adapter, salt in ((sent(8), b""), (sent(7), b"another client")):
        with pytest.raises(RequestError, match=r"^lora_task_id: got .*send lora_weights and lora_config again"):
            told_by(engine, adapter, salt)
    other = as_sent(adapters["all"])
    assert told_by(engine, sent(7, *other)) != expected  # sent again, it is another adapter
    assert told_by(engine, sent(7)) == told_by(engine, sent(9, *other))


def test_the_room_for_sent_adapters_is_bounded(tiny_llama: Path, adapters: Mapping[str, Path]) -> None:
    weights, config = as_sent(adapters["queries"])
    probe = serving(tiny_llama, {}, lora_cache_bytes=1 << 20)
    told_by(probe, sent(1, weights, config))
    [one] = probe.adapters._sent._live
    engine = serving(tiny_llama, {}, lora_cache_bytes=2 * one.num_bytes)
    for task_id in (1, 2, 1, 3):
        told_by(engine, sent(task_id, weights, config))
    assert [key[1] for key in engine.adapters._sent._known] == [1, 3]
    for task_id in (4, 5):
        engine.submit(Request(PROMPT, GREEDY, sent_adapter=sent(task_id, weights, config)))
    with pytest.raises(CapacityError, match="fill lora_cache_host_memory_bytes"):
        engine.submit(Request(PROMPT, GREEDY, sent_adapter=sent(6, weights, config)))
    run_steps(engine, {})
    assert told_by(engine, sent(6, weights, config))
    with pytest.raises(RequestError, match=r"^lora_weights: has .* bytes, accepted: at most"):
        told_by(serving(tiny_llama, {}, lora_cache_bytes=100), sent(1, weights, config))
    with pytest.raises(RequestError, match=r"^lora_task_id: LoRA weights are not taken"):
        told_by(serving(tiny_llama, {}), sent(1, weights, config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights, config: (weights[:1], config), "lora_weights: has 1 rows and lora_config 4"),
        (lambda weights, config: (weights, np.add(config, [[0, 0, 5]])), "lora_config: got rank 7"),
        (
            lambda weights, config: (weights, np.add(config, [[0, 9, 0]])),
            "lora_config: got module 6 of layer 9, accepted",
        ),
        (
            lambda weights, config: (weights, np.add(config * [[0, 1, 1]], [[13, 0, 0]])),
            "lora_config: got module 13 of layer",
        ),
        (lambda weights, config: (weights, config * [[1, 0, 1]]), "lora_config: got module 6 of layer 0, .* once"),
        (lambda weights, config: (weights[:, :50], config), "lora_weights: has rows of 50 numbers"),
        (lambda weights, config: (np.full_like(weights, np.inf), config), "lora_weights: .* holds NaN, infinity"),
        (lambda weights, config: (weights, config - [[0, 0, 3]]), "lora_config: got rank -1"),
    ],
)
def test_sent_weights_that_do_not_fit(
    tiny_llama: Path, adapters: Mapping[str, Path], change: Callable[..., tuple[np.ndarray, np.ndarray]], message: str
) -> None:
    weights, config = change(*as_sent(adapters["queries"]))
    engine = serving(tiny_llama, {}, lora_cache_bytes=1 << 20)
    with pytest.raises(RequestError, match=f"^{message}"):
        told_by(engine, sent(1, weights, config.astype(np.int32)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"use_dora": True}}, "use_dora=True"),
        ({"config": {"bias": "all"}}, "bias='all'"),
        (
            {"config": {"init_lora_weights": "pissa_niter_4"}},
            "init_lora_weights='pissa_niter_4' of .* PEFT has changed",
        ),
        ({"config": {"lora_alpha": 10**400}}, "r and lora_alpha of adapter_config.json must be numbers"),
        ({"config": {"modules_to_save": ["lm_head"]}}, "modules_to_save"),
        ({"config": {"peft_type": "IA3"}}, "peft_type='IA3'"),
        ({"rank": 8}, "has rank 8; accepted: 1 to max_lora_rank=6"),
        ({"rename": ("layers.0.self_attn.q_proj", "layers.9.self_attn.q_proj")}, "layers.9.* is of no module"),
        ({"drop": "lora_B"}, "has lora_A alone"),
        ({"fill": float("inf")}, "holds NaN, infinity"),
        ({"transposed": True}, "have shapes"),
        ({"remove": "adapter_model.safetensors"}, "has no adapter_model.safetensors"),
        ({"remove": "adapter_config.json"}, "has no adapter_config.json"),
        ({"config": {"alpha_pattern": {"(": 1}}}, "alpha_pattern of adapter_config.json must hold numbers"),
        ({"config": {"alpha_pattern": [8]}}, "alpha_pattern of adapter_config.json must hold numbers"),
        ({"text": "{"}, "adapter_config.json.*not readable as JSON"),
        ({"truncate": 100}, "not a whole safetensors file"),
    ],
)
def test_what_cannot_be_served_is_named(
    tiny_llama: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = make_adapter(tmp_path / "a", tiny_llama, 1, rank=change.get("rank", 4), **change.get("config", {}))
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    if "rename" in change:
        tensors = {name.replace(*change["rename"]): tensor for name, tensor in tensors.items()}
    if "drop" in change:
        tensors = {name: tensor for name, tensor in tensors.items() if change["drop"] not in name}
    if "fill" in change:
        tensors[first].view(-1)[3] = change["fill"]
    if "transposed" in change:
        tensors = {name: tensor.t().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, file)
    if "remove" in change:
        (folder / str(change["remove"])).unlink()
    if "text" in change:
        (folder / "adapter_config.json").write_text(str(change["text"]))
    if "truncate" in change:
        file.write_bytes(file.read_bytes()[: change["truncate"]])
    with pytest.raises(ConfigError, match=message):
        serving(tiny_llama, {"a": folder})
    if "fill" not in change:  # validate reads no numbers
        with pytest.raises(ConfigError, match=f"^lora_modules='?{folder}.*{message}"):
            validate(model_folder(tmp_path / "llm", tiny_llama, {"a": folder}))


def model_folder(folder: Path, checkpoint: Path, adapters: Mapping[str, Path]) -> Path:
    """To validate, with the adapters in vLLM's file."""
    (folder / "1").mkdir(parents=True)
    values = {"model": checkpoint, "device": "cpu", "num_blocks": 64, "enable_lora": "true", "max_lora_rank": 6}
    text = "".join(parameter(key, value) for key, value in values.items())
    (folder / "config.pbtxt").write_text(f'backend: "slipstream"\n{text}')
    named = {name: str(adapter) for name, adapter in adapters.items()}
    (folder / "1" / "multi_lora.json").write_text(json.dumps(named))
    return folder


def test_validate_says_which_adapters_would_be_served(
    tiny_llama: Path, adapters: Mapping[str, Path], tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "llm", tiny_llama, adapters)
    report = validate(folder)
    assert "slots of rank 6 on the device" in report
    for name, modules in (("all", "14 modules of rank 4"), ("queries", "4 modules of rank 2")):
        num_bytes = (adapters[name] / "adapter_model.safetensors").stat().st_size
        found = re.search(rf"{name}: {modules}, ([\d.]+) MB in host memory, {adapters[name]}", report)
        assert found is not None and float(found[1]) == pytest.approx(num_bytes / 1e6, abs=0.06)
    for bad in (b'{"a": 3}', b"\xff"):
        (folder / "1" / "multi_lora.json").write_bytes(bad)
        with pytest.raises(ConfigError, match=r"lora_modules=.*multi_lora.json"):
            validate(folder)


def test_no_salt_is_an_adapter_s_key(tiny_llama: Path, adapters: Mapping[str, Path]) -> None:
    """Else a client could put keys of the base model where the requests of an adapter look for theirs."""
    engine, expected = serving(tiny_llama, adapters), answers(serving(tiny_llama, adapters), [("all", PROMPT)])
    [adapter] = [one for one in engine.adapters._by_name.values() if one.name == "all"]
    salted = Request(list(PROMPT), GREEDY, prefix_key=salted_key(adapter.prefix_key.decode()))
    engine.submit(salted)
    run_steps(engine, {})
    assert answers(engine, [("all", PROMPT)]) == expected and len(salted.prefix_key) == len(salted_key("x"))


def test_an_adapter_of_a_last_step_makes_room(tiny_llama: Path, adapters: Mapping[str, Path]) -> None:
    """The step that loaded it is the last one, the engine idles, and the request could have taken longer: nobody has
    the adapter any more."""
    weights, config = as_sent(adapters["all"])
    sizes = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 6}
    engine = make_engine(tiny_llama, {**sizes, "lora_cache_bytes": 100_000_000})
    [request] = engine.submit(Request(list(PROMPT), GREEDY, sent_adapter=sent(1, weights, config)))
    assert request.adapter is not None
    engine = make_engine(tiny_llama, {**sizes, "lora_cache_bytes": int(1.5 * request.adapter.num_bytes)})
    for number in (1, 2, 3):
        one = replace(GREEDY, max_tokens=1)
        engine.submit(Request(list(PROMPT), one, deadline=1e12, sent_adapter=sent(number, weights, config)))
        run_steps(engine, {})
        gc.collect()


def test_many_who_wait_for_a_slot_keep_nobody_else(tiny_llama: Path, adapters: Mapping[str, Path]) -> None:
    engine = serving(tiny_llama, adapters, max_loras=1)
    first, second = list(adapters)[:2]
    [holder] = engine.submit(Request(list(PROMPT), replace(GREEDY, max_tokens=60), adapter_name=first))
    run_steps(engine, {}, 2)
    for number in range(70):
        engine.submit(Request([5 + number, 7, 8], GREEDY, adapter_name=second))
    [plain] = engine.submit(Request([40, 41, 42], replace(GREEDY, max_tokens=2)))
    run_steps(engine, {}, 6)
    assert plain.is_finished and not holder.is_finished

"""One row is enough: a setting that a test adds to the table goes through all three contracts, schema and docs.

And what every row of the table itself holds: one bound, refused in the same words wherever the value comes from.
"""

from __future__ import annotations

import importlib.util
import json
import re
import struct
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError, create_model
from slipstream.core import setting_kinds as kinds
from slipstream.core.contract_origins import SLIPSTREAM
from slipstream.core.errors import RequestError
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.settings import BY_NAME, PASSED_ON, SETTINGS, Setting
from slipstream.core.wire_messages import DataType, Tensor
from slipstream.protocol.client_settings import NameIndex, Settings, index_names, read_settings
from slipstream.protocol.contract_generate import inputs_of
from slipstream.server.schemas import ChatRequest, CompletionRequest, Strict, make_fields
from slipstream.server.validation import explain
from wire_requests import request, tensor

NEW = Setting(
    "top_n_sigma",
    kinds.Number(0.0, 9.0),
    0.0,
    "Drop tokens this many standard deviations below the likeliest one.",
    {"top_n_sigma": (SLIPSTREAM,), "runtime_top_n_sigma": (SLIPSTREAM,)},
    json=("n_sigma",),
    openai=PASSED_ON,
)
WITH_NEW = index_names((*SETTINGS, NEW))


def fp32(name: str, value: float) -> Tensor:
    return Tensor(name, int(DataType.FP32), (1,), struct.pack("<f", value))


def by_tensor(name: str, value: float, index: NameIndex) -> Settings:
    return read_settings(request(fp32(name, value)), index=index)


def by_parameter(name: str, value: float, index: NameIndex) -> Settings:
    return read_settings(request(parameters={name: value}), index=index)


def by_json(name: str, value: float, index: NameIndex) -> Settings:
    return read_settings(request(tensor("sampling_parameters", json.dumps({name: value}))), index=index)


@pytest.mark.parametrize("source", [by_tensor, by_parameter, by_json])
def test_a_new_row_is_read_and_checked_under_each_of_its_names(source) -> None:
    names = ("top_n_sigma", "runtime_top_n_sigma", *(() if source is by_tensor else NEW.json))
    for name in names:
        assert source(name, 2.5, WITH_NEW) == {"top_n_sigma": 2.5}
        with pytest.raises(RequestError, match=rf"^{name}: got 9.5, accepted: a number from 0 to 9$"):
            source(name, 9.5, WITH_NEW)
        with pytest.raises(RequestError, match=rf"^{name}: unknown"):
            source(name, 2.5, index_names(SETTINGS))


def test_a_new_row_is_declared_as_tensors() -> None:
    declared = inputs_of(NEW)
    assert [(spec.name, spec.dtype, spec.dims) for spec in declared] == [
        ("top_n_sigma", DataType.FP32, (1,)),
        ("runtime_top_n_sigma", DataType.FP32, (1,)),
    ]
    assert [spec.doc for spec in declared] == [NEW.doc, "Same as `top_n_sigma`."]


def test_a_new_row_is_a_field_of_requests_to_the_gateway() -> None:
    model = create_model("Request", __base__=Strict, **make_fields((NEW,)))
    assert model.model_validate({"top_n_sigma": 2.5}).model_dump(exclude_none=True) == {"top_n_sigma": 2.5}
    [asked] = model.model_json_schema()["properties"].values()
    assert asked["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 9.0} and asked["description"] == NEW.doc
    for wrong in (9.5, "2.5", True):
        with pytest.raises(ValidationError):
            model.model_validate({"top_n_sigma": wrong})


def test_a_new_row_is_documented() -> None:
    path = Path(__file__).resolve().parents[2] / "build" / "make_docs.py"
    spec = importlib.util.spec_from_file_location("make_docs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row = next(line for line in module.settings((*SETTINGS, NEW)).splitlines() if "`top_n_sigma`" in line)
    assert "| `top_n_sigma`, `n_sigma`, `runtime_top_n_sigma` | a number from 0 to 9 | `0.0` | same name |" in row
    assert NEW.doc in row and "`top_n_sigma`" in module.openai_names((NEW,))


# ---------------------------------------------------------------- the table itself

SCALARS = [setting for setting in SETTINGS if isinstance(setting.kind, kinds.Integer | kinds.Number)]


@pytest.mark.parametrize("setting", [s for s in SCALARS if s.openai == PASSED_ON], ids=lambda setting: setting.name)
@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_engine_library_and_gateway_refuse_a_value_in_the_same_words(setting: Setting, schema: type[Strict]) -> None:
    for value in (setting.kind.low - 1, setting.kind.high + 1):
        with pytest.raises(RequestError) as refused:
            read_settings(request(parameters={setting.name: value}))
        words = f"accepted: {setting.kind.accepted}"
        assert str(refused.value).startswith(f"{setting.name}: got ") and str(refused.value).endswith(words)
        if setting.name in {field.name for field in fields(SamplingParams)}:
            with pytest.raises(RequestError) as refused:
                SamplingParams(**{setting.name: value})
            assert str(refused.value) == f"{setting.name}: got {value!r}, {words}"
        with pytest.raises(ValidationError) as invalid:
            schema.model_validate({"model": "m", "messages": [{"role": "user"}], "prompt": "x", setting.name: value})
        faults = [fault for fault in invalid.value.errors() if fault["loc"] == (setting.name,)]
        message, param = explain(faults)
        assert param == setting.name and message.startswith(f"{setting.name}: got {value!r}, {words} (Input should be")


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_row_has_a_default_that_its_kind_accepts_and_names_of_its_own(setting: Setting) -> None:
    if setting.default is not None:
        setting.kind.check(setting.name, setting.default)
    for other in SETTINGS:
        shared = {*setting.tensors, *setting.parameters} & {*other.tensors, *other.parameters}
        assert setting is other or (not shared and not set(setting.json) & set(other.json))


def test_values_that_are_read_need_no_second_check() -> None:
    """A parsed request builds SamplingParams unchecked: both ways give the same."""
    given = {"temperature": "0.5", "top_k": "7", "stop": "END", "logit_bias": {"5": "1.5"}, "seed": 12, "n": 2}
    read = {name: BY_NAME[name].kind.read(name, value) for name, value in given.items()}
    assert SamplingParams(**read, are_checked=True) == SamplingParams(**read)
    assert SamplingParams(top_p=0.0, are_checked=True) == SamplingParams(top_p=0.0) == SamplingParams(temperature=0.0)


def test_a_refusal_names_the_tensor_that_the_client_sent() -> None:
    for name, value, accepted in [
        ("request_output_len", 0, "an integer from 1 to 2147483647"),
        ("num_return_sequences", 129, "an integer from 1 to 128"),
        ("sampling_param_temperature", -0.5, r"a number from 0 \(greedy\) to 100"),
        ("runtime_top_k", -2, "an integer from 1 to 2147483647, or 0 or -1 for all tokens"),
    ]:
        with pytest.raises(RequestError, match=f"^{name}: got {value}, accepted: {accepted}$"):
            read_settings(request(tensor(name, value)))


@pytest.mark.parametrize("token_ids", [[], [5, -1], [2**31]])
def test_allowed_token_ids_are_token_ids_and_one_at_least(token_ids: list[int]) -> None:
    accepted = "accepted: token ids from 0 to 2147483647, one at least"
    refused = f"^allowed_token_ids: got {re.escape(repr(tuple(token_ids)))}, {accepted}$"
    with pytest.raises(RequestError, match=refused):
        read_settings(request(tensor("sampling_parameters", json.dumps({"allowed_token_ids": token_ids}))))
    with pytest.raises(RequestError, match=refused):
        SamplingParams(allowed_token_ids=tuple(token_ids))

"""`slipstream validate` and a load in the real server say the same of the same model folder."""

from __future__ import annotations

import json

import pytest
from llm_server import LlmServer
from slipstream.core.errors import ConfigError
from slipstream.engine.validate import validate

BAD = {
    "unknown_key": {"max_num_seq": "4"},
    "placeholder": {"max_num_seqs": "${max_num_seqs}"},
    "combination": {"num_blocks": "64", "memory_bytes": "1000000"},
    "kv_type_not_the_models": {"kv_cache_dtype": "float16", "device": "cpu"},
    "pool_too_small": {"num_blocks": "2", "device": "cpu"},
}


@pytest.mark.parametrize("name", BAD)
def test_a_load_fails_with_the_words_of_validate(llm_server: LlmServer, name: str) -> None:
    llm_server.add_variant(name, BAD[name])
    with pytest.raises(ConfigError) as refused:
        validate(llm_server.repository / name)
    said = str(refused.value).partition(" (")[
        0
    ]  # the free memory in the arithmetic differs from one moment to the next
    status, body = llm_server.load(name)
    assert status == 400 and said in json.loads(body)["error"]

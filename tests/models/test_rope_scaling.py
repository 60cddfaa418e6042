"""Rope tables at long positions against Hugging Face's, and `rope_scaling`, which replaces a checkpoint's scaling."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_forward import PagedForward
from slipstream import LLM, SamplingParams
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.load import load_model
from slipstream.nn.models.rope_scaling import MAX_POSITIONS
from slipstream.nn.read_spec import read_spec
from slipstream.nn.rotary import RopeTables, cos_sin_cache
from slipstream.nn.spec import DecoderSpec
from tiny_checkpoints import make_checkpoint, relative_error
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

LONG = 196_608
PROMPT = [(7 * position) % 89 + 3 for position in range(60)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 5.0, 9.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 6.0},
        {"rope_type": "dynamic", "factor": 6.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", "factor": 6.0, "original_max_position_embeddings": 32768},
        {"rope_type": "longrope", "original_max_position_embeddings": 4096, **LONGROPE},
        {"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 8.0, **LONGROPE},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_tables_at_192k_are_hugging_face_s(scaling: dict[str, Any], tmp_path: Path) -> None:
    """In fp32: the last bit of an angle of 2e5 is 0.016, so only frequencies of the same bits give the same table.

    The base of `dynamic` is computed in another order: it may differ by a bit, in features of few turns.
    """
    declared = 32768 if scaling["rope_type"] in ("linear", "dynamic") else LONG
    sizes = {"max_position_embeddings": declared, "rope_parameters": {"rope_theta": 1e6, **scaling}}
    if scaling["rope_type"] == "longrope":
        sizes["original_max_position_embeddings"] = 4096
    model = make_checkpoint("llama2-mha", tmp_path, **sizes).model
    (rope,) = {attention.rope for attention in read_spec(tmp_path).attentions}
    assert rope is not None and read_spec(tmp_path).max_model_len == LONG
    table = cos_sin_cache(rope, LONG)
    last = LONG - 1
    # Hugging Face's dynamic base follows the longest position of a call, ours each token's own
    calls = [[4095], [100_000], [last]] if rope.type == "dynamic" else [[*range(40_000), *range(last - 40_000, LONG)]]
    embedding = Phi3RotaryEmbedding if rope.type == "longrope" else type(model.model.rotary_emb)
    for positions in calls:
        cos, sin = embedding(model.config)(torch.zeros(1), torch.tensor([positions]))
        theirs = torch.cat([half[0, :, : rope.rotary_dim // 2] for half in (cos, sin)], dim=-1)
        assert (table[positions] - theirs).abs().max() < (1e-5 if rope.type == "dynamic" else 1e-6)
    assert cos_sin_cache(rope, 5000)[4999].equal(table[4999]) or rope.type == "longrope"  # of the position alone


@pytest.mark.parametrize("variant", ["llama2-mha", "llama-rope-linear", "chatglm", "gemma3", "mistral-seeing"])
def test_the_parameter_is_what_the_config_would_be(variant: str, tmp_path: Path) -> None:
    """As a parameter, and as Hugging Face's config: the same logits, which are not those of the stored scaling."""
    checkpoint = make_checkpoint(variant, tmp_path)
    config = checkpoint.model.config
    by_type = isinstance(config.rope_parameters.get("full_attention"), dict)
    kept = {
        key: value
        for key, value in (config.rope_parameters["full_attention"] if by_type else config.rope_parameters).items()
        if key in ("rope_theta", "partial_rotary_factor")
    }
    scaled = {**YARN, **kept}
    config.rope_parameters = {**config.rope_parameters, "full_attention": scaled} if by_type else scaled
    model = type(checkpoint.model)(config).eval()
    model.load_state_dict(checkpoint.model.state_dict())
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPT])).logits[0]
    ours = logits(tmp_path, YARN)
    assert relative_error(ours, theirs) <= 1e-4
    assert relative_error(ours, checkpoint.logits(PROMPT)) > 1e-2


def logits(path: Path, scaling: dict[str, object]) -> torch.Tensor:
    decoder = load_model(ModelConfig(model=str(path), device="cpu", rope_scaling=json.dumps(scaling)))
    (found,) = PagedForward(decoder, [PROMPT]).run([len(PROMPT)])
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama2-mha", tmp_path_factory.mktemp("llama")).path


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"rope_type": "default"}, 64),
        ({"type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 256),  # of the 64 that the checkpoint declares
        ({**YARN, "factor": 8.0}, 128),
        ({"rope_type": "llama3", **LLAMA3}, 65536),
        ({"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 64, **LONGROPE}, 512),
    ],
)
def test_length_that_a_scaling_serves(llama: Path, scaling: dict[str, object], length: int) -> None:
    assert spec_of(llama, scaling).max_model_len == length


@pytest.mark.parametrize("variant", ["gemma3", "olmo3"])
def test_ropes_of_window_layers_bound_no_scaled_length(variant: str, tmp_path: Path) -> None:
    """They stay as they are, at any position; as in config.json they bound what is stored."""
    checkpoint = make_checkpoint(variant, tmp_path)
    assert read_spec(tmp_path).max_model_len == 64
    assert spec_of(tmp_path, {"rope_type": "linear", "factor": 4.0}).max_model_len == 256
    assert spec_of(tmp_path, YARN).max_model_len == 64
    assert spec_of(tmp_path, {**YARN, "factor": 16.0}).max_model_len == 256
    decoder = load_model(ModelConfig(model=str(tmp_path), device="cpu", rope_scaling='{"type": "linear", "factor": 4}'))
    (found,) = PagedForward(decoder, [PROMPT * 4]).run([240])
    assert relative_error(found, checkpoint.logits(PROMPT * 4)) <= 1e-4  # its full layers had that factor before


def test_the_engine_serves_the_scaled_length(llama: Path, demo_model: Path) -> None:
    with LLM(str(llama), device="cpu", tokenizer=str(demo_model), num_blocks=8, rope_scaling=json.dumps(YARN)) as llm:
        assert llm.engine.max_model_len == 64
    longer = json.dumps({**YARN, "factor": 16.0})
    with LLM(str(llama), device="cpu", tokenizer=str(demo_model), num_blocks=8, rope_scaling=longer) as llm:
        assert llm.engine.max_model_len == 256
        [found] = llm.generate([PROMPT + PROMPT], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        assert len(found.token_ids) == 3  # of a prompt that the checkpoint alone could not take
    with pytest.raises(ConfigError, match=r"max_model_len=257: .*at most 256"):
        LLM(str(llama), device="cpu", tokenizer=str(demo_model), max_model_len=257, rope_scaling=longer)


def spec_of(path: Path, scaling: dict[str, object]) -> DecoderSpec:
    return read_spec(path, json.dumps(scaling))


SCALED_QUERIES = {**YARN, "rope_theta": 500.0, "llama_4_scaling_beta": 0.1}


def test_queries_are_scaled_by_their_position(tmp_path: Path) -> None:
    """A load for no more than the original length has nothing to scale; another rope scaling keeps that of queries."""
    make_checkpoint("mistral-seeing", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["rope_parameters"] = SCALED_QUERIES
    (tmp_path / "config.json").write_text(json.dumps(config))
    ropes = [read_spec(tmp_path, scaling).layers[0].attention.rope for scaling in ("", '{"rope_type": "default"}')]
    for rope in ropes:
        assert rope is not None and (rope.query_beta, rope.query_length) == (0.1, 16)
        scales = RopeTables(40, torch.device("cpu")).query_scales(rope)
        expected = [1.0] * 16 + [1 + 0.1 * math.log(2)] * 16 + [1 + 0.1 * math.log(3)] * 8
        assert scales is not None and scales.tolist() == pytest.approx(expected)
        assert RopeTables(16, torch.device("cpu")).query_scales(rope) is None
    assert read_spec(tmp_path).max_model_len == 64


def test_latent_attention_is_served_up_to_the_first_scaled_query(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint("deepseek-v3", tmp_path, rope_parameters=SCALED_QUERIES)
    assert read_spec(tmp_path).max_model_len == 16
    assert "up to 16 tokens are served" in caplog.text
    with pytest.raises(ConfigError, match="max_model_len=17"):
        load_model(ModelConfig(model=str(tmp_path), device="cpu", max_model_len=17))


def test_a_factor_that_follows_from_lengths_scales_latent_scores_too(tmp_path: Path) -> None:
    """Of 64 tokens declared and 16 before: 4, with which Hugging Face has the same logits."""
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.0}
    sizes = {"rope_parameters": {"rope_theta": 10000.0, "factor": 4.0, **scaling}, "n_group": 1, "topk_group": 1}
    checkpoint = make_checkpoint("deepseek-v3", tmp_path, **sizes)
    assert relative_error(logits(tmp_path, scaling), checkpoint.logits(PROMPT)) <= 1e-4


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"llama_4_scaling_beta": -0.1}, "llama_4_scaling_beta=-0.1: must be a number above 0"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings=None: is missing"),
    ],
)
def test_a_scaling_of_queries_that_means_nothing_is_named(
    fields: dict[str, object], named: str, tmp_path: Path
) -> None:
    make_checkpoint("ministral3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=named):
        read_spec(tmp_path)


def test_longrope_takes_its_factors_by_max_model_len(llama: Path) -> None:
    spec = spec_of(llama, {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 64, **LONGROPE})
    rope = spec.layers[0].attention.rope
    assert rope is not None and rope.attention_factor == pytest.approx(
        (1 + torch.log(torch.tensor(8.0)) / torch.log(torch.tensor(64.0))).sqrt().item()
    )
    short, long = (cos_sin_cache(rope, length)[:64] for length in (64, 65))
    assert not short.equal(long)


def test_warns_of_lengths_and_of_short_prompts(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        spec_of(llama, {**YARN, "factor": 8.0})
    assert "serves up to 128 tokens; the checkpoint declares 64" in caplog.text
    assert "changes short prompts" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        spec_of(llama, {"rope_type": "default"})
    assert not caplog.text


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ("yarn", "rope_scaling='yarn': accepted: a JSON object"),
        ("{'rope_type': 'yarn'}", "accepted: a JSON object"),
        ("[1]", "accepted: a JSON object"),
        ("{}", "rope_scaling rope_type=None: accepted: default, linear"),
        (
            '{"rope_type": "linear", "type": "yarn", "factor": 2}',
            "rope_scaling type='yarn': accepted beside",
        ),
        ('{"rope_type": "spiral"}', "rope_scaling rope_type='spiral'"),
        ('{"rope_type": ["yarn"]}', "rope_scaling rope_type="),
        ('{"rope_type": "linear"}', "rope_scaling factor=None: is missing"),
        ('{"rope_type": "linear", "factor": "4"}', "rope_scaling factor='4': must be a number"),
        ('{"rope_type": "linear", "factor": 1e999}', "rope_scaling factor=inf: must be finite"),
        ('{"rope_type": "linear", "factor": NaN}', "rope_scaling factor=nan: must be finite"),
        ('{"rope_type": "linear", "factor": 2, "beta": 1}', "rope_scaling beta=1: no field of linear"),
        ('{"rope_type": "linear", "factor": 1e9}', f"serves 64000000000 tokens, accepted: up to {MAX_POSITIONS}"),
        (json.dumps({"rope_type": "llama3", **LLAMA3, "factor": 1e9}), "^rope_scaling=[0-9]+: must be .* at most"),
        (
            json.dumps({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 10**400}),
            "^rope_scaling original_max_position_embeddings=10+: must be an integer of at most",
        ),
        ('{"rope_type": "llama3", "factor": 8}', "rope_scaling low_freq_factor=None: is missing"),
        ('{"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}', "rope_scaling short_factor=.*list of 4"),
        ('{"rope_type": "yarn", "original_max_position_embeddings": 1.5}', "original_max_position_embeddings=1.5"),
    ],
)
def test_wrong_scaling_is_named(llama: Path, scaling: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_spec(llama, scaling)


def test_models_that_cannot_be_scaled(tmp_path: Path) -> None:
    make_checkpoint("baichuan-alibi", tmp_path / "alibi")
    with pytest.raises(ConfigError, match="BaichuanForCausalLM of this size has no rotary embedding"):
        spec_of(tmp_path / "alibi", YARN)
    make_checkpoint("phi3", tmp_path / "phi3")
    with pytest.raises(ConfigError, match=r"rope_scaling=.*rope type yarn is none of this family's"):
        spec_of(tmp_path / "phi3", YARN)

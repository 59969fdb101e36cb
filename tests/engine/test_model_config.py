"""What is read from config.json, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.errors import ModelLoadError
from kvferry.services.engine.model_config import ModelConfig, RopeConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """BASE with `changes`; a change to `...` takes the key away."""
    raw = {key: value for key, value in (BASE | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_what_config_json_leaves_out_is_derived(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.rope == RopeConfig(10000.0)
    assert not any((config.tied_head, config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm))
    assert config.eos_token_ids == ()


def test_an_explicit_head_dim_and_kv_heads_count(tmp_path: Path) -> None:
    config = read(tmp_path, head_dim=32, num_key_value_heads=2)
    assert (config.num_kv_heads, config.head_dim) == (2, 32)


def test_families_differ_in_biases_and_norms(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    llama = read(tmp_path, attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(10000.0, "linear", 2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeConfig(10000.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, RopeConfig(5e5, "llama3", 32.0)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 7e4, **LLAMA3}}, RopeConfig(7e4, "llama3", 32.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 3.0}, RopeConfig(1e6)),
    ],
)
def test_every_spelling_of_rope_is_read(changes: dict[str, Any], expected: RopeConfig, tmp_path: Path) -> None:
    assert read(tmp_path, **changes).rope == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel; supported are LlamaForCausalLM, Mistral"),
        ({"architectures": ...}, "model_type 'llama' without 'architectures'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised (awq)"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope type 'yarn' is not supported, only default"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'per layer'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"vocab_size": ...}, "lacks 'vocab_size'"),
        ({"num_hidden_layers": "many"}, "does not make sense"),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3 kv heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(tmp_path, **changes)
    assert named in error.value.message


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 32768}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "changes",
    [
        MISTRAL | {"sliding_window": 4096},
        MISTRAL,  # 4096 is transformers' default
        QWEN2 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 1},
        QWEN2 | {"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_a_sliding_window_in_force_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="sliding window of 4096 tokens, which is not supported"):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        MISTRAL | {"sliding_window": None},
        MISTRAL | {"sliding_window": 4096, "max_position_embeddings": 4096},
        QWEN2 | {"sliding_window": 4096, "use_sliding_window": False},
        QWEN2 | {"sliding_window": 4096},
        QWEN2 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2},
        QWEN2 | {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_a_sliding_window_that_never_takes_effect_is_accepted(changes: dict[str, Any], tmp_path: Path) -> None:
    read(tmp_path, **changes)


def test_eos_ids_of_both_files_are_joined(tmp_path: Path) -> None:
    config = read(tmp_path, {"eos_token_id": [128001, 128008]}, eos_token_id=128009)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert read(tmp_path, {"eos_token_id": 2}, eos_token_id=2).eos_token_ids == (2,)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a folder"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="does not parse"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="does not hold a JSON object"):
        ModelConfig.from_folder(tmp_path)

"""What a Llama-family model is, read from its `config.json`; what we could not compute rightly is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.common.errors import ModelLoadError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies. `factor` is used by linear and llama3, what follows it by llama3 alone."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Raises ModelLoadError when `folder` is no model folder, or holds a model that is not supported."""
        if not folder.is_dir():
            raise ModelLoadError(f"{folder} is not a folder with a model")
        raw = _read_json(folder / "config.json")
        if raw is None:
            raise ModelLoadError(f"{folder} is not a model folder: it has no config.json")
        return cls._from_raw(raw, _read_json(folder / "generation_config.json") or {}, folder)

    @classmethod
    def _from_raw(cls, raw: Mapping[str, Any], generation: Mapping[str, Any], folder: Path) -> ModelConfig:
        architecture = _architecture(raw, folder)
        _refuse_unsupported(raw, architecture, folder)
        try:
            num_heads = int(raw["num_attention_heads"])
            derived = 128 if architecture == "Qwen3ForCausalLM" else int(raw["hidden_size"]) // num_heads
            attention_bias = bool(raw.get("attention_bias"))
            return cls(
                architecture=architecture,
                vocab_size=int(raw["vocab_size"]),
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
                head_dim=int(raw.get("head_dim") or derived),
                max_position_embeddings=int(raw["max_position_embeddings"]),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope=_rope(raw, folder),
                tied_head=bool(raw.get("tie_word_embeddings", False)),
                qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
                o_bias=attention_bias,
                mlp_bias=bool(raw.get("mlp_bias")),
                qk_norm=architecture == "Qwen3ForCausalLM",
                eos_token_ids=_token_ids(generation.get("eos_token_id"), raw.get("eos_token_id")),
            )
        except KeyError as exc:
            raise ModelLoadError(f"{folder}/config.json lacks {exc.args[0]!r}") from exc
        except (TypeError, ValueError) as exc:
            raise ModelLoadError(f"{folder}/config.json does not make sense: {exc}") from exc

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(f"{self.num_heads} attention heads are no multiple of {self.num_kv_heads} kv heads")
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file, or None where there is no file."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise ModelLoadError(f"{path} does not parse: {exc}") from exc
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return data


def _architecture(raw: Mapping[str, Any], folder: Path) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    found = ", ".join(map(str, names)) or f"model_type {raw.get('model_type')!r} without 'architectures'"
    raise ModelLoadError(f"{folder} holds {found}; supported are {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(raw: Mapping[str, Any], architecture: str, folder: Path) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelLoadError(f"{folder}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("quantization_config"):
        method = dict(raw["quantization_config"]).get("quant_method", "unknown")
        raise ModelLoadError(f"{folder}: the weights are quantised ({method}); only plain float weights are supported")
    if window := _sliding_window(raw, architecture):
        raise ModelLoadError(
            f"{folder}: the model attends within a sliding window of {window} tokens, which is not supported: "
            "its answers would be wrong beyond that length"
        )


def _sliding_window(raw: Mapping[str, Any], architecture: str) -> object:
    """The window if any layer would use one within the model's context, else None. Defaults are transformers'."""
    mistral = architecture == "MistralForCausalLM"
    window = raw.get("sliding_window", 4096 if mistral else None)
    if layers := raw.get("layer_types"):
        return (window or "unknown") if "sliding_attention" in layers else None
    if not window or not raw.get("use_sliding_window", mistral):
        return None
    if not mistral and raw.get("max_window_layers", 28) >= raw.get("num_hidden_layers", 0):
        return None
    return window if window < raw.get("max_position_embeddings", window + 1) else None


def _rope(raw: Mapping[str, Any], folder: Path) -> RopeConfig:
    """Reads `rope_scaling` in both of its spellings, and the `rope_parameters` of transformers 5."""
    spec = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = spec.get("rope_type", spec.get("type", "default"))
    if kind not in ROPE_TYPES or any(isinstance(value, dict) for value in spec.values()):
        kind = kind if kind not in ROPE_TYPES else "per layer"
        raise ModelLoadError(f"{folder}: rope type {kind!r} is not supported, only {', '.join(ROPE_TYPES)}")
    if spec.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise ModelLoadError(f"{folder}: partial_rotary_factor is not supported, only rotation of whole heads")
    theta = float(spec.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, float(spec["factor"]))
    return RopeConfig(
        theta,
        kind,
        float(spec["factor"]),
        float(spec["low_freq_factor"]),
        float(spec["high_freq_factor"]),
        int(spec["original_max_position_embeddings"]),
    )


def _token_ids(*sources: Any) -> tuple[int, ...]:
    """The ids in all sources, each of which may be one id, a list or nothing."""
    found: dict[int, None] = {}
    for source in sources:
        for token_id in source if isinstance(source, list) else [source]:
            if token_id is not None:
                found[int(token_id)] = None
    return tuple(found)

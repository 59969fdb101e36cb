"""A tiny random model folder with a real tokenizer: everything that reads models runs on it in milliseconds.

Same folder for the same arguments, byte for byte. Written without transformers, as an exporter's user would find it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 512
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "The prompt is computed on one node and the tokens are produced on another one.",
    "A block of keys and values belongs to exactly one account at any instant.",
    "Ferries carry cars, people and, here, the blocks of a paged cache across the water.",
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer.",
    "A request ends in exactly one way, and whoever leaves is forgotten within one step of the engine.",
    "When the night ferry is late, the harbour master writes the time of its arrival into a worn notebook.",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "Größe, naïve café, 東京は日本の首都です, Привет, мир! 🙂🚀",
)


@dataclass(frozen=True)
class TinyShape:
    """Small, but with every kind of oddness: groups of 3 query heads, widths that no vector divides."""

    hidden_size: int = 48
    intermediate_size: int = 100
    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = VOCAB_SIZE
    max_position_embeddings: int = 512


def write_tiny_model(
    folder: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    shape: TinyShape | None = None,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 1,
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes the folder and returns it. `config` adds to config.json or overrides what stands there."""
    shape = shape or TinyShape()
    folder.mkdir(parents=True, exist_ok=True)
    merged = _config(architecture, shape, tied, dtype) | (config or {})
    _write_json(folder / "config.json", merged)
    _write_json(folder / "generation_config.json", {"eos_token_id": [2], "pad_token_id": 0})
    _write_tokenizer(folder)
    write_weights(folder, tiny_weights(merged, seed, dtype), num_shards)
    return folder


def tiny_weights(config: dict[str, Any], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random tensors with Hugging Face's names, large enough that attention and the next token have a preference."""
    generator = torch.Generator().manual_seed(seed)
    qwen2, qwen3 = (config["architectures"] == [f"Qwen{n}ForCausalLM"] for n in (2, 3))
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    attention_bias = bool(config.get("attention_bias"))
    weights: dict[str, torch.Tensor] = {}

    def linear(name: str, out: int, width: int, has_bias: bool = False) -> None:
        weights[f"{name}.weight"] = torch.randn(out, width, generator=generator) * 1.5 / width**0.5
        if has_bias:
            weights[f"{name}.bias"] = torch.randn(out, generator=generator) * 0.5

    def norm(name: str, width: int) -> None:
        weights[f"{name}.weight"] = 1 + torch.randn(width, generator=generator) * 0.2

    weights["model.embed_tokens.weight"] = torch.randn(config["vocab_size"], hidden, generator=generator)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        for name, out in (("q", query), ("k", kv), ("v", kv)):
            linear(f"{layer}.self_attn.{name}_proj", out, hidden, attention_bias or qwen2)
        linear(f"{layer}.self_attn.o_proj", hidden, query, attention_bias)
        if qwen3:
            norm(f"{layer}.self_attn.q_norm", head_dim)
            norm(f"{layer}.self_attn.k_norm", head_dim)
        norm(f"{layer}.post_attention_layernorm", hidden)
        for name, (out, width) in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            linear(f"{layer}.mlp.{name}_proj", out, width, bool(config.get("mlp_bias")))
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def write_weights(folder: Path, weights: dict[str, torch.Tensor], num_shards: int = 1) -> None:
    """One `model.safetensors`, or shards with an index."""
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        shard = {name: weights[name] for name in names[i::num_shards]}
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _config(architecture: str, shape: TinyShape, tied: bool, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": shape.vocab_size,
    }


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus is too short for the vocabulary"
    text: str = tokenizer.to_str()
    return text


def _write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    tokenizer_config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")

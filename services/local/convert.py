"""GGUF -> Hugging Face folder (config, float32 safetensors, tokenizer), for Llama models with a GPT-2 style tokenizer.

Written out here rather than left to transformers: its reader drops the digit splitting of SmolLM's tokenizer
(so "a  5" becomes other tokens than the model was trained on), and wants accelerate and torch for a plain copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.common.errors import ModelLoadError
from kvferry.common.models import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE

Array = NDArray[np.float32]

_CONTROL = 3  # tokenizer.ggml.token_type of a special token

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, into: Path, progress: Callable[[float], None] = lambda _: None) -> None:
    """Writes the folder `into` (which must exist). `progress` is called with shares in [0, 1].

    Raises ModelLoadError when the file holds something that this does not know how to carry over.
    """
    try:
        from gguf import GGUFReader
        from safetensors.numpy import save_file
    except ImportError as exc:
        raise ModelLoadError(f"converting the model needs the package {exc.name}: install kvferry[worker]") from exc
    reader = GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama" or meta.get("tokenizer.ggml.model") != "gpt2":
        raise ModelLoadError(
            f"{source.name}: architecture {meta.get('general.architecture')!r} with tokenizer "
            f"{meta.get('tokenizer.ggml.model')!r} is not supported: llama with gpt2 is"
        )
    config = _config(meta, tied=all(t.name != "output.weight" for t in reader.tensors))
    tokenizer_config = _tokenizer_config(meta)
    eos = meta["tokenizer.ggml.eos_token_id"]
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": eos, "pad_token_id": config["pad_token_id"]}
    _write_json(into / CONFIG_FILE, config)
    _write_json(into / "generation_config.json", generation)
    _write_json(into / "tokenizer_config.json", tokenizer_config)
    _write_tokenizer(meta, into / TOKENIZER_FILE)
    tensors = _tensors(reader, config["num_attention_heads"], config["num_key_value_heads"], progress)
    save_file(tensors, into / WEIGHTS_FILE, metadata={"format": "pt"})
    (into / WEIGHTS_FILE).chmod(0o644)  # like the others: safetensors would keep it for the owner alone
    progress(1.0)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads, hidden = int(meta["llama.attention.head_count"]), int(meta["llama.embedding_length"])
    theta = float(meta["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "max_position_embeddings": int(meta["llama.context_length"]),
        # Stored as float32: print the shortest number that is the same float32, so 1e-05 and not 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
    }


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json as it is, rebuilds nothing
        "model_max_length": int(meta["llama.context_length"]),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
    }


def _write_tokenizer(meta: dict[str, Any], path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in meta["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if (pre := meta["tokenizer.ggml.pre"]) == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in ("default", "gpt-2"):
        tokenizer.pre_tokenizer = byte_level
    else:
        raise ModelLoadError(f"pre-tokenizer {pre!r} is not supported: smollm and gpt-2 are")
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(path))


def _tensors(reader: Any, num_heads: int, num_kv_heads: int, progress: Callable[[float], None]) -> dict[str, Array]:
    from gguf import dequantize

    tensors: dict[str, Array] = {}
    for done, tensor in enumerate(reader.tensors):
        value: Array = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name.endswith("attn_q.weight"):
            value = _unpermute(value, num_heads)
        elif tensor.name.endswith("attn_k.weight"):
            value = _unpermute(value, num_kv_heads)
        tensors[_tensor_name(tensor.name)] = value
        progress(done / len(reader.tensors))
    return tensors


def _tensor_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    if part not in _LAYER_NAMES:
        raise ModelLoadError(f"tensor {name!r} of the GGUF file has no place in a Llama model")
    return f"model.layers.{block}.{_LAYER_NAMES[part]}.{kind}"


def _unpermute(weight: Array, num_heads: int) -> Array:
    """[num_heads * head_dim, hidden]: GGUF interleaves the two rotary halves of each head, Hugging Face does not."""
    rows, hidden = weight.shape
    halves = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(rows, hidden))

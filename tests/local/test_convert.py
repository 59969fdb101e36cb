from __future__ import annotations

import json

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers

from kvferry.common.errors import ModelLoadError
from kvferry.services.local.convert import convert_gguf

HEADS, KV_HEADS, HIDDEN, FFN, LAYERS = 4, 2, 64, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "a b", "Ġ 5"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def permuted(weight, num_heads):
    """How llama.cpp stores query and key weights."""
    rows, hidden = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def hf_weights():
    random = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    shapes = {"model.embed_tokens": (len(TOKENS), HIDDEN), "model.norm": (HIDDEN,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {f"{name}.weight": random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path, *, architecture="llama", pre="smollm", extra=None):
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    for kind, token_id in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{kind}_token_id")(token_id)
    writer.add_chat_template("{{ messages }}")
    for name, weight in hf_weights().items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
            writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[part]}.weight", permuted(weight, heads) if heads else weight)
        else:
            writer.add_tensor(f"{GGUF_NAMES[stem]}.weight", weight)
    if extra:
        writer.add_tensor(extra, np.zeros(4, dtype=np.float32), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def converted(tmp_path):
    into = tmp_path / "made"
    into.mkdir()
    shares = []
    convert_gguf(write_gguf(tmp_path / "tiny.gguf"), into, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    return into


def test_every_tensor_comes_out_under_its_hugging_face_name_bit_for_bit(converted):
    made, expected = load_file(converted / "model.safetensors"), hf_weights()
    assert set(made) == set(expected)
    for name, weight in expected.items():
        assert np.array_equal(made[name], weight), name


def test_the_configuration_says_what_the_file_says(converted):
    config = json.loads((converted / "config.json").read_text())
    assert config["max_position_embeddings"] == 8192
    assert config["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-05
    assert config["tie_word_embeddings"] is True
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert config["vocab_size"] == len(TOKENS)


def test_an_answer_ends_at_the_end_of_turn_token(converted):
    for name in ("config.json", "generation_config.json"):
        assert json.loads((converted / name).read_text())["eos_token_id"] == 2
    tokenizer = json.loads((converted / "tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<|im_end|>"
    assert tokenizer["chat_template"] == "{{ messages }}"


def test_the_tokenizer_splits_digits_as_the_model_was_trained(converted):
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("ab  5").tokens == ["ab", "ĠĠ", "5"]
    assert tokenizer.encode("<|im_end|>12").tokens == ["<|im_end|>", "1", "2"]


@pytest.mark.parametrize(
    "text", ["", " lead", "a\r\n\tb  c", "hé 🙂 日本語", "<|im_start|>user\nit's 2024<|im_end|>\n"]
)
def test_text_comes_back_whole(converted, text):
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma'"),
        ({"pre": "qwen9"}, "pre-tokenizer 'qwen9'"),
        ({"extra": "blk.0.attn_sinks.weight"}, "tensor 'blk.0.attn_sinks.weight'"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name(tmp_path, options, expected):
    (tmp_path / "made").mkdir()
    with pytest.raises(ModelLoadError, match=expected):
        convert_gguf(write_gguf(tmp_path / "tiny.gguf", **options), tmp_path / "made")

"""A small byte-level tokenizer with ChatML, made on the spot: every text has tokens, and characters split over them."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvferry.services.gateway.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
IM_END = 2
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a little girl.",
    "Say hello to the assistant, user and system. Hello world, hello there, hello again.",
    "naïve café — das Mädchen über die Straße. Привет, мир. こんにちは世界 日本語の文章",
]


def write_tokenizer(folder: Path) -> None:
    """Writes what the gateway reads of a model folder."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[1], "eos_token": {"content": SPECIAL[2]}, "chat_template": _CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512}))


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return Tokenizer.load(Path(folder))

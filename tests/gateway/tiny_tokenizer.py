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
HERMES_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ 'Answer with <tool_call>{...}</tool_call><|im_end|>\n' }}{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Shows tools and calls as Qwen's does, in short."""
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a little girl.",
    "Say hello to the assistant, user and system. Hello world, hello there, hello again.",
    "naïve café — das Mädchen über die Straße. Привет, мир. こんにちは世界 日本語の文章",
]


def write_tokenizer(folder: Path, chat_template: str = _CHAT_TEMPLATE) -> None:
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
    config = {"bos_token": SPECIAL[1], "eos_token": {"content": SPECIAL[2]}, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512}))


@functools.cache
def tiny_tokenizer(chat_template: str = _CHAT_TEMPLATE) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), chat_template)
        return Tokenizer.load(Path(folder))

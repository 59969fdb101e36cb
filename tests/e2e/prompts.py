"""The prompts that golden and split-equals-whole tests share: all lengths around block borders, and chats."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than
river stone tree green field road north south winter summer market music paper letter story church window door
"""
WORDS = _TEXT.split()
LENGTHS = (1, 1, 15, 15, 16, 16, 17, 17, 31, 31, 32, 32, 33, 33, 500, 1500)
CHATS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three fruits.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "Tell me a very short story about a fox and a \U0001f98a emoji.",
    "日本語で挨拶してください。",
)


@dataclass(frozen=True)
class Prompt:
    name: str
    token_ids: tuple[int, ...]
    chat: str | None = None


def all_prompts(model_folder: Path) -> list[Prompt]:
    """24 prompts for the model's own tokenizer. Chats use ChatML, as SmolLM2 does."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    prompts = []
    for i, length in enumerate(LENGTHS):
        words = random.Random(i).choices(WORDS, k=length + 8)
        ids = tokenizer.encode(" ".join(words), add_special_tokens=False).ids[:length]
        prompts.append(Prompt(f"{length}-tokens-{i}", tuple(ids)))
    for i, text in enumerate(CHATS):
        rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(Prompt(f"chat-{i}", tuple(tokenizer.encode(rendered, add_special_tokens=False).ids), text))
    return prompts

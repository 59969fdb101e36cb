"""A model folder's tokenizer: text -> ids, messages -> ids, one id -> its bytes. No torch, no network.

Reads `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` and `config.json`, as `transformers` does.
Everything here is safe to call from several threads; encoding releases the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import tokenizers

from kvferry.common.errors import BadRequest, ModelLoadError
from kvferry.services.gateway.chat_template import ChatTemplate

_SPACE = "\u2581"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, turned round."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in own}
    rest = (byte for byte in range(256) if byte not in own)
    return table | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF_CHAR = _byte_of_char()


class Tokenizer:
    """`vocab_size` counts the model's embedding rows: ids in `[0, vocab_size)` are safe to send to a node."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, vocab_size: int, chat_template: ChatTemplate | None = None
    ) -> None:
        """Raises ModelLoadError on a decoder that cannot be undone token by token."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._byte_level = _is_byte_level(tokenizer)
        self.vocab_size = vocab_size
        self.chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self.max_token_chars = max(map(len, vocab), default=1)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Raises ModelLoadError that names the file at fault."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(f"model folder {folder} has no tokenizer.json")
        try:
            raw = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # tokenizers raises bare Exception
            raise ModelLoadError(f"{path} is not a tokenizer: {exc}") from exc
        config = _read_json(folder / "tokenizer_config.json")
        rows = _read_json(folder / "config.json").get("vocab_size")
        vocab_size = rows if isinstance(rows, int) else raw.get_vocab_size(with_added_tokens=True)
        return cls(raw, vocab_size, _load_template(folder, config))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Special tokens around the text only where the tokenizer itself adds them."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens included."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat; its special tokens stand in the text. Raises BadRequest."""
        if self.chat_template is None:
            raise BadRequest("this model has no chat template: use /v1/completions", param="messages")
        return self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, as bytes of UTF-8 (not always whole characters). Empty for no token."""
        raw = self._bytes.get(token_id)
        if raw is None:
            raw = self._bytes[token_id] = self._undo(token_id)
        return raw

    def token_text(self, token_id: int) -> str:
        """The token alone as text, U+FFFD where it is not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _undo(self, token_id: int) -> bytes:
        token = self._added.get(token_id) or self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token, written as it is
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(_SPACE, " ").encode()


def _is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """True for GPT-2's bytes, False for SentencePiece's pieces. Raises ModelLoadError for anything else."""
    decoder = tokenizer.decoder
    state = orjson.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    kinds = [part["type"] for part in state.get("decoders", [state])]
    if "ByteLevel" in kinds:
        return True
    if kinds == ["Metaspace"] or {"Replace", "ByteFallback"} <= set(kinds) <= {
        "Replace",
        "ByteFallback",
        "Fuse",
        "Strip",
    }:
        return False
    raise ModelLoadError(f"tokenizer decoder {'+'.join(kinds)} is not supported: expected ByteLevel or SentencePiece")


def _load_template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source = path.read_text() if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    tokens = _read_json(folder / "special_tokens_map.json") | config
    special = {name: content for name in _SPECIAL_NAMES if (content := _content(tokens.get(name))) is not None}
    return ChatTemplate(source, special)


def _content(token: object) -> str | None:
    """A special token is written as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """{} when there is no such file."""
    try:
        data = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as exc:
        raise ModelLoadError(f"{path} does not parse: {exc}") from exc
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path}: expected an object")
    return data

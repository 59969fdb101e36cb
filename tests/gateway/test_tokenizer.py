"""The model folder's tokenizer and chat template, and what is said when a folder is not right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from kvferry.common.errors import BadRequest, ModelLoadError
from kvferry.services.gateway.chat_template import ChatTemplate
from kvferry.services.gateway.text import Detokenizer
from kvferry.services.gateway.tokenizer import Tokenizer
from tests.gateway.tiny_tokenizer import tiny_tokenizer, write_tokenizer


@given(st.text(max_size=80))
def test_every_text_survives_tokens(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)) == text.encode()


def test_the_vocabulary_is_what_the_model_has_rows_for() -> None:
    assert tiny_tokenizer().vocab_size == 512
    assert tiny_tokenizer().token_bytes(511) == b""


def test_a_chat_renders_with_its_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.render(messages)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(prompt)[0] == 1
    assert not tokenizer.render([{"role": "user", "content": "hi"}], add_generation_prompt=False).endswith(
        "assistant\n"
    )


def sentencepiece_like() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    vocab |= {"\u2581Hello": 258, "\u2581world": 259, "!": 260}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def test_sentencepiece_tokens_keep_their_spaces_and_join_bytes() -> None:
    tokenizer = Tokenizer(sentencepiece_like(), 261)
    detokenizer = Detokenizer(tokenizer)
    euro = [2 + byte for byte in "€".encode()]
    pieces = [detokenizer.push(token_id) for token_id in (1, 258, 259, 260, *euro)]
    assert pieces == ["", " Hello", " world", "!", "", "", "€"]


def test_bos_is_added_only_where_the_tokenizer_adds_it() -> None:
    assert Tokenizer(sentencepiece_like(), 261).encode("!")[0] == 1
    assert Tokenizer(sentencepiece_like(), 261).encode("!", add_special_tokens=False)[0] != 1
    assert tiny_tokenizer().encode("Hello")[0] > 2


def test_truncation_that_a_file_asks_for_is_not_done() -> None:
    raw = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.enable_truncation(2)
    raw.enable_padding(length=10)
    assert Tokenizer(raw, 1).encode("aaaa") == [0, 0, 0, 0]


# ---- folders


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_file_that_does_not_parse_is_named(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_cannot_be_undone_is_refused_by_name(tmp_path: Path) -> None:
    raw = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    raw.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Tokenizer(raw, 1)


def edit(folder: Path, **changes: Any) -> Tokenizer:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return Tokenizer.load(folder)


def test_where_the_template_may_stand(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual {{ bos_token }}"}]
    assert edit(tmp_path, chat_template=named).render([]) == "usual <|im_start|>"
    (tmp_path / "chat_template.jinja").write_text("own file {{ eos_token }}")
    assert Tokenizer.load(tmp_path).render([]) == "own file <|im_end|>"
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(BadRequest, match="no chat template"):
        edit(tmp_path, chat_template=None).render([])


# ---- templates


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(
        [{"role": "user", "content": "hé <b>"}], variables=variables
    )


def test_helpers_that_templates_expect() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hé <b>"}'
    assert render("{% for m in messages %}{% if true %}{% break %}{% endif %}x{% endfor %}y") == "y"
    assert render("a{% generation %}b{{ bos_token }}{% endgeneration %}c") == "ab<s>c"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% if tools is none %}no tools{% endif %}") == "no tools"
    assert render("{{ enable_thinking }}", enable_thinking="yes") == "yes"
    assert render("{% if true %}\n  x\n{% endif %}\n") == "  x\n"


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[5].content }}", "{{ 1 + 'x' }}", "{{ 1 / 0 }}"],
)
def test_a_template_that_fails_is_the_requests_fault(source: str) -> None:
    with pytest.raises(BadRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(BadRequest):
        render(source)


def test_variables_cannot_replace_the_messages() -> None:
    assert render("{{ messages | length }}", messages=[]) == "1"


def test_a_template_that_does_not_parse_fails_at_start() -> None:
    with pytest.raises(ModelLoadError, match="line 1"):
        ChatTemplate("{% if %}", {})

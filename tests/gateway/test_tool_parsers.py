"""Which part of a model's text is a call: the same whichever way the text was cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.services.gateway.tool_parsers import (
    PARSERS,
    Arguments,
    HermesParser,
    LlamaJsonParser,
    Part,
    ToolCall,
    ToolCallParser,
    format_of_template,
)

NAMES = frozenset({"f", "lookup"})
F = ToolCall("f", '{"a": 1}')
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'


def read(parser: type[ToolCallParser], pieces: Sequence[str], *, is_held: bool = False) -> list[Part]:
    """The parts, pieces of content and of arguments joined."""
    reading = parser(NAMES, is_held=is_held)
    parts = [part for piece in pieces for part in reading.push(piece)] + reading.flush()
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif isinstance(part, Arguments):
            call = joined.pop()
            assert isinstance(call, ToolCall)
            joined.append(ToolCall(call.name, call.arguments + part.text))
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (CALL, [F]),
        (CALL + "\n" + CALL + "\n", [F, F]),
        ("Let me look.\n" + CALL, ["Let me look.", F]),
        (CALL + " So.", [F, " So."]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', [F]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [F]),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>}\\" {"}}</tool_call>',
            [ToolCall("f", '{"x": "</tool_call>}\\" {"}')],
        ),
        ('<tool_call>{"arguments": {}, "name": "lookup"}</tool_call>', [ToolCall("lookup", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"x": "é🙂"}}', [ToolCall("f", '{"x": "é🙂"}')]),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}', [ToolCall("f", '{"x": "\\ud800"}')]),
        ("a < b and <tool", ["a < b and <tool"]),
        ("no call \n", ["no call \n"]),
    ],
)
def test_hermes(text: str, parts: list[Part]) -> None:
    assert read(HermesParser, [text]) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (LLAMA, [F]),
        ("<|python_tag|>" + LLAMA, [F]),
        (f"\n{LLAMA}; {LLAMA}", [F, F]),
        ('{"name": "f", "arguments": {"a": 1}}', [F]),
        (LLAMA + " and so on", [F, " and so on"]),
        ("I call " + LLAMA, ["I call " + LLAMA]),
        ('{"answer": 4} ' + LLAMA, ['{"answer": 4} ' + LLAMA]),
        ("<|python", ["<|python"]),
        ("", []),
    ],
)
def test_llama(text: str, parts: list[Part]) -> None:
    assert read(LlamaJsonParser, [text]) == parts


@pytest.mark.parametrize(
    "data",
    [
        '{"name": "other", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "f"}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f", "arguments": {"a": }}',
        '{"name": "f" "arguments": {}}',
        "{]}",
        "{",
        '{"a": ' + "[" * 100_000 + "}",
    ],
)
@pytest.mark.parametrize("parser", PARSERS.values())
def test_what_is_no_call_is_content_word_for_word(parser: type[ToolCallParser], data: str) -> None:
    text = f"<tool_call>{data}</tool_call> x" if parser is HermesParser else data
    assert read(parser, [text]) == [text]


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    assert read(HermesParser, ['<tool_call>{"name": "f"</tool_call>\n' + CALL]) == [
        '<tool_call>{"name": "f"</tool_call>',
        F,
    ]


def test_content_does_not_wait() -> None:
    parser = HermesParser(NAMES)
    assert parser.push("Hello <b>") == ["Hello <b>"]
    assert parser.push(" you") == [" you"]
    llama = LlamaJsonParser(NAMES)
    assert llama.push("Hel") == ["Hel"]
    assert llama.push('{"name"') == ['{"name"']


BITS = [CALL, LLAMA, "<tool_call>", "</tool_call>", "<|python_tag|>", "<tool", "{", "}", '"', "\\", ";", " ", "\n", "x"]
BITS += ['{"name": "f", "arguments": {"a": 1}}', '{"b": 2}', "é"]


@given(st.lists(st.sampled_from(BITS), max_size=8).map("".join), st.data())
def test_any_cut_of_the_text_gives_the_same_calls_and_content(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6), label="cuts"))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    for parser in PARSERS.values():
        whole = read(parser, [text])
        assert read(parser, pieces) == whole
        assert read(parser, list(text)) == whole
        for part in whole:
            if isinstance(part, ToolCall):
                assert part.name in NAMES
                assert isinstance(json.loads(part.arguments), dict)
        if not any(isinstance(part, ToolCall) for part in whole):
            assert "".join(map(str, whole)) == text


@pytest.mark.parametrize("parser", PARSERS.values())
def test_arguments_of_a_held_call_come_as_they_are_written(parser: type[ToolCallParser]) -> None:
    opening, key = ("<tool_call>\n", "arguments") if parser is HermesParser else ("", "parameters")
    reading = parser(NAMES, is_held=True)
    assert reading.push(f'{opening}{{"name": "f", "{key}": ') == []
    assert reading.push('{"a') == [ToolCall("f", ""), Arguments('{"a')]
    assert reading.push('": "}') == [Arguments('": "}')]
    assert reading.is_cut_off
    assert reading.push('"}') == [Arguments('"}')]
    assert not reading.is_cut_off
    assert reading.push("}") == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(), JSON, max_size=3)), max_size=3)


@settings(deadline=None)
@given(CALLS, st.booleans(), st.data())
def test_a_held_output_is_the_same_calls_whole_in_pieces_and_read_as_any_other(
    calls: list[tuple[str, dict[str, object]]], ascii_only: bool, data: st.DataObject
) -> None:
    written = [(name, json.dumps(given, ensure_ascii=ascii_only)) for name, given in calls]
    for parser, opening, key, closing, between in (
        (HermesParser, "<tool_call>\n", "arguments", "\n</tool_call>", "\n"),
        (LlamaJsonParser, "", "parameters", "", "; "),
    ):
        text = between.join(f'{opening}{{"name": "{n}", "{key}": {given}}}{closing}' for n, given in written)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6), label="cuts"))
        expected = [ToolCall(*call) for call in written]
        for pieces in ([text], list(text), [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]):
            for is_held in (True, False):
                assert read(parser, pieces, is_held=is_held) == expected


@settings(deadline=None)
@given(st.lists(st.sampled_from(BITS), max_size=8).map("".join), st.data())
def test_any_cut_of_any_text_gives_a_held_parser_the_same_parts(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6), label="cuts"))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    for parser in PARSERS.values():
        whole = read(parser, [text], is_held=True)
        assert read(parser, pieces, is_held=True) == whole
        assert read(parser, list(text), is_held=True) == whole


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ('{% if tools %}<tool_call>\n{"name": <function-name>}{% endif %}', "hermes"),
        ("{% if tools %}{{ '\"parameters\": ' }}{% endif %}", "llama3_json"),
        ("{% if tools %}<tool_call>\n<function=name>{% endif %}", None),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", None),
        ("{{ messages }}", None),
    ],
)
def test_the_form_is_told_by_the_chat_template(source: str, form: str | None) -> None:
    assert format_of_template(source) == form

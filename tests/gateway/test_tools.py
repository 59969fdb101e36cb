"""Tools through the whole gateway: what the model is shown, what it is held to, and what the client reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from kvferry.common.errors import BadRequest
from kvferry.services.gateway.openai import ChatRequest
from kvferry.services.gateway.tool_parsers import PARSERS, Arguments, HermesParser, Part, ToolCall, ToolFormat
from kvferry.services.gateway.tools import calls_are_held, compile_tools
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, events, gateway, run
from tests.gateway.tiny_tokenizer import HERMES_TEMPLATE, IM_END, tiny_tokenizer

TOKENIZER = tiny_tokenizer(HERMES_TEMPLATE)
QUERY = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"], "additionalProperties": False}
LOOKUP = {"type": "function", "function": {"name": "lookup", "description": "Looks it up.", "parameters": QUERY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
STRICT = {"type": "function", "function": LOOKUP["function"] | {"strict": True}}  # type: ignore[operator]
NAMED = {"type": "function", "function": {"name": "lookup"}}
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"q": "é"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'

ABCS = json.dumps({"q": "abc def ghi " * 10}, indent=1)
LONG = f'<tool_call>\n{{"name": "lookup", "arguments": {ABCS}}}\n</tool_call>'


def saying(text: str, **how: Any) -> FakeDecode:
    does = Behaviour(tokens=lambda request, index: TOKENIZER.encode(text), stop_token_id=IM_END, **how)
    return FakeDecode(does, max_model_len=4096)


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def put_together(stream: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A message out of a stream's deltas, as OpenAI's clients do it."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for choice in (choice for event in stream for choice in event["choices"]):
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"]
                assert call["type"] == "function"
                message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        (CALL, None, [("lookup", {"q": "é"})]),
        (f"I look.\n{CALL}\n{TIME}", "I look.", [("lookup", {"q": "é"}), ("clock", {})]),
        ("I know it.", "I know it.", []),
        ('<tool_call>{"name": "lookup", "argu', '<tool_call>{"name": "lookup", "argu', []),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>',) * 2 + ([],),
    ],
)
@pytest.mark.parametrize("tokens_per_step", [1, 1000])
def test_the_finish_reason_is_tool_calls_exactly_when_there_are_calls(
    said: str, content: str | None, calls: list[tuple[str, Any]], tokens_per_step: int
) -> None:
    async def scenario(setup: Setup) -> None:
        fields = {"tools": [LOOKUP, CLOCK]}
        (choice,) = (await setup.chat("Hi", **fields)).json()["choices"]
        assert choice["message"]["content"] == content
        assert calls_of(choice["message"]) == calls
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        streamed = put_together(events((await setup.chat("Hi", **fields, stream=True)).text))
        assert (streamed["content"] or None) == content
        assert calls_of(streamed) == calls
        assert streamed["finish_reason"] == choice["finish_reason"]

    run(gateway(saying(said, tokens_per_step=tokens_per_step), tokenizer=TOKENIZER), scenario)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_an_output_that_was_cut_off_before_a_calls_arguments_has_none(choice: str) -> None:
    async def scenario(setup: Setup) -> None:
        (made,) = (await setup.chat("Hi", tools=[LOOKUP], tool_choice=choice, max_tokens=20)).json()["choices"]
        assert made["finish_reason"] == "length"
        assert "tool_calls" not in made["message"]
        assert CALL.startswith(made["message"]["content"])

    run(gateway(saying(CALL), tokenizer=TOKENIZER), scenario)


def test_a_demanded_call_that_was_cut_off_shows_how_far_it_came_and_ends_as_the_output_did() -> None:
    size = len(TOKENIZER.encode(LONG)) - 20

    async def scenario(setup: Setup) -> None:
        for fields in ({"max_tokens": size}, {"stop": ["f"]}):
            demand = {"tools": [LOOKUP], "tool_choice": "required", **fields}
            (whole,) = (await setup.chat("Hi", **demand)).json()["choices"]
            (call,) = whole["message"]["tool_calls"]
            assert call["function"]["name"] == "lookup"
            assert 0 < len(call["function"]["arguments"]) < len(ABCS)
            assert ABCS.startswith(call["function"]["arguments"])
            streamed = put_together(events((await setup.chat("Hi", **demand, stream=True)).text))
            assert streamed["tool_calls"][0]["function"] == call["function"]
            assert streamed["finish_reason"] == whole["finish_reason"] == ("stop" if "stop" in fields else "length")
        auto = (await setup.chat("Hi", tools=[LOOKUP], max_tokens=size)).json()["choices"][0]
        assert "tool_calls" not in auto["message"]

    run(gateway(saying(LONG), tokenizer=TOKENIZER), scenario)


def test_arguments_of_a_call_that_a_grammar_holds_are_streamed_as_they_are_written() -> None:
    async def scenario(setup: Setup) -> None:
        for tool, choice, pieces in ((LOOKUP, "required", 20), (STRICT, "auto", 20), (LOOKUP, "auto", 1)):
            demand = {"tools": [tool], "tool_choice": choice}
            (whole,) = (await setup.chat("Hi", **demand)).json()["choices"]
            stream = events((await setup.chat("Hi", **demand, stream=True)).text)
            deltas = [c["delta"] for event in stream for c in event["choices"] if "tool_calls" in c["delta"]]
            (first,) = deltas[0]["tool_calls"]
            assert (first["function"], first["type"]) == ({"name": "lookup", "arguments": ""}, "function")
            rest = [call["function"]["arguments"] for delta in deltas[1:] for call in delta["tool_calls"]]
            assert len(rest) >= pieces
            assert (len(rest) == 1) == (pieces == 1)
            assert "".join(rest) == whole["message"]["tool_calls"][0]["function"]["arguments"] == ABCS
            assert put_together(stream)["finish_reason"] == "tool_calls"

    run(gateway(saying(LONG), tokenizer=TOKENIZER), scenario)


def test_text_that_only_looks_like_a_call_stays_text_where_none_may_be_made() -> None:
    async def scenario(setup: Setup) -> None:
        (choice,) = (await setup.chat("Hi", tools=[LOOKUP], tool_choice="none")).json()["choices"]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"

    run(gateway(saying(CALL), tokenizer=TOKENIZER), scenario)


def test_a_conversation_with_calls_and_their_results_is_rendered_by_the_template() -> None:
    async def scenario(setup: Setup) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"q": "x"}'}}
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        ]
        assert (await setup.chat(messages, tools=[LOOKUP])).status_code == 200
        (request,) = setup.nodes[0].submitted
        prompt = TOKENIZER.decode(request.prompt_token_ids)
        assert json.dumps(LOOKUP) in prompt
        assert '<|im_start|>assistant\n<tool_call>lookup{"q": "x"}</tool_call><|im_end|>' in prompt
        assert "<|im_start|>tool\n42<|im_end|>" in prompt
        assert request.sampling.structured is None

    run(gateway(saying("Yes."), tokenizer=TOKENIZER), scenario)


def test_log_probabilities_of_held_text_come_all_and_once() -> None:
    async def scenario(setup: Setup) -> None:
        stream = events((await setup.chat("Hi", tools=[LOOKUP], logprobs=True, stream=True)).text)
        choices = [choice for event in stream for choice in event["choices"]]
        tokens = [entry["token"] for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert "".join(tokens[: len(TOKENIZER.encode("I look.\n"))]) == "I look.\n"
        assert len(tokens) == len(TOKENIZER.encode(f"I look.\n{CALL}")) + 1  # and the end of the message

    run(gateway(saying(f"I look.\n{CALL}"), tokenizer=TOKENIZER), scenario)


def body(**fields: Any) -> ChatRequest:
    return ChatRequest.parse(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


@pytest.mark.parametrize("form", PARSERS)
def test_an_output_that_is_held_to_calls_is_read_as_calls(form: ToolFormat) -> None:
    key, opening, closing, between = (
        ("arguments", "<tool_call>\n", "\n</tool_call>", "\n") if form == "hermes" else ("parameters", "", "", "; ")
    )
    good = f'{opening}{{"name": "lookup", "{key}": {{"q": "a"}}}}{closing}'
    clock = f'{opening}{{"name": "clock", "{key}": {{}}}}{closing}'
    for fields, accepted, others in (
        ({"tool_choice": "required"}, [good, clock, good + between + clock], ["Hi", good[:-1], "{}"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [good], [good + between + good]),
        ({"tool_choice": NAMED}, [good], [clock, good + between + good, good.replace('"q"', '"r"')]),
    ):
        asked = body(tools=[LOOKUP, CLOCK], **fields)
        grammar = compile_tools(asked, form).grammar
        for text in accepted:
            assert matches(grammar, text), (fields, text)
            parser = PARSERS[form](asked.may_call)
            parts = parser.push(text) + parser.flush()
            assert parts
            assert all(isinstance(part, ToolCall) for part in parts)
        for text in others:
            assert not matches(grammar, text), (fields, text)


def test_text_with_strict_functions_is_free_until_it_opens_a_call_which_is_then_one() -> None:
    asked = body(tools=[STRICT, CLOCK])
    grammar = compile_tools(asked, "hermes").grammar
    assert calls_are_held(asked, "hermes")
    for text in ("", "Hi", "a < b, <tool", CALL, f"I look.\n{CALL}\n{TIME} So.\n", f"{CALL}{TIME}", "</tool_call>é🙂"):
        assert matches(grammar, text), text
        parts = [HermesParser(asked.may_call, is_held=held) for held in (True, False)]
        whole, alike = ([*parser.push(text), *parser.flush()] for parser in parts)
        assert message(whole) == message(alike)
    for text in ("<tool_call>", "<tool_call>x", CALL[:-1], CALL.replace("lookup", "other"), CALL.replace('"q"', '"r"')):
        assert not matches(grammar, f"I look. {text}"), text


def message(parts: list[Part]) -> tuple[str, list[str]]:
    """Content, and each call with its arguments."""
    calls: list[str] = []
    for part in parts:
        if isinstance(part, ToolCall):
            calls.append(part.name + part.arguments)
        elif isinstance(part, Arguments):
            calls[-1] += part.text
    return "".join(part for part in parts if isinstance(part, str)), calls


def test_json_that_was_asked_for_may_be_calls_instead() -> None:
    asked = body(tools=[LOOKUP], response_format={"type": "json_object"})
    grammar = compile_tools(asked, "hermes", {"type": "object"}).grammar
    assert matches(grammar, CALL)
    assert matches(grammar, '{"a": 1}')
    assert not matches(grammar, "Hi")


def test_what_of_a_schema_cannot_be_enforced_is_refused_for_strict_functions_only() -> None:
    odd = {"type": "object", "properties": {"q": {"not": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": odd}}
    assert compile_tools(body(tools=[tool], tool_choice="required"), "hermes").grammar
    tool["function"]["strict"] = True  # type: ignore[index]
    with pytest.raises(BadRequest) as caught:
        compile_tools(body(tools=[CLOCK, tool], tool_choice="required"), "hermes")
    assert caught.value.param == "tools[1].function.parameters"


def test_the_nodes_hold_the_output_to_the_calls_that_are_demanded() -> None:
    async def scenario(setup: Setup) -> None:
        json_answer = {"response_format": {"type": "json_object"}}
        for fields, held in (
            ({"tool_choice": "required"}, True),
            ({"tool_choice": NAMED}, True),
            ({}, False),
            (json_answer, True),
            ({"tools": [CLOCK, STRICT]}, True),
            ({"tools": [CLOCK, STRICT], "use_beam_search": True, "n": 2, "temperature": 0}, False),
        ):
            assert (await setup.chat("Hi", **({"tools": [LOOKUP]} | fields))).status_code == 200
            assert (setup.nodes[0].submitted[-1].sampling.structured is not None) == held, fields
        refused = await setup.chat("Hi", tools=[LOOKUP], structured_outputs={"regex": "a"})
        assert refused.json()["error"]["param"] == "structured_outputs"

    run(gateway(saying(CALL), tokenizer=TOKENIZER), scenario)


def test_a_model_that_knows_no_calls_makes_those_that_are_demanded() -> None:
    async def scenario(setup: Setup) -> None:
        refused = await setup.chat("Hi", tools=[LOOKUP])
        assert refused.status_code == 400
        assert "--tool-call-parser" in refused.json()["error"]["message"]
        (choice,) = (await setup.chat("Hi", tools=[LOOKUP], tool_choice="required")).json()["choices"]
        assert calls_of(choice["message"]) == [("lookup", {"q": "a"})]

    said = '{"name": "lookup", "parameters": {"q": "a"}}'
    run(gateway(saying(said), tokenizer=tiny_tokenizer()), scenario)
    hermes = gateway(saying(CALL), tokenizer=tiny_tokenizer(), tool_call_parser="hermes")

    async def told(setup: Setup) -> None:
        (choice,) = (await setup.chat("Hi", tools=[LOOKUP])).json()["choices"]
        assert calls_of(choice["message"]) == [("lookup", {"q": "é"})]

    run(hermes, told)


def test_the_official_client_reads_calls_whole_and_streamed() -> None:
    async def scenario(setup: Setup) -> None:
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="none", http_client=setup.client)
        fields: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": [LOOKUP, CLOCK]}
        whole = (await client.chat.completions.create(**fields)).choices[0]
        assert whole.finish_reason == "tool_calls"
        async with client.chat.completions.stream(**fields) as stream:
            final = (await stream.get_final_completion()).choices[0]
        for choice in (whole, final):
            assert [call.function.name for call in choice.message.tool_calls or ()] == ["lookup", "clock"]
            assert [call.function.arguments for call in choice.message.tool_calls or ()] == ['{"q": "é"}', "{}"]

    run(gateway(saying(f"{CALL}\n{TIME}"), tokenizer=TOKENIZER), scenario)

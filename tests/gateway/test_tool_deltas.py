"""What a stream's deltas come to is the unstreamed message, however the text was cut."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.common.requests import FinishReason
from kvferry.services.gateway.choice import Piece
from kvferry.services.gateway.tool_deltas import CallDeltas, message_of
from kvferry.services.gateway.tool_parsers import PARSERS
from tests.gateway.test_tool_parsers import BITS, NAMES

LONG = '<tool_call>\n{"name": "lookup", "arguments": {"q": "é \\" } </tool_call>", "n": [1, {}]}}\n</tool_call>'


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([*BITS, LONG, "Let me see."]), max_size=6).map("".join),
    st.sampled_from(sorted(PARSERS)),
    st.booleans(),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    st.data(),
)
def test_the_joined_deltas_are_the_whole_message(
    text: str, form: Any, is_held: bool, reason: FinishReason, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8), label="cuts"))
    pieces = [Piece(text=text[a:b]) for a, b in itertools.pairwise([0, *cuts, len(text)])]
    pieces.append(Piece(finish_reason=reason))
    deltas, content, functions, ids = CallDeltas(PARSERS[form](NAMES, is_held=is_held)), "", [], set()
    for delta in itertools.chain.from_iterable(deltas.push(piece) for piece in pieces):
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(functions):
                functions.append({"name": call["function"]["name"], "arguments": ""})
                ids.add(call["id"])
            assert call["index"] == len(functions) - 1, "a call that another one follows has ended"
            functions[-1]["arguments"] += call["function"]["arguments"]
    whole, finish_reason = message_of(PARSERS[form](NAMES, is_held=is_held), Piece(text=text, finish_reason=reason))
    assert content == (whole["content"] or "")
    assert functions == [call["function"] for call in whole.get("tool_calls", ())]
    assert len(ids) == len(functions)
    assert deltas.finish_reason(pieces[-1]) == finish_reason

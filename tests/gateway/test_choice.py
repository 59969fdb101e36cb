"""One choice: stop tokens, stop strings, counts and offsets do not depend on how tokens were lumped together."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.requests import FinishReason, RequestOutput, TokenLogprobs
from kvferry.services.gateway.choice import Choice, Piece, TextParams
from tests.gateway.tiny_tokenizer import IM_END, tiny_tokenizer


def outputs(
    ids: list[int], cuts: list[int], reason: FinishReason = FinishReason.LENGTH, stop: int | None = None
) -> list[RequestOutput]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [
        RequestOutput(
            request_id="r",
            token_ids=tuple(ids[a:b]),
            logprobs=tuple(TokenLogprobs(-float(token)) for token in ids[a:b]),
            finish_reason=reason if b == len(ids) else None,
            stop_token_id=stop if b == len(ids) else None,
        )
        for a, b in pairwise(edges)
    ]


def push_all(params: TextParams, lumps: list[RequestOutput]) -> tuple[Piece, Choice]:
    choice = Choice(tiny_tokenizer(), params)
    pieces = []
    for lump in lumps:
        if choice.finish_reason is None:
            pieces.append(choice.push(lump))
    return Piece.join(pieces), choice


ids_lists = st.lists(st.integers(0, 419), min_size=1, max_size=40)
cuts_lists = st.lists(st.integers(0, 100), max_size=20)
params = st.builds(
    TextParams,
    stops=st.lists(st.text("abehlo \n", min_size=1, max_size=3), max_size=3).map(tuple),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 10),
    skip_special_tokens=st.booleans(),
    logprobs=st.just(0),
)


@given(ids_lists, cuts_lists, params)
def test_lumps_give_what_single_tokens_give(ids: list[int], cuts: list[int], params: TextParams) -> None:
    alone, one = push_all(params, outputs(ids, list(range(len(ids)))))
    lumped, other = push_all(params, outputs(ids, cuts))
    assert (alone, one.num_tokens) == (lumped, other.num_tokens)


def encode(text: str) -> list[int]:
    return tiny_tokenizer().encode(text)


def test_the_token_that_stopped_it_is_counted_but_not_text() -> None:
    ids = [*encode("Hello"), IM_END]
    piece, choice = push_all(TextParams(logprobs=0), outputs(ids, [], FinishReason.STOP, IM_END))
    assert (piece.text, piece.finish_reason, piece.stop_reason) == ("Hello", FinishReason.STOP, None)
    assert choice.num_tokens == len(ids) == len(piece.entries)


def test_a_stop_token_of_the_client_is_named_and_included_on_request() -> None:
    ids = encode("Hello")
    stop = ids[-1]
    hidden, _ = push_all(TextParams(stop_token_ids=(stop,)), outputs(ids, [], FinishReason.STOP, stop))
    shown, _ = push_all(
        TextParams(stop_token_ids=(stop,), include_stop=True), outputs(ids, [], FinishReason.STOP, stop)
    )
    assert hidden.stop_reason == shown.stop_reason == stop
    assert shown.text == "Hello"
    assert hidden.text != "Hello"


def test_tokens_behind_a_stop_string_are_not_counted() -> None:
    ids = encode("The quick brown fox")
    at = next(n for n in range(len(ids)) if "quick" in tiny_tokenizer().decode(ids[: n + 1]))
    piece, choice = push_all(TextParams(stops=("quick",)), outputs(ids, []))
    assert (piece.text, piece.finish_reason, piece.stop_reason) == ("The ", FinishReason.STOP, "quick")
    assert choice.num_tokens == at + 1


def test_only_the_last_token_is_the_one_that_stopped() -> None:
    (stop,) = encode("q")
    ids = [stop, *encode("x"), stop]
    piece, _ = push_all(TextParams(stop_token_ids=(stop,), min_tokens=2), outputs(ids, [], FinishReason.STOP, stop))
    assert piece.text == "qx"


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    piece, choice = push_all(TextParams(stops=("q",), min_tokens=2), outputs(encode("q") * 5, []))
    assert (piece.text, choice.num_tokens) == ("qq", 3)


def test_half_a_character_at_the_end_comes_out() -> None:
    half = encode("🙂")[:-1]
    for stops in ((), ("never",)):
        piece, _ = push_all(TextParams(stops=stops), outputs([*encode("Hello"), *half], []))
        assert piece.text == "Hello\ufffd"


def test_a_begun_stop_string_is_text_when_the_choice_ends() -> None:
    piece, _ = push_all(TextParams(stops=("fox jumps",)), outputs(encode("The quick brown fox"), []))
    assert (piece.text, piece.finish_reason) == ("The quick brown fox", FinishReason.LENGTH)


@given(ids_lists)
def test_offsets_say_where_each_token_begins(ids: list[int]) -> None:
    piece, _ = push_all(TextParams(logprobs=0), outputs(ids, []))
    offsets = [entry.offset for entry in piece.entries]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(piece.text)

"""Text comes out the same however the tokens arrive, whole characters only, and stop strings never leak."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvferry.services.gateway.text import Detokenizer, StopScanner
from tests.gateway.tiny_tokenizer import tiny_tokenizer

SCRIPTS = "aé ñ\n日本語의한글🙂🧑‍🚀🇵🇹❤️कवितైதமிழ்ไทย مرحبا\u200d\u0301"
texts = st.text(alphabet=st.one_of(st.sampled_from(SCRIPTS), st.characters(exclude_categories=["Cs"])), max_size=60)
token_ids = st.lists(st.integers(0, 419), max_size=60)


class Bytes:
    """A tokenizer whose tokens are the given pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


def detokenize(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(Bytes(pieces))
    return [*(detokenizer.push(number) for number in range(len(pieces))), detokenizer.flush()]


@given(texts, st.lists(st.integers(0, 10_000)))
def test_text_cut_anywhere_comes_back_whole(text: str, places: list[int]) -> None:
    assert "".join(detokenize(cut(text.encode(), places))) == text


@given(texts, st.lists(st.integers(0, 10_000)))
def test_what_has_come_out_is_always_a_beginning_of_the_text(text: str, places: list[int]) -> None:
    for so_far in accumulate(detokenize(cut(text.encode(), places))):
        assert text.startswith(so_far)


@given(st.binary(max_size=40), st.lists(st.integers(0, 10_000)))
def test_broken_bytes_come_out_as_if_decoded_at_once(data: bytes, places: list[int]) -> None:
    assert "".join(detokenize(cut(data, places))) == data.decode("utf-8", "replace")


@given(token_ids)
def test_any_tokens_give_the_text_that_the_tokenizer_gives(ids: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert text == tokenizer.decode(ids)


def test_half_a_character_waits_and_is_flushed_once() -> None:
    detokenizer = Detokenizer(Bytes(["é".encode()[:1], b"x"]))
    assert detokenizer.push(0) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_are_no_text_unless_asked_for() -> None:
    tokenizer = tiny_tokenizer()
    assert Detokenizer(tokenizer).push(2) == ""
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(2) == "<|im_end|>"


# ---- stop strings

few_letters = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: the stop string that starts first; of several there, the shortest."""
    places = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not places:
        return text, None
    at, length, stop = min(places)
    return text[: at + length if include else at], stop


def scan(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    scanner = StopScanner(stops, include_stop=include)
    text = ""
    for piece in pieces:
        scanned = scanner.push(piece)
        text += scanned.text
        if scanned.stop is not None:
            return text, scanned.stop
    scanned = scanner.flush()
    return text + scanned.text, scanned.stop


@given(few_letters, stop_lists, st.booleans(), st.lists(st.integers(0, 10_000)))
def test_however_text_is_cut_the_earliest_stop_wins(
    text: str, stops: list[str], include: bool, places: list[int]
) -> None:
    pieces = [piece.decode() for piece in cut(text.encode(), places)]
    assert scan(pieces, stops, include) == expected(text, stops, include)


@given(few_letters, stop_lists)
def test_no_character_is_held_back_that_cannot_begin_a_stop(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    out, scanned = "", None
    for char in text:
        scanned = scanner.push(char)
        out += scanned.text
        if scanned.stop is not None:
            return
    held = text[len(out) :]
    assert not held or any(stop.startswith(held) for stop in stops)


def test_an_early_beginning_holds_back_a_later_whole_stop() -> None:
    assert scan(list("xabcdey"), ["abcdef", "cd"], False) == ("xab", "cd")
    assert scan(list("xabcdefy"), ["abcdef", "cd"], False) == ("x", "abcdef")

"""Grammars that outputs must follow: compiled once, then followed by a matcher per sequence.

The only place that knows llguidance on a node. A matcher's state is a function of its sequence's output tokens, and it
catches up with them whenever it is asked. So nothing has to be told to it: a sequence may be preempted, forked, or
resumed with tokens that another node produced, and its matcher allows the same next tokens.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvferry.common.deep import with_deep_stack
from kvferry.common.errors import BadRequest, Unavailable
from kvferry.common.models import TOKENIZER_FILE
from kvferry.common.requests import StructuredOutput

log = logging.getLogger("kvferry.engine")

NUM_CACHED_GRAMMARS = 64
_LIMITS = LLParserLimits(verbose_errors=False)


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Which tokens may not come next: [vocabulary, rounded up]. With `error` there is no telling."""

    forbidden: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    error: BadRequest | None = None


class Matcher:
    """Follows one sequence's output through its grammar. One thread at a time."""

    __slots__ = ("_followed", "_matcher", "_param")

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        """`matcher` stands at the beginning. `param`: the request's field that asked for the grammar."""
        self._param = param
        self._matcher = matcher
        self._followed: list[int] = []

    def clone(self) -> Matcher:
        """Another one for a sequence with the same grammar, at the same place."""
        other = Matcher(self._matcher.deep_copy(), self._param)
        other._followed = list(self._followed)
        return other

    def mask(self, output_token_ids: Sequence[int]) -> Mask:
        """What may follow these tokens. End-of-sequence tokens may exactly when the output is complete."""
        try:
            self._follow(output_token_ids)
            if not self._matcher.is_error():
                bits = self._matcher.compute_bitmask()
                if not self._matcher.is_error():  # a mask computed in error would allow only the end
                    return Mask(np.unpackbits(~np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_))
            return self._failed(self._matcher.get_error().splitlines()[0])
        except BaseException as exc:  # a panic in native code is no Exception, and must not end the engine
            return self._failed(f"{type(exc).__name__}: {exc}")

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        """Whether these tokens match and nothing can follow them but the end."""
        try:
            self._follow(output_token_ids)
            return self._matcher.is_stopped() and not self._matcher.is_error()
        except BaseException:  # the next mask will say what is wrong
            return False

    def _failed(self, why: str) -> Mask:
        param = self._param
        return Mask(error=BadRequest(f"{param}: the output cannot be held to it any longer: {why}", param=param))

    def _follow(self, output_token_ids: Sequence[int]) -> None:
        if self._followed != output_token_ids[: len(self._followed)]:
            self._matcher.reset()
            self._followed.clear()
        if new := output_token_ids[len(self._followed) :]:
            self._matcher.consume_tokens(list(new))
            self._followed.extend(new)


class Grammars:
    """Compiles grammars for a model's vocabulary. Thread-safe."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._cache = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, structured: StructuredOutput) -> Matcher:
        """A matcher at the beginning of the grammar. Blocks: a large one compiles for a second, and the first call of
        all reads the tokenizer.

        Raises BadRequest for a grammar that cannot be used, Unavailable for a model that cannot follow any.
        """
        with self._cache:
            if (known := self._compiled.get(structured.grammar)) is not None:
                self._compiled.move_to_end(structured.grammar)
                return Matcher(known.deep_copy(), structured.param)
        tokenizer = self._require_tokenizer()
        made = with_deep_stack(lambda: LLMatcher(tokenizer, structured.grammar, log_level=0, limits=_LIMITS))
        if made.is_error():
            raise BadRequest(f"{structured.param}: {made.get_error().splitlines()[0]}", param=structured.param)
        with self._cache:
            self._compiled[structured.grammar] = made
            if len(self._compiled) > NUM_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return Matcher(made.deep_copy(), structured.param)

    def _require_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                path = self._folder / TOKENIZER_FILE
                if not self._eos_token_ids:
                    raise Unavailable("this model names no end-of-sequence token: structured output cannot end")
                try:
                    text = path.read_text()
                    self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
                except (OSError, ValueError) as exc:
                    raise Unavailable(f"structured output needs {path}: {exc}") from exc
                log.info("tokenizer loaded for structured output")
            return self._tokenizer


class MaskWorker:
    """Computes a step's masks in a thread of its own, while the model computes the logits."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def begin(self, wanted: Mapping[int, tuple[Matcher, Sequence[int]]]) -> Callable[[], dict[int, Mask]]:
        """Masks by row, for what each row's matcher is to follow. The answer waits for them."""
        if not wanted:
            return dict
        return self._pool.submit(lambda: {i: matcher.mask(output) for i, (matcher, output) in wanted.items()}).result


def forbid(logits: torch.Tensor, mask: Mask) -> None:
    """Makes impossible, in place, what the mask forbids in one row of logits [vocab]."""
    logits.masked_fill_(torch.from_numpy(mask.forbidden[: len(logits)]).to(logits.device), -torch.inf)

"""What travels through the house: one generation request and what comes back. Immutable, no behaviour."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FinishReason(enum.StrEnum):
    """How a request ended, in OpenAI's words (vLLM's `abort` added)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search of width `n`. `early_stopping` as in transformers: "false", "true" or "never"."""

    length_penalty: float = 1.0
    early_stopping: str = "false"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the whole output must match: a grammar as llguidance reads it, and the request's field that asked for it."""

    grammar: str
    param: str = "structured_outputs"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Names and meanings as in vLLM.

    `temperature` 0 is greedy. `top_k` 0 is off. `logprobs` None: none; k: the chosen token's and the k best.
    `seed` is always set: the gateway draws one at admission where the client gave none.
    `allowed_token_ids` empty: every token may be drawn. `bad_words`: token sequences of which the last token may not
    follow the others. `prompt_logprobs` None: none; k: those of each prompt token but the first, and of the k best.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    beam: BeamParams | None = None
    structured: StructuredOutput | None = None


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A prefill node that the router would use, and how many leading blocks it is believed to hold."""

    instance_id: str
    address: str
    cached_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """A node of any role, and how many leading blocks of a prompt it is believed to hold."""

    instance_id: str
    address: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """A choice that an earlier attempt left unfinished, and the tokens it has had so far."""

    index: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One submission to a decode node: one prompt, `n` choices. A lower `priority` runs earlier.

    `resumed` not empty: these choices alone are produced, each from behind its tokens on, which are output like any
    other and are not sent again.

    `holders`, best first: whom leading blocks may be pulled from instead of being computed. `http_request_id` is what
    the client knows it by, for logs; all prompts of one HTTP request have the same. Where it has a `number`, a node may
    send tokens of choice `i` under `number + i` instead of in full. `local_by_choice`: there are prefill nodes, and the
    router names none because the decode node is sooner done with the prompt.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    attempt: int = 0
    cache_salt: str = ""
    prefill: tuple[PrefillCandidate, ...] = ()
    priority: int = 0
    holders: tuple[Holder, ...] = ()
    resumed: tuple[ResumedChoice, ...] = ()
    traceparent: str = ""
    http_request_id: str = ""
    number: int = 0
    local_by_choice: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one produced token, and of the most likely ones in falling order.

    `rank`: how many tokens are at least as likely as this one; 0 where it was not counted.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds that a request spent in each phase before its first token (0 where a phase did not happen)."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    first_step_s: float = 0.0


NO_TIMES = RequestTimes()


@dataclass(slots=True)
class RequestOutput:
    """What one engine step produced for one choice of one request. As immutable as the others, but not frozen: one is
    made for every token, and with so many fields that would take 20 times as long.

    Exactly one output per choice carries `finish_reason`; with `error` set it ends the whole request.
    `logprobs` is empty or as long as `token_ids`. `cached_tokens`, `computed_tokens`, `prefilled_by` and `times`
    are set on the first output of each choice: prompt tokens found in a cache, prompt tokens computed for this request
    anywhere, and the instance that computed them ("" = the decode node itself). Of the prompt, the decode node found
    `local_cached_tokens` in its own cache, received `received_tokens`, and computed the rest. `prompt_logprobs` are on
    the first output of a request that asked for them: one for each prompt token but the first.
    """

    request_id: str
    attempt: int = 0
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error_code: str = ""
    error_message: str = ""
    error_param: str = ""
    cached_tokens: int = 0
    computed_tokens: int = 0
    prefilled_by: str = ""
    times: RequestTimes = NO_TIMES
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    local_cached_tokens: int = 0
    received_tokens: int = 0

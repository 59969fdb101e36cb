from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: CancelRequest
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("welcome", "outputs")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    outputs: StepOutputs
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., outputs: _Optional[_Union[StepOutputs, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    def __init__(self, instance_id: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "sampling", "n", "cache_salt", "prefill", "priority", "holders", "traceparent", "resumed", "http_request_id", "number", "local_by_choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    HTTP_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BY_CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    n: int
    cache_salt: str
    prefill: _containers.RepeatedCompositeFieldContainer[Candidate]
    priority: int
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    traceparent: str
    resumed: _containers.RepeatedCompositeFieldContainer[ResumedChoice]
    http_request_id: str
    number: int
    local_by_choice: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., n: _Optional[int] = ..., cache_salt: _Optional[str] = ..., prefill: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., priority: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., traceparent: _Optional[str] = ..., resumed: _Optional[_Iterable[_Union[ResumedChoice, _Mapping]]] = ..., http_request_id: _Optional[str] = ..., number: _Optional[int] = ..., local_by_choice: _Optional[bool] = ...) -> None: ...

class ResumedChoice(_message.Message):
    __slots__ = ("index", "token_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("instance_id", "address", "num_blocks")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    address: str
    num_blocks: int
    def __init__(self, instance_id: _Optional[str] = ..., address: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("instance_id", "address", "cached_blocks")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    address: str
    cached_blocks: int
    def __init__(self, instance_id: _Optional[str] = ..., address: _Optional[str] = ..., cached_blocks: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "indexes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "ignore_eos", "seed", "logprobs", "allowed_token_ids", "bad_words", "prompt_logprobs", "beam", "structured")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    seed: int
    logprobs: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    prompt_logprobs: int
    beam: Beam
    structured: StructuredOutput
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., prompt_logprobs: _Optional[int] = ..., beam: _Optional[_Union[Beam, _Mapping]] = ..., structured: _Optional[_Union[StructuredOutput, _Mapping]] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("grammar", "param")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    grammar: str
    param: str
    def __init__(self, grammar: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class Beam(_message.Message):
    __slots__ = ("length_penalty", "early_stopping")
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    length_penalty: float
    early_stopping: str
    def __init__(self, length_penalty: _Optional[float] = ..., early_stopping: _Optional[str] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("outputs", "numbers", "token_ids")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., numbers: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("request_id", "attempt", "index", "token_ids", "logprobs", "finish_reason", "stop_token_id", "error", "cached_tokens", "computed_tokens", "prefilled_by", "times", "prompt_logprobs", "local_cached_tokens", "received_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_BY_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    finish_reason: str
    stop_token_id: int
    error: ErrorDetail
    cached_tokens: int
    computed_tokens: int
    prefilled_by: str
    times: Times
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    local_cached_tokens: int
    received_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., error: _Optional[_Union[ErrorDetail, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., prefilled_by: _Optional[str] = ..., times: _Optional[_Union[Times, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., local_cached_tokens: _Optional[int] = ..., received_tokens: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs", "rank")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class Times(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "transfer_s", "first_step_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    transfer_s: float
    first_step_s: float
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., first_step_s: _Optional[float] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "param")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    param: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("start", "renew", "release")
    START_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    start: PrefillStart
    renew: RenewLease
    release: ReleaseLease
    def __init__(self, start: _Optional[_Union[PrefillStart, _Mapping]] = ..., renew: _Optional[_Union[RenewLease, _Mapping]] = ..., release: _Optional[_Union[ReleaseLease, _Mapping]] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "cache_salt", "first_block", "card", "priority", "holders", "traceparent", "cached_only", "http_request_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CACHED_ONLY_FIELD_NUMBER: _ClassVar[int]
    HTTP_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    first_block: int
    card: LayoutCard
    priority: int
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    traceparent: str
    cached_only: bool
    http_request_id: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., first_block: _Optional[int] = ..., card: _Optional[_Union[LayoutCard, _Mapping]] = ..., priority: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., traceparent: _Optional[str] = ..., cached_only: _Optional[bool] = ..., http_request_id: _Optional[str] = ...) -> None: ...

class RenewLease(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseLease(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("accepted", "filled", "computed", "released", "error", "renewed")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    filled: BlocksFilled
    computed: PrefillComputed
    released: LeaseReleased
    error: ErrorDetail
    renewed: LeaseRenewed
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., filled: _Optional[_Union[BlocksFilled, _Mapping]] = ..., computed: _Optional[_Union[PrefillComputed, _Mapping]] = ..., released: _Optional[_Union[LeaseReleased, _Mapping]] = ..., error: _Optional[_Union[ErrorDetail, _Mapping]] = ..., renewed: _Optional[_Union[LeaseRenewed, _Mapping]] = ...) -> None: ...

class LeaseRenewed(_message.Message):
    __slots__ = ("num_replies",)
    NUM_REPLIES_FIELD_NUMBER: _ClassVar[int]
    num_replies: int
    def __init__(self, num_replies: _Optional[int] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("lease_id", "instance_id", "num_blocks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    instance_id: str
    num_blocks: int
    def __init__(self, lease_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class BlocksFilled(_message.Message):
    __slots__ = ("first", "block_ids")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    first: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillComputed(_message.Message):
    __slots__ = ("cached_tokens", "computed_tokens", "queue_s", "prefill_s")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    computed_tokens: int
    queue_s: float
    prefill_s: float
    def __init__(self, cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class LeaseReleased(_message.Message):
    __slots__ = ("valid",)
    VALID_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    def __init__(self, valid: _Optional[bool] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("card", "instance_id")
    CARD_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    card: LayoutCard
    instance_id: str
    def __init__(self, card: _Optional[_Union[LayoutCard, _Mapping]] = ..., instance_id: _Optional[str] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("card", "instance_id", "num_blocks", "transports", "shm", "ucx_port")
    CARD_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    UCX_PORT_FIELD_NUMBER: _ClassVar[int]
    card: LayoutCard
    instance_id: str
    num_blocks: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    shm: ShmSegment
    ucx_port: int
    def __init__(self, card: _Optional[_Union[LayoutCard, _Mapping]] = ..., instance_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., shm: _Optional[_Union[ShmSegment, _Mapping]] = ..., ucx_port: _Optional[int] = ...) -> None: ...

class ShmSegment(_message.Message):
    __slots__ = ("path", "size_bytes", "blocks_offset", "nonce")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    blocks_offset: int
    nonce: bytes
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., blocks_offset: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class LayoutCard(_message.Message):
    __slots__ = ("model_fingerprint", "numerics_id", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim", "tp_rank", "tp_size", "version", "weights")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    numerics_id: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tp_rank: int
    tp_size: int
    version: str
    weights: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., numerics_id: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., version: _Optional[str] = ..., weights: _Optional[str] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("lease_id", "block_ids", "first_kv_head", "num_kv_heads")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    first_kv_head: int
    num_kv_heads: int
    def __init__(self, lease_id: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ..., first_kv_head: _Optional[int] = ..., num_kv_heads: _Optional[int] = ...) -> None: ...

class BlockData(_message.Message):
    __slots__ = ("data", "checksums")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, data: _Optional[bytes] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("record_json",)
    RECORD_JSON_FIELD_NUMBER: _ClassVar[int]
    record_json: str
    def __init__(self, record_json: _Optional[str] = ...) -> None: ...

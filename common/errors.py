"""The error tree. One class per kind of failure; each says how it looks on every surface.

Knows nothing of HTTP frameworks or gRPC: the tables in `services/rpc/errors.py` and
`services/gateway/errors.py` read the class attributes.

    KvferryError
    ├── BadRequest                400  the client must change the request
    │   ├── ContextTooLong        400
    │   └── PromptExceedsPool     400
    ├── ModelNotFound             404
    ├── Overloaded                429  a bounded queue is full: come back later
    ├── Unavailable               503  no node can take it now
    │   ├── Draining              503
    │   ├── NodeLost              503  (never reaches a client: what it ends goes on elsewhere, or is `unavailable`)
    │   ├── LeaseExpired          503
    │   ├── BlocksGone            503  (never reaches a client: a holder has evicted what the index says it has)
    │   ├── TransferFailed        503
    │   │   └── BlockCorrupt      503
    │   └── IndexUnavailable      503  (never reaches a client: the index is a hint)
    ├── DeadlineExceeded          504
    ├── Cancelled                 499  the client left
    ├── Internal                  500
    └── StartupError               -   the operator must change something
        ├── ConfigError
        ├── ModelLoadError
        └── LayoutMismatch
"""

from __future__ import annotations

from typing import ClassVar


class KvferryError(Exception):
    """Base of all errors that kvferry raises on purpose.

    `code` travels on the wire, `http_status` and `grpc_status` are what the two surfaces show, `type` is
    OpenAI's error type, `retryable` says whether the same request may succeed on another node.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(KvferryError):
    code = "bad_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    type = "invalid_request_error"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"


class PromptExceedsPool(BadRequest):
    code = "prompt_exceeds_pool"


class ModelNotFound(KvferryError):
    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"
    type = "invalid_request_error"


class Overloaded(KvferryError):
    """`retry_after_s`: when it is worth asking again."""

    code = "overloaded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    type = "overloaded_error"
    retryable = True

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class Unavailable(KvferryError):
    code = "unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True


class Draining(Unavailable):
    code = "draining"


class NodeLost(Unavailable):
    code = "node_lost"


class LeaseExpired(Unavailable):
    code = "lease_expired"


class BlocksGone(Unavailable):
    code = "blocks_gone"


class TransferFailed(Unavailable):
    code = "transfer_failed"


class BlockCorrupt(TransferFailed):
    code = "block_corrupt"


class IndexUnavailable(Unavailable):
    code = "index_unavailable"


class DeadlineExceeded(KvferryError):
    code = "deadline_exceeded"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class Cancelled(KvferryError):
    code = "cancelled"
    http_status = 499
    grpc_status = "CANCELLED"


class Internal(KvferryError):
    pass


class StartupError(KvferryError):
    code = "startup_error"
    grpc_status = "FAILED_PRECONDITION"


class ConfigError(StartupError):
    code = "config_error"


class ModelLoadError(StartupError):
    code = "model_load_error"


class LayoutMismatch(StartupError):
    code = "layout_mismatch"


def _tree(cls: type[KvferryError]) -> list[type[KvferryError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


BY_CODE: dict[str, type[KvferryError]] = {cls.code: cls for cls in reversed(_tree(KvferryError))}
"""Wire code -> class. `internal` maps to `KvferryError` itself."""


def from_code(code: str, message: str, param: str | None = None) -> KvferryError:
    """The error that a wire code stands for; an unknown code (a newer peer) becomes `Internal`."""
    return BY_CODE.get(code, Internal)(message, param=param)

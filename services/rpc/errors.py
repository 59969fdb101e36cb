"""Our errors <-> gRPC statuses and wire details. The one table for both directions."""

from __future__ import annotations

import grpc

from kvferry.common import errors as err
from kvferry.proto import kvferry_pb2 as pb

_FROM_STATUS: dict[grpc.StatusCode, type[err.KvferryError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: err.BadRequest,
    grpc.StatusCode.NOT_FOUND: err.ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: err.Overloaded,
    grpc.StatusCode.UNAVAILABLE: err.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: err.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: err.Cancelled,
    grpc.StatusCode.FAILED_PRECONDITION: err.LayoutMismatch,
}


def to_status(error: err.KvferryError) -> tuple[grpc.StatusCode, str]:
    """Status and details (`code: message`) to abort an RPC with."""
    return grpc.StatusCode[error.grpc_status], f"{error.code}: {error.message}"


def from_rpc_error(error: grpc.RpcError, who: str) -> err.KvferryError:
    """What a failed RPC means here; `who` names the peer in the message."""
    known = isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    code: grpc.StatusCode = error.code() if known else grpc.StatusCode.UNKNOWN
    details: str = (error.details() if known else "") or code.name
    name, _, message = details.partition(": ")
    cls = err.BY_CODE.get(name) or _FROM_STATUS.get(code, err.Unavailable)
    return cls(f"{who}: {message or details}")


def detail_to_pb(error: err.KvferryError) -> pb.ErrorDetail:
    return pb.ErrorDetail(code=error.code, message=error.message, param=error.param or "")


def detail_from_pb(detail: pb.ErrorDetail) -> err.KvferryError:
    return err.from_code(detail.code, detail.message, detail.param or None)

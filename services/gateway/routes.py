"""The handlers: one method per path. Each reads its body, asks the part that knows, and shapes the answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import replace
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

import kvferry
from kvferry.common.config import GatewayConfig
from kvferry.common.errors import Draining, KvferryError, Unavailable
from kvferry.services.gateway.api_keys import Tenant
from kvferry.services.gateway.asgi import read_body
from kvferry.services.gateway.chat_writer import ChatWriter
from kvferry.services.gateway.cluster import ClusterView
from kvferry.services.gateway.intake import Intake, Job
from kvferry.services.gateway.metrics import exposition
from kvferry.services.gateway.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
)
from kvferry.services.gateway.openapi import document
from kvferry.services.gateway.page import Page
from kvferry.services.gateway.respond import RunResponse
from kvferry.services.gateway.responses import CompletionWriter
from kvferry.services.gateway.run import Run
from kvferry.services.gateway.serving import Service
from kvferry.services.gateway.shape import Shape

log = logging.getLogger("kvferry.gateway")

ADMIN_PATHS = frozenset({"/", "/cluster", "/cluster/live", "/debug/route/{request_id}", "/metrics"})
SHARED_PATHS = frozenset({"/health", "/ready", "/version"})
LARGE_BODY_BYTES = 64 * 2**10  # larger ones are parsed off the event loop

LONG_TOKENS = 4096  # more are turned into text off the event loop

T = TypeVar("T", bound=Shape)


class PlanNotFound(KvferryError):
    code = "plan_not_found"
    http_status = 404
    type = "invalid_request_error"


class Routes:
    """Handlers over one service. Errors leave as exceptions; `errors.install` shapes them."""

    def __init__(self, config: GatewayConfig, model: str, intake: Intake, service: Service, view: ClusterView) -> None:
        self._config = config
        self._model = model
        self._intake = intake
        self._service = service
        self._view = view
        self._page = Page.load()
        self._created = int(time.time())

    def install(self, app: FastAPI, admin: FastAPI | None = None) -> None:
        """`admin`: the app that operators reach and clients do not, if these are two."""
        for method, path, handler in (
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.one_model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/health", self.health),
            ("GET", "/ready", self.ready),
            ("GET", "/ping", self.health),
            ("POST", "/ping", self.health),
            ("GET", "/load", self.load),
            ("GET", "/version", self.version),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/metrics", self.metrics),
            ("GET", "/cluster", self.cluster),
            ("GET", "/cluster/live", self.cluster_live),
            ("GET", "/", self.page),
            ("GET", "/debug/route/{request_id}", self.route),
        ):
            shown_by = {app if path not in ADMIN_PATHS else admin, admin if path in SHARED_PATHS else None}
            for each in (app,) if admin is None else filter(None, shown_by):
                each.add_api_route(path, handler, methods=[method], response_model=None)

    # ---- generation

    async def completions(self, request: Request) -> Response:
        body = await self._parse(CompletionRequest, request)
        job = await self._intake.completion(body, f"cmpl-{secrets.token_hex(16)}", _request_id(body, request))
        writer = CompletionWriter(
            job.response_id,
            self._model,
            self._service.tokenizer,
            include_usage=_wants_usage(body),
            prompt_ids=_prompt_ids(body, job),
        )
        return self._run(body, job, writer, request)

    async def chat_completions(self, request: Request) -> Response:
        body = await self._parse(ChatRequest, request)
        job = await self._intake.chat(body, f"chatcmpl-{secrets.token_hex(16)}", _request_id(body, request))
        writer = ChatWriter(
            job.response_id,
            self._model,
            self._service.tokenizer,
            include_usage=_wants_usage(body),
            prompt_ids=_prompt_ids(body, job),
            new_parser=self._intake.tool_parser(body),
        )
        return self._run(body, job, writer, request)

    def _run(self, body: Generation, job: Job, writer: ChatWriter | CompletionWriter, request: Request) -> Response:
        tenant: Tenant | None = getattr(request.state, "tenant", None)
        if tenant is not None:
            job = replace(job, cache_salt=tenant.salted(job.cache_salt))
        if self._config.enable_log_requests:
            for line in self._intake.told(job, self._config.max_log_len):
                log.info("request %s", line)
        run = request.state.run = Run(self._service, job, request.headers.get("traceparent", ""))
        return RunResponse(
            run,
            writer,
            stream=body.stream,
            include_usage=_wants_usage(body),
            continuous_usage=body.stream_options is not None and body.stream_options.continuous_usage_stats,
            stall_timeout_s=self._config.client_stall_timeout,
        )

    # ---- the model

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def one_model(self, request: Request) -> Response:
        self._intake.check_model(request.path_params["name"])
        return _json(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "kvferry",
            "root": self._model,
            "parent": None,
            "max_model_len": self._service.table.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        body = await self._parse(TokenizeRequest, request)
        ids = await self._intake.tokenize(body)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": self._service.table.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [self._service.tokenizer.token_text(token_id) for token_id in ids]
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        body = await self._parse(DetokenizeRequest, request)
        self._intake.check_model(body.model)

        def decode() -> str:
            self._intake.check_ids(body.tokens, "tokens")
            return self._service.tokenizer.decode(body.tokens)

        text = await asyncio.to_thread(decode) if len(body.tokens) > LONG_TOKENS else decode()
        return _json({"prompt": text})

    # ---- operation

    async def health(self, request: Request) -> Response:
        """Alive, whatever the cluster does."""
        return _json({"status": "ok"})

    async def load(self, request: Request) -> Response:
        """vLLM's: requests in flight here."""
        return _json({"server_load": len(self._service.mailboxes)})

    async def ready(self, request: Request) -> Response:
        """A request sent now could be served."""
        if self._service.draining:
            raise Draining("the gateway is shutting down")
        if not self._service.table.ready_decode:
            raise Unavailable("no decode node is ready")
        return _json({"status": "ready"})

    async def version(self, request: Request) -> Response:
        return _json({"version": kvferry.__version__})

    async def openapi(self, request: Request) -> Response:
        asks_for_key = self._config.asks_for_key
        return _json(document(kvferry.__version__, asks_for_key=asks_for_key))

    async def metrics(self, request: Request) -> Response:
        page = await asyncio.to_thread(exposition, self._service.metrics.registry)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def cluster(self, request: Request) -> Response:
        return _json(await self._view.state())

    async def cluster_live(self, request: Request) -> Response:
        """What the operations page and `kvferry top` show, once a second."""
        return Response(await self._view.live(), media_type="application/json", headers={"cache-control": "no-store"})

    async def page(self, request: Request) -> Response:
        return self._page.response()

    async def route(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        reasons = self._service.reasons(request_id)
        if reasons is None:
            raise PlanNotFound(
                f"no recent request {request_id!r}: only the last ones are remembered, by the process that served them",
                param="request_id",
            )
        return _json({"request_id": request_id, "plans": reasons})

    async def _parse(self, shape: type[T], request: Request) -> T:
        raw = await read_body(request, self._config.max_body_bytes, self._config.client_stall_timeout)
        return shape.parse(raw) if len(raw) < LARGE_BODY_BYTES else await asyncio.to_thread(shape.parse, raw)


def _wants_usage(body: Generation) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _request_id(body: Generation, request: Request) -> str:
    """The header goes before the field. What it comes to is also answered and logged."""
    if body.request_id is not None and "x-request-id" not in request.headers:
        request.state.request_id = body.request_id
    request_id: str = request.state.request_id
    return request_id


def _prompt_ids(body: Generation, job: Job) -> list[tuple[int, ...]] | None:
    """Each choice's prompt, where the client wants to see token ids."""
    return [prompt.token_ids for prompt in job.prompts for _ in range(job.n)] if body.return_token_ids else None


def _json(data: Any) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")

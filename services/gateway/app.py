"""The gateway's composition root: builds everything, wires the routes, runs until told to stop."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import uvloop
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import kvferry
from kvferry.common.config import Config
from kvferry.common.errors import ConfigError, IndexUnavailable, ModelNotFound, Unavailable
from kvferry.common.log import setup_logging
from kvferry.common.models import resolve_model
from kvferry.services.gateway import errors, server
from kvferry.services.gateway.cluster import cluster_state
from kvferry.services.gateway.errors import BodyTooLarge
from kvferry.services.gateway.intake import Intake
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.gateway.nodes import NodeTable, PrefixLookup
from kvferry.services.gateway.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
)
from kvferry.services.gateway.respond import RunResponse
from kvferry.services.gateway.responses import ChatWriter, CompletionWriter
from kvferry.services.gateway.intake import Job
from kvferry.services.gateway.serving import Service
from kvferry.services.gateway.sessions import SessionPool
from kvferry.services.gateway.tokenizer import Tokenizer
from kvferry.services.index.base import PrefixIndex
from kvferry.services.index.open import open_index

log = logging.getLogger("kvferry.gateway")


class Gateway:
    """Everything that lives as long as the process, and the handlers of its routes."""

    def __init__(self, config: Config, index: PrefixIndex, tokenizer: Tokenizer, registry: CollectorRegistry) -> None:
        self.config = config
        self.model = config.served_model
        self.tokenizer = tokenizer
        self.metrics = GatewayMetrics(registry)
        self.table = NodeTable(index, self.model)
        self.pool = SessionPool(config.node.peer_timeout_s)
        self.intake = Intake(tokenizer, self.table, self.model)
        self.service = Service(
            tokenizer,
            self.table,
            PrefixLookup(index, config.gateway.index_timeout_s, self.metrics),
            self.pool,
            self.metrics,
            queue_timeout_s=config.gateway.queue_timeout,
            max_num_requests=config.gateway.max_num_requests,
        )
        self._created = int(time.time())

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Runs what works in the background: the node table's polling and the sessions."""
        await self.table.refresh()
        async with self.pool:
            poll = asyncio.create_task(self._keep_up())
            try:
                yield
            finally:
                poll.cancel()
                await asyncio.gather(poll, return_exceptions=True)

    async def _keep_up(self) -> None:
        async for _ in self.table.poll():
            self.pool.forget_all_but(node.instance_id for node in self.table.nodes)

    # ---- generation

    async def completions(self, request: Request) -> Response:
        body = CompletionRequest.parse(await self._body(request))
        job = await self.intake.completion(body, f"cmpl-{secrets.token_hex(16)}")
        writer = CompletionWriter(
            job.response_id, self.model, self.tokenizer, include_usage=_wants_usage(body)
        )
        return self._respond(body, job, writer)

    async def chat_completions(self, request: Request) -> Response:
        body = ChatRequest.parse(await self._body(request))
        job = await self.intake.chat(body, f"chatcmpl-{secrets.token_hex(16)}")
        writer = ChatWriter(job.response_id, self.model, self.tokenizer, include_usage=_wants_usage(body))
        return self._respond(body, job, writer)

    def _respond(self, body: Generation, job: Job, writer: ChatWriter | CompletionWriter) -> Response:
        options = body.stream_options
        return RunResponse(
            self.service.start(job),
            writer,
            stream=body.stream,
            include_usage=_wants_usage(body),
            continuous_usage=options is not None and options.continuous_usage_stats,
            stall_timeout_s=self.config.gateway.client_stall_timeout,
        )

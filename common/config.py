"""The one typed configuration tree. Defaults < file < environment (`KVFERRY_SECTION__NAME`) < flags.

Every default stands here and nowhere else. Field names are unique across sections, so a flag needs no section
(`--max-num-seqs`), while a file and the environment name it (`engine.max_num_seqs`, `KVFERRY_ENGINE__MAX_NUM_SEQS`).
Names follow vLLM where the meaning is the same.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvferry.common.errors import ConfigError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(value: object) -> object:
    """`536870912`, `512MiB`, `512M`, `0.5G`: powers of 1024. Anything else is left for the field to refuse."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
        if not match:
            raise ValueError(f"{value!r} is not a size: write for example 512MiB or 2GiB")
        return int(float(match[1]) * _UNITS[match[2].upper()])
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
TransportName = Literal["shm", "ucx", "grpc"]
DECODE_MAX_STEP_MS = 100.0
"""`max_step_ms` of decode nodes, where none is given; on prefill nodes prompts may then fill the whole token budget."""
BOTH_MAX_STEP_MS, BOTH_MAX_PROMPT_WAIT_MS = 75.0, 4000.0
"""Those of nodes that do both, where no `max_step_ms` is given: past that wait, waiting prompts come before streams."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClusterConfig(Section):
    """What every process of a cluster must be told alike."""

    model: str = Field("smollm2-135m", description="alias, local Hugging Face folder, or hub id")
    served_model_name: str | None = Field(None, description="name in the API (default: the model as given)")
    redis_url: str | None = Field(
        None,
        description="Redis that holds the index: redis://host:6379/0, rediss://… (TLS), …?cluster=true",
    )
    namespace: str = Field("kvferry", description="prefix of this cluster's keys in Redis")
    rpc_tls_cert: str | None = Field(
        None, description="PEM certificate of this process: TLS, mutual, between gateway and nodes"
    )
    rpc_tls_key: str | None = Field(None, description="PEM key of rpc-tls-cert")
    rpc_tls_ca: str | None = Field(None, description="PEM authority that signed every process's certificate")
    rpc_tls_server_name: str | None = Field(
        None, description="name in all nodes' certificates (default: each node's own address)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    otlp_traces_endpoint: str | None = Field(
        None, description="OpenTelemetry collector, e.g. http://host:4317, or file:PATH for JSON lines (extra: otel)"
    )
    fail_points: str | None = Field(
        None, description="tests only: what goes wrong where, e.g. index.lookup=delay:0.3:50 (common/fail_points.py)"
    )
    fail_points_seed: int = Field(0, description="tests only: seed of the fail points' dice")


class EngineConfig(Section):
    block_size: int = Field(16, ge=1, le=256, description="tokens per KV block")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to compute (auto: cuda where there is one)"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="how weights are kept, and on GPU what is computed in (on CPU: float32)"
    )
    quantization: Literal["int8"] | None = Field(
        None, description="keep the dense layers' weights as int8, rounded at load (on CPU)"
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="how KV blocks are kept (auto: on CPU float32, on GPU as dtype; 16 bits: half the memory)"
    )
    kv_cache_memory: Bytes | None = Field(
        None, ge=1, description="bytes of KV pool (default: on CPU 512MiB, on GPU by gpu-memory-utilization)"
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="part of the GPU's memory that weights, KV pool and workspace may take; with up, of all its nodes",
    )
    kv_mirror_memory: Bytes | None = Field(
        None,
        ge=1,
        description="on GPU: most host memory for the copy of the KV pool that peers read, and so the pool's largest "
        "size unless kv-cache-memory gives one (default: half of what is free at the start)",
    )
    num_blocks_override: int | None = Field(None, ge=1, description="pool size in blocks, for tests")
    max_model_len: int | None = Field(None, ge=1, description="context limit (default: the model's own)")
    max_num_seqs: int = Field(128, ge=1, description="sequences per step")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="tokens per step (default: CPU 256, GPU 2048)")
    max_step_ms: float | None = Field(
        None,
        gt=0,
        description="target length of a step with prompts beside streams (default: 100 on decode nodes, 75 on nodes "
        "that do both, as long as prompts then wait less than 4 s)",
    )
    max_num_waiting: int = Field(1024, ge=1, description="requests that may wait on a node")
    max_num_waiting_tokens: int = Field(524_288, ge=1, description="prompt tokens that may wait on a node")
    scheduling_policy: Literal["fcfs", "priority"] = Field("fcfs", description="who starts first")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="tokens per step of one prompt, so that shorter ones progress beside it (0: no limit)"
    )
    max_num_preemptions: int = Field(4, ge=1, description="times that one sequence may lose its blocks to others")
    enable_prefix_caching: bool = True
    batch_invariant: bool = Field(
        False, description="on GPU: the same bits whatever runs beside a request (on CPU in float32 always so)"
    )
    enforce_eager: bool = Field(False, description="start every kernel from Python: no CUDA graphs, on CPU no replays")
    num_threads: int | None = Field(None, ge=1, description="compute threads (default: cores this process may use)")
    core_board: str | None = Field(
        None, description="on CPU: file by which nodes of a machine lend each other idle cores (kvferry up makes one)"
    )

    @property
    def weight_format(self) -> Literal["float32", "bfloat16", "float16", "int8"]:
        """What the dense layers' weights are kept as."""
        return self.quantization or self.dtype


class NodeConfig(Section):
    """A prefill, decode or both node."""

    node_id: str | None = Field(
        None, description="stable name (default: role, machine unless node-host is local, port)"
    )
    node_host: str = Field("127.0.0.1", description="address to listen on for gRPC")
    node_port: int = Field(0, ge=0, le=65535, description="gRPC port (0: any free one)")
    advertise_host: str | None = Field(
        None, description="address that peers reach this node by (default: node-host; for 0.0.0.0 the one facing Redis)"
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="HTTP port of /metrics (0: any free one)")
    transports: tuple[TransportName, ...] = Field(("shm", "grpc"), description="offered and used, in this order")
    local_prefill_max_tokens: int | None = Field(
        None, ge=0, description="a decode node computes prompts with at most this many uncached tokens itself"
    )
    shm_dir: str = Field("/dev/shm", description="folder of the shared pool file")
    lease_s: float = Field(8.0, gt=0, description="seconds a lease lives without being renewed")
    lease_renew_s: float = Field(2.0, gt=0, description="seconds between renewals")
    cached_pull: Literal["auto", "always", "never"] = Field(
        "auto", description="take leading blocks from peers that have them cached (auto: when cheaper than computing)"
    )
    max_leased_cache_share: float = Field(
        0.25, ge=0, le=1, description="part of the pool that peers' pulls of cached blocks may pin"
    )
    heartbeat_s: float = Field(1.0, gt=0, description="seconds between load reports to the index")
    node_ttl_s: float = Field(5.0, gt=0, description="seconds after which a silent node is gone")
    prefill_timeout_s: float = Field(300.0, gt=0, description="longest wait for one remote prefill")
    peer_timeout_s: float = Field(3.0, gt=0, description="longest silence of a peer that should be alive")
    stall_timeout: float = Field(
        60.0, gt=0, description="seconds one engine step may take before the node counts as stalled"
    )
    drain_s: float = Field(30.0, ge=0, description="grace period for running requests after SIGTERM")


class GatewayConfig(Section):
    @property
    def asks_for_key(self) -> bool:
        """Whether keys are configured, be it as an empty list, which lets nobody in."""
        return self.api_keys is not None or self.api_keys_file is not None

    host: str = Field("127.0.0.1", description="HTTP address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port")
    admin_host: str = Field("127.0.0.1", description="address of admin-port")
    admin_port: int | None = Field(
        None, ge=0, le=65535, description="HTTP port of /, /cluster, /debug and /metrics (default: that of the API)"
    )
    workers: int = Field(1, ge=1, le=256, description="processes that share the port")
    listen_fds: tuple[int, ...] = Field(
        (), description="inherited sockets instead of addresses: of the API, then of admin-port"
    )
    worker_number: int = Field(0, ge=0, description="which worker this is; told by the process that starts them")
    client_stall_timeout: float = Field(60.0, gt=0, description="seconds a client may accept nothing")
    queue_timeout: float = Field(120.0, gt=0, description="longest wait for the first token")
    max_ttft: float | None = Field(
        None, gt=0, description="seconds; a request whose first token is predicted to come later is answered with 429"
    )
    stream_delay_weight: float = Field(4.0, ge=0, description="weight of what streams lose to prompts on decode nodes")
    max_resumptions: int = Field(
        3, ge=0, description="times that a request goes on elsewhere after the decode node that ran it was lost"
    )
    resume_timeout: float = Field(
        30.0, ge=0, description="longest wait of such a request for a decode node that can take it"
    )
    max_num_requests: int = Field(2048, ge=1, description="requests in flight; more are answered with 429")
    max_body_bytes: Bytes = Field(16 * 2**20, ge=1, description="largest request body")
    enable_log_requests: bool = Field(False, description="log every prompt, as text, with its sampling parameters")
    max_log_len: int | None = Field(None, ge=0, description="characters of a prompt that are logged (default: all)")
    api_keys_file: str | None = Field(
        None, description="file of hashed API keys (kvferry api-key new NAME prints its lines); read again on change"
    )
    api_keys: str | None = Field(None, description="lines as in api-keys-file, with ; between them")
    allowed_origins: tuple[str, ...] = Field((), description="web pages that may call the API, or * (CORS)")
    allowed_methods: tuple[str, ...] = Field(("GET", "POST"), description="what they may do (CORS)")
    allowed_headers: tuple[str, ...] = Field(("*",), description="headers that they may send (CORS)")
    allow_credentials: bool = Field(False, description="whether they may send cookies and the like (CORS)")
    ssl_certfile: str | None = Field(None, description="PEM certificate chain: HTTPS; read again on change")
    ssl_keyfile: str | None = Field(None, description="PEM key of ssl-certfile (default: in the same file)")
    ssl_ca_certs: str | None = Field(None, description="PEM authorities: clients must show a certificate of theirs")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "none"] = Field(
        "auto", description="how the model writes tool calls (auto: as its chat template says)"
    )
    index_timeout_s: float = Field(0.05, gt=0, description="longest wait for the prefix index per request")
    generation_config: Literal["auto", "vllm"] = Field(
        "auto", description="sampling defaults: the model's generation_config.json, or none but the API's own"
    )


class LocalConfig(Section):
    """`kvferry up`."""

    num_prefill: int = Field(1, ge=0, description="prefill nodes")
    num_decode: int = Field(1, ge=0, description="decode nodes")
    num_both: int = Field(0, ge=0, description="nodes that do both (aggregated mode)")
    ready_timeout: float = Field(180.0, gt=0, description="seconds to wait until the cluster is ready")


class Config(Section):
    cluster: ClusterConfig = ClusterConfig()
    engine: EngineConfig = EngineConfig()
    node: NodeConfig = NodeConfig()
    gateway: GatewayConfig = GatewayConfig()
    local: LocalConfig = LocalConfig()

    @property
    def served_model(self) -> str:
        return self.cluster.served_model_name or self.cluster.model


SECTIONS: dict[str, type[Section]] = {
    name: info.annotation for name, info in Config.model_fields.items() if isinstance(info.annotation, type)
}
SECTION_OF: dict[str, str] = {field: name for name, cls in SECTIONS.items() for field in cls.model_fields}
"""Field name -> its section. Unique by the assertion below, so that flags need no section."""
assert len(SECTION_OF) == sum(len(cls.model_fields) for cls in SECTIONS.values())


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when no known name is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _merge(into: dict[str, dict[str, Any]], section: str, field: str, value: Any, origin: str) -> None:
    if section not in SECTIONS:
        raise ConfigError(f"{origin}: unknown section {section!r}{nearest(section, SECTIONS)}")
    known = SECTIONS[section].model_fields
    if field not in known:
        raise ConfigError(f"{origin}: unknown option {section}.{field}{nearest(field, known)}")
    if (
        isinstance(value, str)
        and get_args(known[field].annotation)
        and str(known[field].annotation).startswith("tuple")
    ):
        value = tuple(part.strip() for part in value.split(",") if part.strip())
    into[section][field] = value


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        raw = path.read_text()
    except OSError as exc:
        raise ConfigError(f"config file {path}: {exc.strerror}") from exc
    try:
        data = tomllib.loads(raw) if path.suffix == ".toml" else yaml.safe_load(raw)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(f"config file {path} does not parse: {exc}") from exc
    if not isinstance(data, dict) or not all(isinstance(v, dict) for v in data.values()):
        raise ConfigError(f"config file {path}: expected sections {', '.join(SECTIONS)} with options in each")
    return data


def load_config(
    flags: Mapping[str, Any] | None = None,
    *,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The merged tree. `flags` maps field names to values (strings are parsed by the field's type).

    Raises ConfigError that names the option, the value, and what would be accepted.
    """
    environ = os.environ if environ is None else environ
    merged: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    if path := file or environ.get("KVFERRY_CONFIG"):
        for section, options in _read_file(Path(path)).items():
            for field, value in options.items():
                _merge(merged, section, field.replace("-", "_"), value, f"config file {path}")
    for key, text in environ.items():
        if key.startswith("KVFERRY_") and "__" in key:
            section, _, field = key.removeprefix("KVFERRY_").lower().partition("__")
            _merge(merged, section, field, text, f"environment variable {key}")
    for field, value in (flags or {}).items():
        if field not in SECTION_OF:
            raise ConfigError(f"unknown option {field!r}{nearest(field, SECTION_OF)}", param=field)
        _merge(merged, SECTION_OF[field], field, value, f"--{field.replace('_', '-')}")
    try:
        return Config.model_validate(merged)
    except ValidationError as exc:
        parts = [f"{'.'.join(map(str, e['loc']))} = {e['input']!r}: {e['msg']}" for e in exc.errors()]
        raise ConfigError("; ".join(parts)) from exc

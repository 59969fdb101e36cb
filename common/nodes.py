"""Who is in the cluster: layout cards, node records and their loads. Plain data with a JSON form."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field

from kvferry.common.errors import LayoutMismatch


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class NodeState(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"  # its engine has made no step for too long


@dataclass(frozen=True, slots=True)
class LayoutCard:
    """Everything two nodes must agree on before a block of one means anything to the other."""

    model_fingerprint: str
    numerics_id: str
    dtype: str  # of keys and values
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    version: str
    tp_rank: int = 0
    tp_size: int = 1
    weights: str = "float32"  # what they are kept as

    @property
    def naming(self) -> tuple[str, str, int]:
        """Nodes that are alike in this give equal names to equal blocks."""
        return self.model_fingerprint, self.numerics_id, self.block_size

    @property
    def kv_heads(self) -> range:
        """This rank's, of the model's `num_kv_heads`. A degree above that number gives each head to several ranks."""
        if self.tp_size > self.num_kv_heads:
            head = self.tp_rank // (self.tp_size // self.num_kv_heads)
            return range(head, head + 1)
        heads_per_rank = self.num_kv_heads // self.tp_size
        return range(self.tp_rank * heads_per_rank, (self.tp_rank + 1) * heads_per_rank)

    @property
    def block_bytes(self) -> int:
        """Of this rank's part of a block."""
        item = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return self.num_layers * 2 * len(self.kv_heads) * self.block_size * self.head_dim * item

    def shared_heads(self, other: LayoutCard) -> range:
        """The kv-heads that both ranks hold."""
        mine, theirs = self.kv_heads, other.kv_heads
        return range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))

    def check_compatible(self, other: LayoutCard, who: str) -> None:
        """Raises LayoutMismatch that names the first field that differs and both values.

        `version` is not compared: what may differ between versions is bound by the fingerprint and the numerics id.
        Tensor-parallel degrees may differ, as long as both split the heads evenly and the two ranks share some.
        """
        for name in _CARD_FIELDS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                said = {"dtype": "kv_cache_dtype"}.get(name, name)  # a node's option `dtype` is about its weights
                raise LayoutMismatch(
                    f"{who} has {said} {theirs!r}, this node has {mine!r}: start both with the same value",
                    param=said,
                )
        if not (self._splits_evenly() and other._splits_evenly()):
            raise LayoutMismatch(
                f"{who} is tp_rank {other.tp_rank} of tp_size {other.tp_size!r}, this node {self.tp_rank} of "
                f"{self.tp_size!r}: each tp_size must divide the {self.num_kv_heads} kv-heads or be a multiple of them",
                param="tp_size",
            )
        if not self.shared_heads(other):
            raise LayoutMismatch(
                f"{who} is tp_rank {other.tp_rank} of {other.tp_size}, this node {self.tp_rank} of {self.tp_size}: "
                f"of {self.num_kv_heads} kv-heads they share none",
                param="tp_rank",
            )

    def check_gives(self, peer: LayoutCard, who: str) -> None:
        """Raises LayoutMismatch unless blocks of `peer` alone mean something here: same bits, and all kv-heads."""
        self.check_compatible(peer, who)
        if (shared := self.shared_heads(peer)) != self.kv_heads:
            raise LayoutMismatch(
                f"{who} holds {len(shared)} of the {len(self.kv_heads)} kv-heads that this node needs", param="tp_size"
            )

    def _splits_evenly(self) -> bool:
        size, heads = self.tp_size, self.num_kv_heads
        return 0 <= self.tp_rank < size and (heads % size == 0 or size % heads == 0)


_CARD_FIELDS = (
    "weights",
    "dtype",
    "model_fingerprint",
    "numerics_id",
    "block_size",
    "num_layers",
    "num_kv_heads",
    "head_dim",
)


@dataclass(frozen=True, slots=True)
class BlockAccounts:
    """Where the pool's blocks are. Each block is in exactly one account; the sum is the pool."""

    free: int = 0
    cached: int = 0
    sequence: int = 0
    lease: int = 0
    incoming: int = 0

    @property
    def total(self) -> int:
        return self.free + self.cached + self.sequence + self.lease + self.incoming

    @property
    def available(self) -> int:
        """Blocks that an allocation may take at once (cached ones by eviction)."""
        return self.free + self.cached


def num_positions(start: int, end: int) -> int:
    """What tokens `[start, end)` of a prompt attend to, together: attention's share of computing them goes with it."""
    return (end * end - start * start) // 2


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """A node's own report, at most one heartbeat old. Rates are exponentially weighted; 0: not measured.

    `num_waiting_tokens` are prompt tokens still to be computed, those of prompts that have begun too, and
    `num_waiting_positions` those that they attend to, together. A prompt token takes `prompt_token_ms` and, for each
    position before it, `prompt_position_ms`; `prefill_tokens_per_s` is the mean over prompts as they came, whose
    tokens had `prompt_depth` positions before them in the mean.
    `pull_bytes_per_s` is that of its pulls from peers in the last minute, the slowest peer's."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_waiting_positions: int = 0
    num_blocks: int = 0
    accounts: BlockAccounts = field(default_factory=BlockAccounts)
    num_leases: int = 0
    prefill_tokens_per_s: float = 0.0
    prompt_token_ms: float = 0.0
    prompt_position_ms: float = 0.0
    prompt_depth: float = 0.0
    step_ms: float = 0.0
    pull_bytes_per_s: float = 0.0
    num_steps: int = 0
    num_shared_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """By which transport a node pulls blocks from a peer, why by that one, and how much since the link was made."""

    instance_id: str
    address: str
    transport: str
    reason: str
    num_blocks: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One running node. `instance_id` is new with every process start; `node_id` is the name that stays."""

    instance_id: str
    node_id: str
    role: Role
    address: str
    model: str
    card: LayoutCard
    max_model_len: int
    batch_invariant: bool = False  # what runs beside a request cannot change its bits
    metrics_address: str = ""
    state: NodeState = NodeState.READY
    load: NodeLoad = field(default_factory=NodeLoad)
    links: tuple[Link, ...] = ()  # told when the node itself is asked, not with each heartbeat

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, raw: str | bytes) -> NodeRecord:
        """Raises ValueError on a record that does not parse (an incompatible peer).

        What a newer node says of its load beyond what is known here is left out; of its layout all must be known.
        """
        try:
            d = json.loads(raw)
            load = d.pop("load")
            accounts = BlockAccounts(**load.pop("accounts"))
            known = {name: value for name, value in load.items() if name in NodeLoad.__dataclass_fields__}
            return cls(
                role=Role(d.pop("role")),
                state=NodeState(d.pop("state")),
                card=LayoutCard(**d.pop("card")),
                load=NodeLoad(accounts=accounts, **known),
                links=tuple(Link(**link) for link in d.pop("links")),
                **d,
            )
        except (TypeError, KeyError, AttributeError) as exc:
            raise ValueError(f"not a node record: {exc}") from exc

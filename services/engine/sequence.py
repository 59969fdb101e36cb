"""One sequence on its way through the engine. Plain Python, no tensors, no policy.

Who owns which stretch of a sequence's tokens (half-open):

    [0, num_computed_tokens)                  found in this pool's prefix cache at admission, then received from a peer
                                              (`num_received_tokens` of them), found again (`num_cached_tokens` with
                                              those of admission), then computed here
    [num_computed_tokens, num_target_tokens)  still to compute

and of its block table:

    [0, num_named_blocks)                     full, named, immutable, maybe shared
    [num_named_blocks, len(block_table))      private to this sequence, but for the half-filled last block of a prompt
                                              whose branches have not written yet: copied by whoever writes first
"""

from __future__ import annotations

import enum
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.common.hashing import block_names
from kvferry.common.requests import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from kvferry.services.engine.beam import BeamGroup
    from kvferry.services.engine.grammar import Matcher


class Status(enum.Enum):
    WAITING = "waiting"  # queued, owns nothing (or, after a receive, all its prompt blocks)
    RECEIVING = "receiving"  # owns blocks for its whole prompt; a peer's blocks are being copied into them
    RUNNING = "running"
    HELD = "held"  # compute-only and complete: keeps its blocks until closed
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class Sequence:
    """`sampling` None: compute the KV of the tokens and stop there. `receive`: the prompt's blocks come from a peer.

    A compute-only sequence has only whole blocks of tokens. `branches` are further samples of the same prompt: each is
    born, sharing all blocks, when the prompt is computed, and until then knows its `parent`.

    Output that another engine has produced already enters with `token_ids`; that of one choice of several, which comes
    after their common prompt, as `resumed_token_ids`, which take the place of the first token to be drawn.
    """

    key: str
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    root: bytes
    block_size: int
    sampling: SamplingParams | None
    index: int = 0
    receive: bool = False
    priority: int = 0  # lower runs earlier

    status: Status = Status.WAITING
    block_table: array[int] = field(default_factory=lambda: array("q"))  # int64, which a step's inputs take as it is
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_received_tokens: int = 0
    num_named_blocks: int = 0
    num_preemptions: int = 0
    num_overtaken: int = 0
    num_recomputed_tokens: int = 0
    arrival_s: float = field(default_factory=time.monotonic)
    admitted_s: float = 0.0
    received_s: float = 0.0
    names: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # filled by the runner, chunk by chunk
    resumed_token_ids: tuple[int, ...] = ()
    tells_first: bool = True  # its next token comes with the facts about its prompt
    branches: list[Sequence] = field(default_factory=list)
    parent: Sequence | None = None
    abandoned: bool = False  # closed, but computes the prompt for its branches
    cancelled_s: float = 0.0  # when whoever waited for it left
    group: BeamGroup | None = None
    matcher: Matcher | None = None  # what a grammar lets its output be
    num_reserved_seats: int = 0  # for beams to come
    sample_row: bytes = b""  # how its tokens are drawn, as the sampler's tables take it; packed at the first

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_cacheable_blocks(self) -> int:
        """Leading full blocks that a cache hit may supply; one that samples always recomputes its last token."""
        if self.wants_prompt_logprobs:
            return 0
        return (self.num_tokens - (self.sampling is not None)) // self.block_size

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the logits of its whole prompt are needed, so that no cache hit and no peer can stand in."""
        return self.sampling is not None and self.sampling.prompt_logprobs is not None and not self.num_output_tokens

    @property
    def num_seats(self) -> int:
        """Places in the batch that it takes, now or once its branches are born."""
        return 1 + len(self.branches) + self.num_reserved_seats

    def add_branch(self, key: str, index: int, resumed_token_ids: tuple[int, ...] = ()) -> None:
        branch = Sequence(key, [], self.num_prompt_tokens, self.root, self.block_size, self.sampling, index)
        branch.resumed_token_ids = resumed_token_ids
        branch.parent = self
        branch.matcher = self.matcher and self.matcher.clone()
        self.branches.append(branch)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def name_blocks(self, num_blocks: int) -> list[bytes]:
        """Names of the first `num_blocks` blocks, which must be full of tokens."""
        if (have := len(self.names)) < num_blocks:
            span = self.token_ids[have * self.block_size : num_blocks * self.block_size]
            parent = self.names[-1] if self.names else None
            self.names.extend(block_names(self.root, span, self.block_size, parent))
        return self.names[:num_blocks]

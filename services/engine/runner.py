"""Turns a schedule into tensors, runs the model, samples. The only place where policy meets torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvferry.common.requests import SamplingParams
from kvferry.kernels import ops
from kvferry.services.engine.grammar import Mask, MaskWorker
from kvferry.services.engine.host_mirror import HostMirror, filled_blocks
from kvferry.services.engine.input_batch import InputBatch
from kvferry.services.engine.model import LlamaModel
from kvferry.services.engine.sample_rows import SampleRow, SampleRows, join, pack, uses_history
from kvferry.services.engine.sampler import SampledToken, sample
from kvferry.services.engine.schedule import RunnerLost, Schedule, Scheduled
from kvferry.services.engine.sequence import Sequence as Seq
from kvferry.services.engine.top_tokens import token_logprobs

DEVICE_ERRORS = ("CUDA error", "Triton Error [CUDA]")
"""How errors begin after which every call of the process to its GPU fails. Running out of memory is none of them."""

LOGPROB_ROWS = 64
"""Rows of logits that exist at once while a prompt's log-probabilities are computed."""


class TorchRunner:
    """`kv_cache`: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.

    `mirror` is where peers read and write blocks, if that is not the `kv_cache` itself.
    """

    def __init__(
        self,
        model: LlamaModel,
        kv_cache: torch.Tensor,
        eos_token_ids: tuple[int, ...],
        mirror: HostMirror | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.mirror = mirror
        self._inputs = InputBatch(kv_cache.shape[4], kv_cache.device)
        self.eos_token_ids = eos_token_ids
        self._masks = MaskWorker()

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    def execute(self, schedule: Schedule) -> list[SampledToken]:
        try:
            return self._execute(schedule)
        except RuntimeError as exc:
            if str(exc).startswith(DEVICE_ERRORS):
                raise RunnerLost(f"the device of this process is lost: {exc}") from exc
            raise

    @torch.inference_mode()
    def _execute(self, schedule: Schedule) -> list[SampledToken]:
        if self.mirror is not None:
            self.mirror.copy_up(schedule.arrived)
        copies = schedule.copies
        ops.copy_blocks(self.kv_cache, [copy.source for copy in copies], [copy.target for copy in copies])
        sampling = [row.sequence for row in schedule.rows if row.samples]
        ones = [(seq, one) for seq in sampling for one in (seq, *seq.branches)]
        masks = self._masks.begin(
            {
                i: (one.matcher, seq.token_ids[seq.num_prompt_tokens :])
                for i, (seq, one) in enumerate(ones)
                if one.matcher is not None
            }
        )
        batch = self._inputs.fill(schedule.rows)
        hidden = self.model.hidden(batch, self.kv_cache)
        if self.mirror is not None:
            self.mirror.copy_down(filled_blocks(schedule.rows))
        for row, start in zip(schedule.rows, batch.query_starts, strict=False):
            if row.sequence.wants_prompt_logprobs:
                self._add_prompt_logprobs(row, hidden[start : start + row.num_tokens])
        logits = self.model.logits(hidden[batch.logit_rows])
        if len(ones) > len(sampling):  # all samples of one prompt draw from the same logits
            logits = logits[[i for i, seq in enumerate(sampling) for _ in range(1 + len(seq.branches))]]
        return self._sample(logits, ones, masks())

    def _sample(
        self, logits: torch.Tensor, ones: Sequence[tuple[Seq, Seq]], masks: Mapping[int, Mask]
    ) -> list[SampledToken]:
        usable = {i: mask for i, mask in masks.items() if mask.error is None}
        table = join([one.sample_row or _pack(seq, one) for seq, one in ones])
        positions = np.fromiter((len(seq.token_ids) for seq, _ in ones), np.int64, len(ones))
        rows = {i: self._row(*ones[i], usable.get(i)) for i in {*usable, *table["may_edit"].nonzero()[0].tolist()}}
        edited = {i: row for i, row in rows.items() if row.is_edited or row.mask is not None}
        sampled = sample(logits, SampleRows(table, positions, edited))
        for i in masks.keys() - usable.keys():
            sampled[i] = SampledToken(0, error=masks[i].error)
        return sampled

    def _add_prompt_logprobs(self, row: Scheduled, hidden: torch.Tensor) -> None:
        """Those of the prompt's tokens that follow the row's. `hidden`: [row's num_tokens, hidden_size]."""
        seq = row.sequence
        assert seq.sampling is not None
        assert len(seq.prompt_logprobs) == row.start, f"{seq.key}: those of {row.start} tokens should be known"
        following = seq.token_ids[row.start + 1 : min(row.start + row.num_tokens + 1, seq.num_prompt_tokens)]
        for at in range(0, len(following), LOGPROB_ROWS):
            part = following[at : at + LOGPROB_ROWS]
            logits = self.model.logits(hidden[at : at + len(part)])
            seq.prompt_logprobs += token_logprobs(logits, part, seq.sampling.prompt_logprobs or 0)

    def _row(self, seq: Seq, one: Seq, mask: Mask | None) -> SampleRow:
        """How `one`, the sequence itself or a branch of it that is about to be born, draws its next token."""
        assert seq.sampling is not None
        return SampleRow(
            params=seq.sampling,
            position=seq.num_tokens,
            index=one.index,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens] if uses_history(seq.sampling) else (),
            output_token_ids=seq.token_ids[seq.num_prompt_tokens :] if _uses_output(seq.sampling) else (),
            eos_token_ids=self.eos_token_ids,
            mask=mask,
        )


def _pack(seq: Seq, one: Seq) -> bytes:
    assert seq.sampling is not None
    one.sample_row = pack(seq.sampling, one.index)
    return one.sample_row


def _uses_output(params: SamplingParams) -> bool:
    return uses_history(params) or bool(params.bad_words) or params.min_tokens > 0

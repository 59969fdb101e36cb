"""Beam searches inside the engine: their beams are ordinary sequences, forked and dropped as the search goes on.

A beam that has reported its best next tokens has nothing to compute until all beams of its group have; so they advance
in lockstep without the scheduler knowing. Called with the engine's mutex held.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.common.requests import SamplingParams
from kvferry.services.engine.beam import BeamGroup, BeamSearch
from kvferry.services.engine.outputs import FirstToken, StepReport, TokenOutput
from kvferry.services.engine.sampler import SampledToken
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.sequence import Sequence as Seq
from kvferry.services.engine.sequence import Status


def make_group(seq: Seq, params: SamplingParams, keys: tuple[str, ...], max_tokens: int, eos: frozenset[int]) -> None:
    """Turns a prompt's sequence into the first beam of a search of width `len(keys)`, whose results these keys name."""
    assert params.beam is not None
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    search = BeamSearch(len(keys), params.beam, max_tokens, ends, params.logprobs or 0)
    candidates = BeamSearch.num_candidates(len(keys), len(ends))
    seq.sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, logprobs=candidates, prompt_logprobs=params.prompt_logprobs
    )
    seq.group = BeamGroup(search, keys, [seq])
    seq.num_reserved_seats = len(keys) - 1


class BeamGroups:
    """`drop` takes one sequence out of the engine."""

    def __init__(self, scheduler: Scheduler, sequences: dict[str, Seq], drop: Callable[[Seq], None]) -> None:
        self._scheduler = scheduler
        self._sequences = sequences
        self._drop = drop
        self._groups: dict[str, BeamGroup] = {}

    def add(self, group: BeamGroup) -> None:
        self._groups.update(dict.fromkeys(group.keys, group))

    def of(self, key: str) -> BeamGroup | None:
        """The search that one of its choices' keys names."""
        return self._groups.get(key)

    def close(self, group: BeamGroup, key: str) -> list[Seq]:
        """Nobody waits for this choice any more. The beams to be ended: all of them once nobody waits for any.

        While the prompt is being received only its own key, the first, ends it: the copy must have stopped.
        """
        group.closed.add(key)
        receiving = group.members[0].status is Status.RECEIVING
        if not group.is_closed or (receiving and key != group.keys[0]):
            return []
        return list(group.members)

    def forget(self, group: BeamGroup) -> None:
        for key in group.keys:
            self._groups.pop(key, None)

    def book(self, seq: Seq, token: SampledToken, first: FirstToken, report: StepReport) -> None:
        """Takes what one beam reports; when it was the last one, the search advances."""
        group = seq.group
        assert group is not None
        group.reports[seq.key] = token
        group.first = group.first or first
        if not group.is_complete:
            return
        parents = group.search.step([group.reports[member.key].top for member in group.members])
        if parents is None:
            _emit(group, report)
            self.drop_all(group)
        else:
            self._advance(group, parents)

    def _advance(self, group: BeamGroup, parents: list[int]) -> None:
        """The first continuation of a beam takes its sequence over, each further one forks it."""
        old, continued = group.members, set[int]()
        group.members = []
        for parent in parents:
            group.members.append(self._fork(group, old[parent]) if parent in continued else old[parent])
            continued.add(parent)
        for i, member in enumerate(old):
            member.num_reserved_seats = 0
            if i not in continued:
                self._drop(member)
        for member, beam in zip(group.members, group.search.running, strict=True):
            member.token_ids.append(beam.token_ids[-1])
        group.reports.clear()

    def _fork(self, group: BeamGroup, parent: Seq) -> Seq:
        child = Seq(
            group.next_key(), [], parent.num_prompt_tokens, parent.root, parent.block_size, parent.sampling, group=group
        )
        self._sequences[child.key] = child
        self._scheduler.fork(parent, child)
        return child

    def drop_all(self, group: BeamGroup) -> None:
        for member in group.members:
            self._drop(member)
        self.forget(group)


def _emit(group: BeamGroup, report: StepReport) -> None:
    """The results, best first, as the choices' tokens."""
    first = group.first
    for key, found in zip(group.keys, group.search.results(), strict=True):
        last = len(found.beam.token_ids) - 1
        for i, (token_id, logprobs) in enumerate(zip(found.beam.token_ids, found.beam.logprobs, strict=True)):
            if key not in group.closed:
                reason = found.finish_reason if i == last else None
                report.tokens.append(TokenOutput(key, token_id, logprobs, reason, None, first))
                first = None

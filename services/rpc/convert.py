"""Wire messages <-> the types of `common`. Both directions of each pair stand together."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.common import requests as rq
from kvferry.common.nodes import LayoutCard
from kvferry.proto import kvferry_pb2 as pb


def submit_to_pb(request: rq.GenerateRequest) -> pb.Submit:
    return pb.Submit(
        request_id=request.request_id,
        attempt=request.attempt,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_pb(request.sampling),
        n=request.n,
        cache_salt=request.cache_salt,
        prefill=[
            pb.Candidate(instance_id=c.instance_id, address=c.address, cached_blocks=c.cached_blocks)
            for c in request.prefill
        ],
        priority=request.priority,
        holders=holders_to_pb(request.holders),
        traceparent=request.traceparent,
        resumed=[pb.ResumedChoice(index=c.index, token_ids=c.token_ids) for c in request.resumed],
        http_request_id=request.http_request_id,
        number=request.number,
        local_by_choice=request.local_by_choice,
    )


def submit_from_pb(msg: pb.Submit) -> rq.GenerateRequest:
    return rq.GenerateRequest(
        request_id=msg.request_id,
        attempt=msg.attempt,
        prompt_token_ids=tuple(msg.prompt_token_ids),
        sampling=sampling_from_pb(msg.sampling),
        n=msg.n,
        cache_salt=msg.cache_salt,
        prefill=tuple(rq.PrefillCandidate(c.instance_id, c.address, c.cached_blocks) for c in msg.prefill),
        priority=msg.priority,
        holders=holders_from_pb(msg.holders),
        traceparent=msg.traceparent,
        resumed=tuple(rq.ResumedChoice(c.index, tuple(c.token_ids)) for c in msg.resumed),
        http_request_id=msg.http_request_id,
        number=msg.number,
        local_by_choice=msg.local_by_choice,
    )


def holders_to_pb(holders: Iterable[rq.Holder]) -> list[pb.Holder]:
    return [pb.Holder(instance_id=h.instance_id, address=h.address, num_blocks=h.num_blocks) for h in holders]


def holders_from_pb(holders: Iterable[pb.Holder]) -> tuple[rq.Holder, ...]:
    return tuple(rq.Holder(h.instance_id, h.address, h.num_blocks) for h in holders)


def sampling_to_pb(s: rq.SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=[pb.TokenBias(token_id=t, bias=b) for t, b in s.logit_bias],
        stop_token_ids=s.stop_token_ids,
        ignore_eos=s.ignore_eos,
        seed=s.seed,
        logprobs=s.logprobs,
        allowed_token_ids=s.allowed_token_ids,
        bad_words=[pb.TokenSequence(token_ids=ids) for ids in s.bad_words],
        prompt_logprobs=s.prompt_logprobs,
        beam=_beam_to_pb(s.beam) if s.beam is not None else None,
        structured=_structured_to_pb(s.structured) if s.structured is not None else None,
    )


def _beam_to_pb(beam: rq.BeamParams) -> pb.Beam:
    return pb.Beam(length_penalty=beam.length_penalty, early_stopping=beam.early_stopping)


def _structured_to_pb(structured: rq.StructuredOutput) -> pb.StructuredOutput:
    return pb.StructuredOutput(grammar=structured.grammar, param=structured.param)


def sampling_from_pb(m: pb.Sampling) -> rq.SamplingParams:
    return rq.SamplingParams(
        max_tokens=m.max_tokens,
        min_tokens=m.min_tokens,
        temperature=m.temperature,
        top_p=m.top_p,
        top_k=m.top_k,
        min_p=m.min_p,
        repetition_penalty=m.repetition_penalty,
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        logit_bias=tuple((b.token_id, b.bias) for b in m.logit_bias),
        stop_token_ids=tuple(m.stop_token_ids),
        ignore_eos=m.ignore_eos,
        seed=m.seed,
        logprobs=m.logprobs if m.HasField("logprobs") else None,
        allowed_token_ids=tuple(m.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in m.bad_words),
        prompt_logprobs=m.prompt_logprobs if m.HasField("prompt_logprobs") else None,
        beam=rq.BeamParams(m.beam.length_penalty, m.beam.early_stopping) if m.HasField("beam") else None,
        structured=(
            rq.StructuredOutput(m.structured.grammar, m.structured.param) if m.HasField("structured") else None
        ),
    )


def output_to_pb(o: rq.RequestOutput) -> pb.Output:
    msg = pb.Output(
        request_id=o.request_id,
        attempt=o.attempt,
        index=o.index,
        token_ids=o.token_ids,
        logprobs=map(logprobs_to_pb, o.logprobs),
        finish_reason=o.finish_reason or "",
        stop_token_id=o.stop_token_id,
        cached_tokens=o.cached_tokens,
        computed_tokens=o.computed_tokens,
        prefilled_by=o.prefilled_by,
        prompt_logprobs=map(logprobs_to_pb, o.prompt_logprobs),
        local_cached_tokens=o.local_cached_tokens,
        received_tokens=o.received_tokens,
    )
    if o.error_code:
        msg.error.CopyFrom(pb.ErrorDetail(code=o.error_code, message=o.error_message, param=o.error_param))
    if o.times != rq.NO_TIMES:
        t = o.times
        msg.times.CopyFrom(
            pb.Times(queue_s=t.queue_s, prefill_s=t.prefill_s, transfer_s=t.transfer_s, first_step_s=t.first_step_s)
        )
    return msg


def output_from_pb(m: pb.Output) -> rq.RequestOutput:
    """Stands in every token's way: what is set on first outputs alone is not built for the others."""
    return rq.RequestOutput(
        request_id=m.request_id,
        attempt=m.attempt,
        index=m.index,
        token_ids=tuple(m.token_ids),
        logprobs=tuple(map(logprobs_from_pb, m.logprobs)) if m.logprobs else (),
        finish_reason=rq.FinishReason(m.finish_reason) if m.finish_reason else None,
        stop_token_id=m.stop_token_id if m.HasField("stop_token_id") else None,
        **(_error_from_pb(m.error) if m.HasField("error") else {}),
        cached_tokens=m.cached_tokens,
        computed_tokens=m.computed_tokens,
        prefilled_by=m.prefilled_by,
        times=_times_from_pb(m.times) if m.HasField("times") else rq.NO_TIMES,
        prompt_logprobs=tuple(map(logprobs_from_pb, m.prompt_logprobs)) if m.prompt_logprobs else (),
        local_cached_tokens=m.local_cached_tokens,
        received_tokens=m.received_tokens,
    )


def _times_from_pb(m: pb.Times) -> rq.RequestTimes:
    return rq.RequestTimes(m.queue_s, m.prefill_s, m.transfer_s, m.first_step_s)


def _error_from_pb(m: pb.ErrorDetail) -> dict[str, str]:
    return {"error_code": m.code, "error_message": m.message, "error_param": m.param}


def logprobs_to_pb(t: rq.TokenLogprobs) -> pb.Logprobs:
    return pb.Logprobs(
        logprob=t.logprob, top_token_ids=[i for i, _ in t.top], top_logprobs=[p for _, p in t.top], rank=t.rank
    )


def logprobs_from_pb(m: pb.Logprobs) -> rq.TokenLogprobs:
    return rq.TokenLogprobs(m.logprob, tuple(zip(m.top_token_ids, m.top_logprobs, strict=True)), m.rank)


def card_to_pb(c: LayoutCard) -> pb.LayoutCard:
    return pb.LayoutCard(
        model_fingerprint=c.model_fingerprint,
        numerics_id=c.numerics_id,
        dtype=c.dtype,
        block_size=c.block_size,
        num_layers=c.num_layers,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        tp_rank=c.tp_rank,
        tp_size=c.tp_size,
        version=c.version,
        weights=c.weights,
    )


def card_from_pb(m: pb.LayoutCard) -> LayoutCard:
    return LayoutCard(
        model_fingerprint=m.model_fingerprint,
        numerics_id=m.numerics_id,
        dtype=m.dtype,
        block_size=m.block_size,
        num_layers=m.num_layers,
        num_kv_heads=m.num_kv_heads,
        head_dim=m.head_dim,
        tp_rank=m.tp_rank,
        tp_size=m.tp_size,
        version=m.version,
        weights=m.weights or "float32",
    )

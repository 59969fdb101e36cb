"""Grafana's boards as code: `make generated` writes dashboards/*.json.

Panels are said in one line each; what they have in common is in charts.py. Needs the package grafana-foundation-sdk.
"""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync

from compose.grafana.charts import SOURCE, Chart, Rows, mean, quantiles, rate, within

FOLDER = Path(__file__).with_name("dashboards")
NODE = 'job=~"prefill|decode|both",instance=~"$node"'
BY = "transport"
GATEWAY = 'job="gateway"'
SOURCES, HITS = "prompt_tokens_by_source_total", f'{NODE},source="local_cache_hit"'
KEY = "api_key_name"
KEY_TOKENS = f"{rate('api_key_prompt_tokens_total', KEY)} + {rate('api_key_generation_tokens_total', KEY)}"
FIRST_TOKEN = {
    mean(f"request_{part}_time_seconds"): legend
    for part, legend in (("queue", "queue"), ("prefill", "prefill"), ("transfer", "blocks"), ("first_step", "step"))
}

OVERVIEW: Rows = {
    "Objectives": (
        Chart("Time to first token", "s", quantiles("time_to_first_token_seconds"), "Objective: p95 below 2.5 s."),
        Chart("Inter-token latency", "s", quantiles("inter_token_latency_seconds"), "Objective: p99 below 0.25 s."),
        Chart("Whole request", "s", quantiles("e2e_request_latency_seconds")),
        Chart(
            "First tokens within 2.5 s, tokens within 0.25 s",
            "percentunit",
            {
                within("time_to_first_token_seconds", 2.5): "first tokens",
                within("inter_token_latency_seconds", 0.25): "tokens",
            },
        ),
        Chart(
            "How requests end",
            "reqps",
            {rate("request_success_total", "finished_reason", GATEWAY): "{{finished_reason}}"},
        ),
        Chart("What the first token waits for (mean)", "s", FIRST_TOKEN, stacked=True),
        Chart(
            "Time per output token",
            "s",
            quantiles("request_time_per_output_token_seconds"),
            "TPOT: a finished choice's mean, behind its first token.",
        ),
        Chart("Decode time", "s", quantiles("request_decode_time_seconds"), "First to last token of a choice."),
        Chart(
            "Breakers, by gateway",
            "short",
            {"sum by (instance, state) (kvferry:breakers)": "{{instance}} {{state}}"},
            "Decode nodes that are left alone because they failed.",
        ),
    ),
    "Traffic": (
        Chart(
            "Tokens",
            "short",
            {
                rate("prompt_tokens_total", labels=GATEWAY): "prompt",
                rate("generation_tokens_total", labels=GATEWAY): "output",
            },
            "Per second, at the gateways.",
        ),
        Chart("Choices running", "short", {'sum(kvferry:num_requests_running{job="gateway"})': "running"}),
        Chart(
            "Prompt tokens found in a cache",
            "percentunit",
            {f"{rate('prompt_tokens_cached_total')} / {rate('prompt_tokens_total', labels=GATEWAY)}": "hits"},
        ),
        Chart(
            "Prompt tokens by source",
            "short",
            {rate("prompt_tokens_by_source_total", "source", GATEWAY): "{{source}}"},
            "Per second: where decode nodes had them from.",
            stacked=True,
        ),
        Chart(
            "Tokens by API key",
            "short",
            {f"topk(10, {KEY_TOKENS})": "{{api_key_name}}"},
            "Per second, prompt and output, of the ten busiest keys.",
        ),
        Chart(
            "Refused by API key",
            "reqps",
            {f"topk(10, {rate('api_key_requests_refused_total', KEY)})": "{{api_key_name}}"},
            "A limit of the key was used up.",
        ),
    ),
}

POOLS: Rows = {
    pool.capitalize(): (
        Chart("Running", "short", {f'kvferry:num_requests_running{{job="{pool}"}}': "{{instance}}"}, width=6),
        Chart("Waiting", "short", {f'kvferry:num_requests_waiting{{job="{pool}"}}': "{{instance}}"}, width=6),
        Chart("Engine step", "s", quantiles("engine_step_seconds", f'job="{pool}"'), width=6),
        Chart(
            "Queue",
            "s",
            quantiles("engine_queue_time_seconds", f'job="{pool}"'),
            "Arrival at the node to the first step.",
            width=6,
        ),
        Chart("Tokens per step (mean)", "short", {mean("iteration_tokens_total", f'job="{pool}"'): "tokens"}, width=6),
        Chart(
            "Prompt tokens by source",
            "short",
            {rate("prompt_tokens_by_source_total", "source", f'job="{pool}"'): "{{source}}"},
            "Per second: computed here, cached here, received.",
            width=6,
            stacked=True,
        ),
        Chart("KV use", "percentunit", {f'kvferry:kv_cache_usage_perc{{job="{pool}"}}': "{{instance}}"}, width=6),
        Chart(
            "Preemptions",
            "short",
            {rate("num_preemptions_total", "instance", f'job="{pool}"'): "{{instance}}"},
            width=6,
        ),
    )
    for pool in ("prefill", "decode")
}

CACHE: Rows = {
    "Blocks": (
        Chart(
            "Accounts",
            "short",
            {f"sum by (account) (kvferry:kv_blocks{{{NODE}}})": "{{account}}"},
            "Each block is in exactly one.",
            width=12,
            stacked=True,
        ),
        Chart(
            "Accounted minus pool",
            "short",
            {f"kvferry:kv_blocks_accounted{{{NODE}}} - kvferry:kv_blocks_total{{{NODE}}}": "{{instance}}"},
            "Anything but 0 is a bug.",
            width=12,
        ),
        Chart("Shared by several sequences", "short", {f"kvferry:kv_blocks_shared{{{NODE}}}": "{{instance}}"}),
        Chart(
            "Copied because a branch wrote", "short", {rate("kv_blocks_copied_total", "instance", NODE): "{{instance}}"}
        ),
        Chart("Leases open", "short", {f"kvferry:leases_open{{{NODE}}}": "{{instance}}"}),
    ),
    "Prefix cache": (
        Chart(
            "Found, by node",
            "percentunit",
            {
                f"{rate(SOURCES, 'instance', HITS)} / {rate(SOURCES, 'instance', NODE)}": "{{instance}}",
            },
        ),
        Chart(
            "Hit rate, by node",
            "percentunit",
            {
                f"{rate('prefix_cache_hits_total', 'instance', NODE)}"
                f" / {rate('prefix_cache_queries_total', 'instance', NODE)}": "{{instance}}"
            },
            "Of the prompt tokens that were looked up in the node's own cache.",
        ),
        Chart(
            "Hit rate at other nodes",
            "percentunit",
            {
                f"{rate('external_prefix_cache_hits_total', 'instance', NODE)}"
                f" / {rate('external_prefix_cache_queries_total', 'instance', NODE)}": "{{instance}}"
            },
            "Of the prompt tokens that were missing here: given by others.",
        ),
        Chart(
            "Index lookups",
            "reqps",
            {rate("index_lookups_total"): "answered", rate("index_lookup_failures_total"): "failed or late"},
        ),
        Chart("Index reachable", "bool", {"kvferry:index_up": "{{instance}}"}),
    ),
}

TRANSFER: Rows = {
    "The ferry": (
        Chart("Bytes pulled", "Bps", {rate("transfer_bytes_total", "transport"): "{{transport}}"}, stacked=True),
        Chart("Blocks pulled", "short", {rate("transfer_blocks_total", "transport"): "{{transport}}"}, stacked=True),
        Chart("Seconds per pull", "s", quantiles("transfer_seconds")),
        Chart(
            "Rate while pulling",
            "Bps",
            {f"{rate('transfer_bytes_total', BY)} / {rate('transfer_seconds_sum', BY)}": "{{transport}}"},
        ),
        Chart(
            "Pulls: in all, and not hidden behind computing",
            "s",
            {rate("transfer_seconds_sum"): "pulling", rate("transfer_exposed_seconds_total"): "not hidden"},
            "Seconds per second. The second includes asking whether the lease held.",
        ),
        Chart("Wait for blocks after the last chunk (mean)", "s", {mean("request_transfer_time_seconds"): "transfer"}),
        Chart("Cancel to free", "s", quantiles("cancel_to_free_seconds")),
    ),
    "What went wrong": (
        Chart("Receives that failed", "short", {rate("transfer_failures_total", "cause"): "{{cause}}"}),
        Chart(
            "Pulls that a transport could not do",
            "short",
            {rate("transport_failures_total", "transport, cause"): "{{transport}}: {{cause}}"},
        ),
        Chart("Prompts computed on decode instead", "short", {rate("prefill_fallback_total", "cause"): "{{cause}}"}),
        Chart("Leases expired", "short", {rate("leases_expired_total", "instance"): "{{instance}}"}),
    ),
}

REQUEST: Rows = {
    "Routing": (
        Chart(
            "Decisions",
            "reqps",
            {rate("route_decisions_total", "kind"): "{{kind}}"},
            "Who is counted on for most of the prompt.",
            stacked=True,
        ),
        Chart(
            "First token: measured less predicted",
            "s",
            quantiles("route_ttft_error_seconds", of=(0.05, 0.5, 0.95)),
            "Above 0: it came later than the router thought. Exact to the buckets.",
            below_zero=True,
        ),
        Chart("Breakers opened", "short", {rate("breaker_opens_total", "instance"): "{{instance}}"}, "Per second."),
    ),
    "From the socket to the first token": (
        Chart(
            "Parts of the first token (mean)",
            "s",
            FIRST_TOKEN,
            "In order; the rest is the gateway and the wire.",
            width=24,
            stacked=True,
        ),
        Chart("Queues", "s", quantiles("request_queue_time_seconds"), width=6),
        Chart("Prompt computed", "s", quantiles("request_prefill_time_seconds"), width=6),
        Chart("Blocks awaited", "s", quantiles("request_transfer_time_seconds"), width=6),
        Chart("First decode step", "s", quantiles("request_first_step_time_seconds"), width=6),
    ),
    "And on to the end": (
        Chart("Prompt length", "short", quantiles("request_prompt_tokens")),
        Chart(
            "Retried before a token, resumed behind some",
            "short",
            {
                rate("request_retries_total"): "retried",
                rate("request_resumes_total", "reason"): "resumed: {{reason}}",
            },
        ),
        Chart(
            "Clients that left or stalled",
            "short",
            {rate("requests_aborted_total"): "left", rate("client_stalls_total"): "stalled"},
        ),
    ),
}

BOARDS: dict[str, tuple[str, Rows]] = {
    "overview": ("kvferry: overview", OVERVIEW),
    "pools": ("kvferry: prefill and decode", POOLS),
    "cache": ("kvferry: blocks and prefix cache", CACHE),
    "transfer": ("kvferry: transfer", TRANSFER),
    "request": ("kvferry: the path of a request", REQUEST),
}


def board(name: str) -> str:
    """One board as JSON."""
    title, rows = BOARDS[name]
    made = (
        Dashboard(title)
        .uid(f"kvferry-{name}")
        .tags(["kvferry"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(DatasourceVariable("source").label("source").type("prometheus"))
    )
    if any("$node" in query for charts in rows.values() for chart in charts for query in chart.queries):
        values = "label_values(kvferry:kv_blocks_total, instance)"
        made = made.with_variable(
            QueryVariable("node").query(values).datasource(SOURCE).multi(True).include_all(True).all_value(".*")
        )
    for row, charts in rows.items():
        made = made.with_row(Row(row))
        for chart in charts:
            made = made.with_panel(chart.panel())
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"

"""`/metrics` in Prometheus's text format: the names that clients/acceptance.py reads, and what a queue is judged by."""

from collections.abc import Iterable, Iterator, Mapping

from eyas.engine.server.service import Service

PREFIX = "eyas:"


def exposition(service: Service) -> str:
    """Every sample with its help and type."""
    return "\n".join(_lines(service)) + "\n"


def _lines(service: Service) -> Iterator[str]:
    scheduler = service.worker.scheduler
    totals, pool = scheduler.totals, scheduler.pool
    for name, kind, help, value in (
        ("spec_decode_num_drafts_total", "counter", "Rounds that drafted.", totals.drafted_rounds),
        ("spec_decode_num_draft_tokens_total", "counter", "Drafted tokens.", totals.drafted_tokens),
        ("spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens accepted, uncut.", totals.accepted_tokens),
        ("rounds_total", "counter", "Rounds, plain ones included.", totals.rounds),
        ("forwards_total", "counter", "Verify forwards; one may serve several texts.", totals.forwards),
        ("generation_tokens_total", "counter", "Tokens emitted.", totals.generation_tokens),
        ("prompt_tokens_total", "counter", "Prompt tokens of admitted texts.", totals.prompt_tokens),
        ("prompt_tokens_cached_total", "counter", "Of these, copied from another's rows.", totals.cached_tokens),
        ("num_requests_running", "gauge", "Texts with cache rows.", len(scheduler.seats)),
        ("num_requests_waiting", "gauge", "Texts that wait for cache rows.", len(scheduler.waiting)),
        ("kv_cache_rows", "gauge", "Cache rows in all.", pool.budget),
        ("kv_cache_rows_used", "gauge", "Rows of running texts.", pool.rows_used),
        ("kv_cache_rows_remembered", "gauge", "Rows of earlier prompts, given up on demand.", pool.rows_remembered),
        ("kv_cache_usage_perc", "gauge", "Share of rows in use, 0 to 1.", pool.rows_used / pool.budget),
        ("start_time_seconds", "gauge", "When the server started, in Unix time.", service.started),
    ):
        yield from _one(name, kind, help, value)
    phases = {str(name): seconds for name, seconds in dict(scheduler.spans.seconds).items()}
    phases["prefill"] = totals.prefill_seconds
    positions = {str(place): count for place, count in enumerate(tuple(totals.accepted_at))}
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    yield from _by(name, "counter", "Rounds accepted up to this place and further.", "position", positions)
    yield from _by("phase_seconds_total", "counter", "The engine thread's seconds.", "phase", phases)
    yield from _by("texts_total", "counter", "Texts that ended, by how.", "end", dict(totals.ends))
    refused = {str(status): count for status, count in dict(service.refused).items()}
    yield from _by("requests_refused_total", "counter", "Requests not served, by status.", "status", refused)


def _one(name: str, kind: str, help: str, value: float) -> Iterator[str]:
    yield from _head(name, kind, help)
    yield f"{PREFIX}{name} {value}"


def _by(name: str, kind: str, help: str, label: str, values: Mapping[str, float]) -> Iterator[str]:
    yield from _head(name, kind, help)
    for key, value in values.items():
        yield f'{PREFIX}{name}{{{label}="{key}"}} {value}'


def _head(name: str, kind: str, help: str) -> Iterable[str]:
    return (f"# HELP {PREFIX}{name} {help}", f"# TYPE {PREFIX}{name} {kind}")

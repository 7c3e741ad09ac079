"""What the cases of bench.serving say in words: each phrase that a row has the numbers for."""

from bench.report.columns import Row

_OF_BARE = "{ratio:.3f}x [{ratio_low:.3f}, {ratio_high:.3f}] of the bare session"
_PHRASES = {
    "overhead": (
        "{ms_per_token:.2f} ms a token",
        "{over_step:.3f}x of its engine's step of {step_ms:.2f} ms",
        _OF_BARE,
    ),
    "batch": ("{tok_s:.1f} tok/s", _OF_BARE),
    "intrusion": (
        "between tokens {gap_p50_ms:.0f} ms, p99 {gap_p99_ms:.0f}, at most {max_ms:.0f}",
        "first token of the {prompt} after {intruder_ttft_ms:.0f} ms",
    ),
    "disconnect": (
        "{disconnects} left, {before_first_token} before a token",
        "pages in use after: {kv_usage_after:.2%}",
        "the next has a token after {free_ms:.0f} ms, at most {free_max_ms:.0f}",
        "a step is {step_ms:.0f} ms",
    ),
    "queue full": (
        "{accepted} streams, {refused} more refused",
        "429 in {refusal_ms:.1f} ms, at most {refusal_max_ms:.1f}",
    ),
    "soak": (
        "{requests} requests in {minutes:g} min, {error_count} errors",
        "memory {rss_growth_percent:+.2f} % of {rss_first_mb:.0f} MiB",
        "/health p99 {health_p99_ms:.1f} ms",
    ),
    "kill": (
        "{told} of {streams} streams ended with an error event, the last after {told_ms:.0f} ms",
        "served again after {served_s:.1f} s",
        "the first start took {load_s:.1f} s",
    ),
}


def figures(row: Row) -> str:
    """Return the figures of a case in words; "" of a load, whose columns have them."""
    said = []
    for phrase in _PHRASES.get(row["op"], ()):
        try:
            said.append(phrase.format_map(row))
        except (KeyError, TypeError, ValueError):  # not measured here
            continue
    return "; ".join(said)

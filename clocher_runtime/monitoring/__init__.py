"""Metrics for Prometheus, from the JSON lines of runs. See docs/monitoring."""

from clocher_kernels.errors import UsageError


def require_prometheus_client() -> None:
    """Raise UsageError early if prometheus-client is missing."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise UsageError(
            "metrics are served with prometheus-client, which is not installed; "
            "pip install '.[monitoring]' in a clone of Clocher"
        ) from None

"""Metrics for Prometheus, from the JSON lines of runs. docs/monitoring describes them."""

from clocher_kernels.errors import UsageError


def require_prometheus_client() -> None:
    """Fail, before anything is read, where `exporter` could not be imported; raises UsageError."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise UsageError(
            "metrics are served with prometheus-client, which is not installed; "
            "pip install '.[monitoring]' in a clone of Clocher"
        ) from None

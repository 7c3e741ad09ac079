"""Metrics for Prometheus, from the JSON lines of runs. See docs/monitoring."""

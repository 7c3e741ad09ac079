"""Write the recording rules and the Grafana dashboard from docs/monitoring/metrics_memory.toml."""

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

FOLDER = Path(__file__).parents[1] / "docs" / "monitoring"
SOURCE = "metrics_memory.toml"
RULES = "metrics_memory.rules.yml"
DASHBOARD = "grafana/dashboards/clocher.json"

_NOTE = f"# Written by scripts/render_monitoring.py from {SOURCE}. Edit that file, not this one.\n"
_COLUMNS = 24
_HEIGHTS = {"stat": 5, "table": 5, "timeseries": 8}
_SCHEMA_VERSION = 39  # of Grafana's dashboards


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file is out of date.")
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER, help="Where they are.")
def main(check: bool, folder: Path) -> None:
    """Render both files."""
    source = tomllib.loads((folder / SOURCE).read_text(encoding="utf-8"))
    stale = []
    for name, text in ((RULES, render_rules(source)), (DASHBOARD, render_dashboard(source))):
        path = folder / name
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        click.echo(f"out of date: {', '.join(stale)}; run scripts/render_monitoring.py", err=True)
        sys.exit(1)


def render_rules(source: Mapping[str, Any]) -> str:
    """Return the rules as Prometheus reads them: a JSON string is a YAML string."""
    group = source["group"]
    lines = [_NOTE + "groups:", f"  - name: {json.dumps(group['name'])}"]
    lines += [f"    interval: {group['interval']}", "    rules:"]
    for rule in source["rule"]:
        lines.append(f"      - record: {json.dumps(rule['record'])}")
        lines.append(f"        expr: {json.dumps(rule['expr'])}")
    return "\n".join(lines) + "\n"


def render_dashboard(source: Mapping[str, Any]) -> str:
    """Return the dashboard as Grafana reads it."""
    about = source["dashboard"]
    datasource = {"type": "prometheus", "uid": about["datasource"]}
    panels = []
    x = y = height = 0
    for number, panel in enumerate(source["panel"], start=1):
        if x + panel["width"] > _COLUMNS:
            x, y, height = 0, y + height, 0
        size = {"x": x, "y": y, "w": panel["width"], "h": _HEIGHTS[panel["kind"]]}
        x, height = x + panel["width"], max(height, size["h"])
        panels.append(_panel(panel, number, size, datasource, about["legend"]))
    dashboard = {
        "uid": about["uid"],
        "title": about["title"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": False,
        "refresh": about["refresh"],
        "time": {"from": about["from"], "to": "now"},
        "templating": {"list": [_variable(v, datasource) for v in source["variable"]]},
        "panels": panels,
    }
    return json.dumps(dashboard, indent=2) + "\n"


def _panel(
    panel: Mapping[str, Any],
    number: int,
    size: Mapping[str, int],
    datasource: Mapping[str, str],
    legend: str,
) -> dict[str, Any]:
    table = panel["kind"] == "table"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": datasource,
            "expr": query["expr"],
            "legendFormat": query.get("legend", legend),
            **({"format": "table", "instant": True} if table else {}),
        }
        for index, query in enumerate(panel["queries"])
    ]
    return {
        "id": number,
        "type": panel["kind"],
        "title": panel["title"],
        "description": panel["about"],
        "gridPos": size,
        "datasource": datasource,
        "fieldConfig": {"defaults": {"unit": panel["unit"]}, "overrides": []},
        "targets": targets,
    }


def _variable(variable: Mapping[str, str], datasource: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": variable["name"],
        "type": "query",
        "datasource": datasource,
        "query": {"query": variable["values"], "refId": variable["name"]},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    main()

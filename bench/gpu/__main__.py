"""Run one part of the GPU suite in this process. `python -m bench.gpu_suite` runs them all."""

import contextlib
import gc
import os
import time
from pathlib import Path

import click

from bench.gpu.supervise import LOST, NAMES, NO_DEVICE, die_with_parent, items_of


@click.command(help=__doc__)
@click.argument("part", type=click.Choice(NAMES))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="the part's JSON file")
@click.option("--dry-run", is_flag=True, help="tiny shapes in Triton's interpreter, no speeds")
@click.option("--shard", type=int, default=0, help="do every n-th item, from this one on")
@click.option("--shards", type=int, default=1, help="the n")
@click.option("--only", multiple=True, help="do only the items whose id contains this")
@click.option("--stop-after", type=float, help="seconds after which no item is begun")
def main(
    part: str,
    out: Path,
    dry_run: bool,
    shard: int,
    shards: int,
    only: tuple[str, ...],
    stop_after: float | None,
) -> None:
    """Run the items that the file does not list as done."""
    die_with_parent()  # what nobody waits for would disturb the next run on the GPU
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    from bench.gpu.record import Record
    from bench.gpu.setting import is_lost, make_setting, run_item
    from clocher_kernels.cuda.timer import reason

    began = time.monotonic()
    record = Record(part, shard, dry_run)
    if out.exists():
        record = Record.load(out)
    record.save(out)
    items = [
        item
        for index, item in enumerate(items_of(part, dry_run))
        if index % shards == shard and (not only or any(text in item.id for text in only))
    ]
    try:
        setting = make_setting(dry_run)
    except Exception as error:
        record.add("device", [{"status": "not measured", "reason": reason(error)}])
        record.save(out)
        raise SystemExit(NO_DEVICE) from None
    for item in items:
        if item.id in record.done:
            continue
        if stop_after is not None and time.monotonic() - began > stop_after:
            return
        record.running = item.id
        record.save(out)
        rows = run_item(setting, item)
        for row in rows:
            if row["status"] in ("failed", "refused"):
                click.echo(f"{item.id}: {row['status']}: {row.get('reason', '')}", err=True)
        lost = is_lost(setting)
        record.add(item.id, rows)
        record.save(out)
        if lost:
            os._exit(LOST)  # tearing down a broken context may hang
        _release(dry_run)
    record.finished = True
    record.save(out)


def _release(dry: bool) -> None:
    """Give an item's memory back before the next one asks for its own."""
    import torch

    gc.collect()
    if not dry:
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Find the tiles of the GEMV kernels for this GPU, offline, and write them as a JSON table.

    python -m bench.tune --out sm_90.json

Times each weight of the published models, as `clocher-run --tune` does those of one model; see
clocher_kernels/cuda/tune.py. CLOCHER_TILE_TABLE=FILE makes kernels follow the table.
"""

import os
from pathlib import Path

import click

from bench.gpu.record import write_json
from bench.gpu.shapes import matrices


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="the JSON table")
@click.option("--only", multiple=True, help="only weights whose key contains this")
@click.option("--dry-run", is_flag=True, help="no GPU: tiny shapes, the table means nothing")
def main(out: Path, only: tuple[str, ...], dry_run: bool) -> None:
    """Tune every weight and write the table after each."""
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    from bench.gpu.machine import state
    from bench.gpu.setting import make_setting
    from clocher_kernels.cuda.tile_tables import key_of, users_table_aside
    from clocher_kernels.cuda.tune import add, new_table

    setting = make_setting(dry_run)
    table = new_table(setting) | {"measured_on": state()}
    weights = [(name, m.n, m.k) for m in matrices(dry_run) for name in m.formats]
    with users_table_aside():
        for weight in weights:
            key = key_of(*weight)
            if not only or any(text in key for text in only):
                click.echo(f"{key}: {add(table, setting, weight)}", err=True)
                write_json(out, table)


if __name__ == "__main__":
    main()

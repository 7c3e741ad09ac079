"""What users take of a machine's memory, by the engine's own account of it.

    python -m bench.scale.sizes [--context 4096] [--gib 64]

Weights are counted as they are stored. A user's are the bytes of keys and values that one more of
many sequences takes, each of so many tokens. Nothing is measured.
"""

from collections.abc import Iterator

import click

from bench.ops.experiment import Row, experiment
from clocher_runtime.convert.synthetic import PRESETS, Precision, stored_config
from clocher_runtime.engine.footprint import PROGRAM_BYTES, kv_cache_bytes, sizes_of
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import inventory

_MODELS = {"llama-1b": "int4", "llama-8b": "int4", "bitnet-2b": "native", "gpt-oss-20b": "native"}
_MANY = 64


@experiment(
    "scale.sizes",
    __doc__,
    "model | weights MB | context | MB a user | users a machine",
    "{model} {precision} | {weight_mb:.0f} | {context} | {user_mb:.1f} | {users}",
    title="a machine of {gib:g} GiB",
)
@click.option("--context", type=click.IntRange(1), default=4096, show_default=True)
@click.option("--gib", type=click.FloatRange(0, min_open=True), default=64.0, show_default=True)
def main(context: int, gib: float) -> Iterator[Row]:
    """Yield a row for each model."""
    for name, linears in _MODELS.items():
        precision = Precision(linears)
        spec = spec_from_config(stored_config(name, precision, None))
        formats, needs = precision.formats(spec), inventory(spec)
        held = min(context, spec.max_positions)
        weights = sum(fmt.nbytes(needs[key].shape) for key, fmt in formats.items())
        many, more = (
            kv_cache_bytes(spec, sizes_of(spec, "cpu", batch=batch, context=held))
            for batch in (_MANY, _MANY + 1)
        )
        user = more - many
        left = int(gib * (1 << 30)) - weights - PROGRAM_BYTES
        yield {
            "op": "sizes",
            "model": name,
            "precision": linears,
            "preset": PRESETS[name].summary,
            "context": held,
            "gib": gib,
            "weight_mb": weights / 1e6,
            "user_mb": user / 1e6,
            "users": max(0, left // user),
        }


if __name__ == "__main__":
    main()

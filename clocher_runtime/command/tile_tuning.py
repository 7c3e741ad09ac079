"""The job of `clocher-run --tune`: the fastest tiles of GPU kernels for one model, as a table."""

import json
from collections.abc import Iterator
from pathlib import Path

from clocher_kernels.errors import UsageError
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.command.console import Console
from clocher_runtime.command.jsonline import TuneLine, clocher_version
from clocher_runtime.command.model_choice import choose_model
from clocher_runtime.command.settings import RunConfig
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.engine import backends
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.models.build import Sizes, build_plan


def tune(config: RunConfig, console: Console) -> TuneLine:
    """Time tiles on the weights of the model of a run, and write the table.

    The table goes to CLOCHER_TILE_TABLE, else to tiles-sm_NN.json in the current directory.

    Raises:
        UsageError: the run asks for a device without tiles, or the table cannot be written.
        DeviceError: there is no GPU.
        ModelError: the model is missing, invalid or not supported.
    """
    if config.device not in ("auto", "cuda"):
        raise UsageError(f"--tune is for GPUs, but the device is {config.device}; drop one")
    backends.require_gpu("--tune")
    choice = choose_model(config)
    model = load_model(choice.open_for(config)[0], config.precision)
    weights = sorted(set(products(model)))

    def progress(done: int, total: int) -> None:
        console.note(f"tuned {done} of {total} weights")

    table = backends.tune_tiles(weights, progress)
    path = config.tile_table or Path(f"tiles-sm_{table['capability']}.json")
    try:
        write_file(path, f"{json.dumps(table, indent=1)}\n".encode())
    except OSError as error:
        raise UsageError(f"cannot write the table of tiles: {error}") from None
    faster = len(table["tiles"])
    console.note(
        f"{faster} of {len(weights)} weights have a faster tile; CLOCHER_TILE_TABLE={path} makes "
        "runs use them"
    )
    return TuneLine(
        version=clocher_version(),
        gpu=backends.gpu(),
        model=choice.name,
        model_source=choice.source,
        precision=model.precision,
        weights=len(weights),
        faster=faster,
        table=str(path),
    )


def products(model: Model) -> Iterator[tuple[str, int, int]]:
    """Yield format, N and K of each weight of a model that GEMV kernels multiply by."""
    plan = build_plan(model.spec, model.formats, Sizes(tokens=1, rows=1, slots=1, context=1))
    for call in plan.calls:
        if call.op == "linear":
            weight = model.weights[call.args["w"]]
            assert isinstance(weight, QuantTensor)
            yield weight.format.name, weight.shape[0], weight.shape[1]

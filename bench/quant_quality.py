"""Quality of the quantisation methods on a model: KL divergence, perplexity, same top token.

Every linear of the blocks is quantised by every method in every int4 format, experts included (of a
gpt-oss model they are decoded from MXFP4 first); embedding, head and router stay. Then bits are
allocated to target sizes. Each result is compared with the float model on held-out text, with fp32
activations, so only the weights differ. Below each table: the change of the divergence.

    python -m bench.quant_quality --calib tests/data/calib.txt --text tests/data/valid.txt
    python -m bench.quant_quality --calib calib.txt --text held_out.txt --target 4.5 --group 128
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from rich.console import Console

from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.script_run import reporting
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.convert.q4.map import parse_q4_map
from clocher_runtime.convert.q4.parts import PartsWriter
from clocher_runtime.convert.rounding import round_tensor
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.engine.load import load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.topology import default_threads
from clocher_runtime.quality.compare import Documents, Summary, compare, cut, summarise
from clocher_runtime.quality.report import Row, table
from clocher_runtime.quantize.alloc import allocate, allocation_table
from clocher_runtime.quantize.calibrate import calibrate
from clocher_runtime.quantize.plan import QuantPlan, build_plan
from clocher_runtime.text.tokenizer import Tokenizer

METHODS = ("rtn", "imx", "gptq")
GROUPS = (128, 64, 32)
UNIFORM = {4.25: (64, False), 4.375: (64, True), 4.5: (32, False)}
"""Sizes at which a uniform int4 format exists: group and whether it is affine."""


class Bench:
    """A model, its float logits on the held-out text, and the calibration text."""

    def __init__(self, checkpoint: Checkpoint, options: dict[str, Any]) -> None:
        self.checkpoint, self.threads = checkpoint, default_threads()
        self.window = int(options["window"])
        tokenizer = Tokenizer(checkpoint.tokenizer_json, checkpoint.tokenizer_config)
        ids = tokenizer.encode(options["calib"].read_text(encoding="utf-8"))
        count = min(len(ids) // self.window, options["samples"])
        self.sequences = [ids[i * self.window : (i + 1) * self.window] for i in range(count)]
        text = options["text"].read_text(encoding="utf-8")[: options["chars"]]
        self.documents: Documents = cut(text, tokenizer.encode, self.window)
        self.reference = self._with_session(checkpoint, self._all_logits)

    def plan(self, method: str, group: int, affine: bool) -> QuantPlan:
        """Return the plan that quantises every linear of the blocks."""
        rule = {
            "pattern": ".*(_proj|_proj\\.weight)",
            "dtype": "int4w",
            "group": group,
            "method": method,
            "zero": "per-group" if affine else "per-tensor",
        }
        rules = {"version": 1, "rules": [rule], "requantize": True}
        return build_plan(self.checkpoint, parse_q4_map(rules, Path("rules")))

    def measure(self, plan: QuantPlan) -> Summary:
        """Quantise as planned and compare with the float model."""
        with TemporaryDirectory() as folder:
            parts = PartsWriter(Path(folder), "bench")
            if plan.calibrated:
                calibrate(self.checkpoint, plan, self.sequences, parts=parts, threads=self.threads)
            tensors: dict[str, Any] = dict(self.checkpoint.tensors)
            for name, planned in plan.tensors.items():
                tensors[name] = self._quantised(plan, parts, name, planned.method)
            quantised = dataclasses.replace(self.checkpoint, tensors=tensors, hashes={})
            return self._with_session(quantised, self._compare)

    def allocate(self, method: str, target: float) -> tuple[QuantPlan, dict[str, Any]]:
        """Allocate bits to a size."""
        plan = self.plan(method, 128, False)
        return allocate(
            self.checkpoint, plan, self.sequences, target_bpw=target, threads=self.threads
        )

    def _quantised(
        self, plan: QuantPlan, parts: PartsWriter, name: str, method: str
    ) -> QuantTensor:
        if method != "rtn":
            return parts.tensor(name)
        fmt = plan.tensors[name].format
        return round_tensor(self.checkpoint.tensor(name), fmt, threads=self.threads)

    def _with_session(self, checkpoint: Checkpoint, work: Callable[[Session], Any]) -> Any:
        session = Session(
            load_model(checkpoint),
            EngineConfig(
                threads=self.threads,
                context=self.window,
                chunk=self.window,
                kv_dtype="f32",
                act_prec="fp32",
                all_logits=True,
                speculate="off",
            ),
        )
        try:
            return work(session)
        finally:
            session.close()

    def _all_logits(self, session: Session) -> dict[tuple[int, ...], np.ndarray]:
        return {ids: session.logits(ids).copy() for ids in self.documents.windows}

    def _compare(self, session: Session) -> Summary:
        known = self.reference
        return summarise(compare(lambda ids: known[tuple(ids)], session.logits, self.documents))


@click.command(help=__doc__, context_settings={"max_content_width": 100})
@click.option("--model", type=click.Path(path_type=Path), help="default: the embedded model")
@click.option("--calib", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--text", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--chars", type=click.IntRange(1), default=90_000, show_default=True)
@click.option("--window", type=click.IntRange(2), default=256, show_default=True)
@click.option("--samples", type=click.IntRange(2), default=128, show_default=True)
@click.option("--group", "groups", type=int, multiple=True, default=GROUPS, show_default=True)
@click.option("--method", "methods", multiple=True, default=METHODS, show_default=True)
@click.option(
    "--target",
    "targets",
    type=click.Choice([str(size) for size in UNIFORM]),
    multiple=True,
    default=tuple(str(size) for size in UNIFORM),
    show_default=True,
)
@click.option("--allocate-method", type=click.Choice(METHODS), default="gptq", show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="write all numbers")
def main(model: Path | None, json_path: Path | None, **options: Any) -> None:
    """Measure and print."""
    with reporting("quant_quality") as report:
        checkpoint = open_checkpoint(model or embedded_model())
        bench = Bench(checkpoint, options)
        console = Console(soft_wrap=True, highlight=False)
        rows: dict[str, tuple[Row, Summary]] = {}
        report.note(
            f"{len(bench.sequences)} calibration sequences of {bench.window} tokens; "
            f"{bench.documents.tokens} tokens of {bench.documents.count} documents are scored"
        )

        def add(label: str, plan: QuantPlan) -> Summary:
            if label not in rows:
                found = bench.measure(plan)
                rows[label] = _row(label, plan, found), found
                report.note(f"{label}: KLD {found.kld.value:.6f}")
            return rows[label][1]

        for group in options["groups"]:
            for affine in (False, True):
                for method in options["methods"]:
                    add(_label(method, group, affine), bench.plan(method, group, affine))
        changes = [
            _change(rows, method, group) for group in options["groups"] for method in METHODS
        ]
        method, tables = options["allocate_method"], []
        for target in options["targets"]:
            group, affine = UNIFORM[float(target)]
            label = _label(method, group, affine)
            uniform = add(label, bench.plan(method, group, affine)).kld.value
            plan, record = bench.allocate(method, float(target))
            tables += allocation_table(record)
            mixed = add(f"{method} {target} bpw allocated", plan).kld.value
            changes.append(
                f"{target} bpw: KLD {100 * (mixed / uniform - 1):+.0f} % against {label}"
            )
        console.print("\n".join(tables))
        console.print(table([row for row, _ in rows.values()]))
        console.print("\n".join(change for change in changes if change))
        if json_path:
            numbers = {label: dataclasses.asdict(found) for label, (_, found) in rows.items()}
            write_file(json_path, f"{json.dumps(numbers, indent=1)}\n".encode())


def _label(method: str, group: int, affine: bool) -> str:
    return f"{method} {'affine' if affine else 'sym'} g{group}"


def _row(label: str, plan: QuantPlan, found: Summary) -> Row:
    nbytes = sum(tensor.nbytes for tensor in plan.tensors.values())
    return Row(
        label,
        plan.quantised_bpw,
        nbytes,
        found.perplexity,
        found.ppl_ratio,
        found.kld,
        found.same_top,
        found.rms_dp,
    )


def _change(rows: dict[str, tuple[Row, Summary]], method: str, group: int) -> str:
    one, base = _label(method, group, False), _label("rtn", group, False)
    if method == "rtn" or one not in rows or base not in rows:
        return ""
    ratio = rows[one][1].kld.value / rows[base][1].kld.value
    return f"{one}: KLD {100 * (ratio - 1):+.0f} % against {base}"


if __name__ == "__main__":
    main()

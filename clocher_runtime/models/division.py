"""Tensor parallelism: a Plan rewritten for one of several ranks, and the weights that it has.

Heads, hidden layers and vocabulary are divided. What is computed from all of the residual stream
needs the rows of a weight that make a rank's part (columns of the result); what is computed from a
part needs the columns that meet it, and its sums are added up among the ranks.

A buffer of the Plan has up to three forms, and a call takes the one that it needs; the rewrite
makes it where the last call left another:

    whole    all of it, the same bits on every rank
    own      the columns that are a rank's (`NAME.own`)
    partial  all of it, of which the sum over ranks is meant

    own -> whole: all_gather    partial -> whole: all_reduce    whole -> own: own_columns

A sum over ranks is rounded in another order than one rank's. Where activations are quantised, that
could move a code, and then the logits by more than rounding does; so nothing is added up there.
What is wanted of all columns is gathered, each rank makes its own rows of the result, and the
logits have the bits of one rank. A norm of all columns is computed so in any case.

Hidden layers are cut between the groups of columns that share a scale of a weight. Where a hidden
layer of experts has too few groups for that, each rank has some experts whole.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Literal

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats.base import Format
from clocher_kernels.ops import OPS, written
from clocher_kernels.ops.collectives import part
from clocher_kernels.ops.contract import Value
from clocher_kernels.plan import Buffer, Call, Plan
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.models.inventory import EMBED, HEAD
from clocher_runtime.models.spec import ModelSpec

OWN = ".own"
_UNEVEN = 1.25
"""The largest part of a hidden layer over an even one, at most; else its product is gathered."""
_ROWS = 4
"""Rows of the stream that a rank makes come in multiples of it, as ternary weights are packed."""
_PRODUCTS = ("linear", "bsr_linear")
_INNER = {
    "inner": ("mlp.up_proj", "mlp.gate_proj", "mlp.down_proj"),
    "shared": ("shared_expert.up_proj", "shared_expert.gate_proj", "shared_expert.down_proj"),
    "gated": ("experts.gate_up_proj", "experts.down_proj"),
}
"""Hidden layers -> how the names of their weights end, the one that multiplies them last."""

Form = Literal["whole", "own", "partial"]


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a weight that a rank has.

    Attributes:
        source: the weight's name in the model.
        axis: -2 for rows, -1 for columns, 0 for experts; of vectors -1.
        start: the first index.
        stop: the index behind the last.
    """

    source: str
    axis: int
    start: int
    stop: int


@dataclass(slots=True)
class Division:
    """What one rank does of a model.

    Args:
        spec: the model.
        formats: of its matrices, by name.
        rank: its number, from 0.
        count: of the ranks.
        adds: whether what ranks have may be added up; not where activations are quantised.

    Attributes:
        cuts: of the weights of its Plan, by their names there; others are whole. From `divide`.
    """

    spec: ModelSpec
    formats: Mapping[str, Format]
    rank: int
    count: int
    adds: bool = True
    cuts: dict[str, Cut] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        shares = self.count % spec.num_kv_heads == 0 and spec.num_heads >= self.count
        if spec.num_kv_heads < self.count and not shares:
            raise UsageError(
                f"tensor parallel over {self.count} ranks: the model has {spec.num_heads} heads of "
                f"queries and {spec.num_kv_heads} of keys, which cannot be divided among them; "
                "use fewer ranks"
            )
        if spec.tied:  # the embedding is looked up whole, and its rows as the head are cut
            self.formats = {**self.formats, HEAD: self.formats[EMBED]}

    def divide(self, plan: Plan) -> Plan:
        """Return the Plan of the rank."""
        self.cuts = {}
        return _Rewrite(self, plan).run()

    def part_of(self, weights: Mapping[str, Value], name: str) -> Value:
        """Return a weight of the Plan, from those of the model."""
        if name not in self.cuts:
            return weights[name]
        cut = self.cuts[name]
        whole = weights[cut.source]
        if isinstance(whole, QuantTensor):
            return whole.cut(cut.axis, cut.start, cut.stop)
        return np.ascontiguousarray(np.take(whole, range(cut.start, cut.stop), cut.axis))


@dataclass(frozen=True, slots=True)
class _Span:
    """How the columns of a buffer are divided: into parts of whole units, as `part` does it.

    Attributes:
        is_shared: there are fewer units than ranks, of which several have the same one.
    """

    total: int
    unit: int
    is_shared: bool = False

    def run(self, rank: int, count: int) -> tuple[int, int]:
        """Return the columns of a rank."""
        if self.is_shared:
            start = self.total // self.unit * rank // count * self.unit
            return start, start + self.unit
        return part(self.total, self.unit, rank, count)


class _Rewrite:
    """Walks the calls of a Plan once."""

    def __init__(self, division: Division, plan: Plan) -> None:
        self.of, self.plan, self.spec = division, plan, division.spec
        self.heads = _Span(self.spec.num_heads, 1)
        self.kv_heads = _Span(self.spec.num_kv_heads, 1, is_shared=True)
        if self.spec.num_kv_heads >= division.count:
            self.heads = _Span(self.spec.num_heads, self.spec.num_heads // self.spec.num_kv_heads)
            self.kv_heads = _Span(self.spec.num_kv_heads, 1)
        self.by_experts = False
        self.spans = self._spans()
        self.buffers = dict(plan.buffers)
        self.forms: dict[str, Form] = {}
        self.calls: list[Call] = []

    def run(self) -> Plan:
        for call in self.plan.calls:
            if call.op in _PRODUCTS:
                self._product(call)
            elif call.op == "moe_gate_up":
                self._gate_up(call)
            elif call.op == "moe_down":
                self._down(call)
            elif call.op == "rms_norm" and self._is_of_rows(call):
                self._emit(call, dict.fromkeys(("x", "y", "residual"), "whole"))
            else:
                self._usual(call)
        used = {name for call in self.calls for name in call.args.values()}
        buffers = {n: b for n, b in self.buffers.items() if n in used or b.role != "scratch"}
        known = dict.fromkeys((*self.plan.weights, *self.of.cuts))
        weights = tuple(name for name in known if name in used)
        return replace(self.plan, buffers=buffers, calls=tuple(self.calls), weights=weights)

    def _spans(self) -> dict[str, _Span]:
        """Return how buffers are divided that ranks have a part of."""
        widths = {name: buffer.shape[-1] for name, buffer in self.plan.buffers.items()}
        found: dict[str, _Span] = {}
        for name in ("q", "k", "v", "attended", "values", "v_latent", "k_plain"):
            if name in widths:
                heads = self.kv_heads if name in ("k", "v") else self.heads
                each = widths[name] // heads.total
                found[name] = _Span(widths[name], heads.unit * each, heads.is_shared)
        for name in _INNER.keys() & widths.keys():
            found[name] = _Span(widths[name], self._inner_unit(name, widths[name]))
        return found

    def _inner_unit(self, name: str, total: int) -> int:
        """Return the unit of a hidden layer: one that no product has to gather, if it is fine.

        If none is for that of experts, ranks have whole experts, as long as there are enough.
        """
        rows = columns = 1
        for weight, fmt in self.of.formats.items():
            stem = weight.removesuffix(".weight")
            if stem.endswith(_INNER[name][-1]):
                columns = lcm(columns, fmt.unit[1])
            elif stem.endswith(_INNER[name]):
                rows = lcm(rows, fmt.unit[0])
        both = lcm(rows, columns)
        if not self.of.adds:
            return rows
        units = -(-total // both)
        share = both * -(-units // self.of.count)
        fits = units >= self.of.count and share <= _UNEVEN * total / self.of.count
        moe = self.spec.moe
        if name == "gated" and not fits and moe is not None:
            self.by_experts = moe.experts >= self.of.count
        return both if fits else rows

    def _span(self, name: str) -> _Span:
        """Return how any buffer would be divided."""
        if name in self.spans:
            return self.spans[name]
        return _Span(self.plan.buffers[name].shape[-1], lcm(_ROWS, self._rows_unit()))

    def _rows_unit(self) -> int:
        return lcm(*(fmt.unit[0] for fmt in self.of.formats.values()))

    def _range(self, span: _Span) -> tuple[int, int]:
        """Return the rank's columns.

        Raises:
            UsageError: there are fewer units than ranks.
        """
        if -(-span.total // span.unit) < self.of.count and not span.is_shared:
            raise UsageError(
                f"tensor parallel over {self.of.count} ranks: {span.total} columns in pieces of "
                f"{span.unit} cannot be divided among them; use fewer ranks"
            )
        return span.run(self.of.rank, self.of.count)

    def _is_of_rows(self, call: Call) -> bool:
        """Return whether a norm is of all columns of a buffer, not of each head."""
        return call.args["x"] not in ("q", "k") or self.spec.qk_norm == "rows"

    def _usual(self, call: Call) -> None:
        """Emit a call that takes each buffer as ranks have it: their part, or all."""
        attrs = dict(call.attrs)
        if call.op in ("join_heads", "resize_heads"):
            start, stop = self._range(self.heads)
            attrs["heads"] = stop - start
        self._emit(Call(call.op, call.args, attrs), {})
        for param, name in call.args.items():
            kept = self.plan.buffers.get(name)
            if kept is None:
                self._cut_heads(param, name)
            elif kept.role == "state" or name == "listed":
                self._shrink(name, kept)

    def _cut_heads(self, param: str, name: str) -> None:
        """Note the part of a vector that has a value for each head."""
        if param == "sinks":
            self.of.cuts[name] = Cut(name, -1, *self._range(self.heads))

    def _shrink(self, name: str, buffer: Buffer) -> None:
        """Give a buffer that has a row for each head of keys those of the rank."""
        start, stop = self._range(self.kv_heads)
        first, _, *rest = buffer.shape
        self.buffers[name] = replace(buffer, shape=(first, stop - start, *rest))

    def _product(self, call: Call) -> None:
        """Emit a linear: of all columns, of a rank's columns, or a rank's rows of it."""
        args, fmt = dict(call.args), self.of.formats[call.args["w"]]
        x, y = args["x"], args["y"]
        if x.removesuffix(".normed") in self.spans and y not in self.spans:
            if self._sums_up(x, fmt):
                self._partial(call, x)
            else:
                self._rows(call, y)
        elif (y in self.spans and not self._is_normed_whole(y)) or y == "logits":
            self._rows(call, y)
        else:
            self._emit(call, dict.fromkeys(args, "whole"))

    def _is_normed_whole(self, y: str) -> bool:
        """Return whether a norm needs all of what several ranks would have the same part of."""
        return self.spans[y].is_shared and y == "k" and self.spec.qk_norm == "rows"

    def _sums_up(self, x: str, fmt: Format) -> bool:
        """Return whether the ranks' columns of a product may be computed apart."""
        if not self.of.adds or self.forms.get(x) != "own":
            return False
        starts = (self.spans[x].run(rank, self.of.count)[0] for rank in range(self.of.count))
        return all(start % fmt.unit[1] == 0 for start in starts)

    def _partial(self, call: Call, x: str) -> None:
        """Emit a product of own columns; bias and residual are added by the first rank."""
        args = dict(call.args)
        args["w"] = self._cut(args["w"], -1, self._range(self.spans[x]))
        forms: dict[str, Form] = {"x": "own", "y": "partial"}
        self._once(args, forms)
        self._emit(Call(call.op, args, call.attrs), forms)

    def _once(self, args: dict[str, str], forms: dict[str, Form]) -> None:
        """Let the first rank alone add what is to be added once: bias, and a residual of all."""
        if self.of.rank:
            args.pop("bias", None)
        residual = args.get("residual", "")
        if not residual:
            return
        if self.forms.get(residual) == "own":  # of all ranks, so that they stay in step
            self._bring(residual, "whole")
        forms["residual"] = self.forms.get(residual, "whole")
        if self.of.rank and forms["residual"] == "whole":
            del args["residual"]

    def _rows(self, call: Call, y: str) -> None:
        """Emit a product that makes a rank's columns of its result from all of its input."""
        args, rows = dict(call.args), self._range(self._span(y))
        args["w"] = self._cut(args["w"], -2, rows)
        if "bias" in args:
            args["bias"] = self._cut(args["bias"], -1, rows)
        forms: dict[str, Form] = {"x": "whole", "y": "own"}
        forms |= {p: "own" for p in ("times", "residual") if args.get(p) == y}
        self._emit(Call(call.op, args, call.attrs), forms)

    def _gate_up(self, call: Call) -> None:
        """Emit the first product of experts: of a rank's experts, or its part of all of them."""
        args = dict(call.args)
        forms: dict[str, Form] = {"x": "whole", "ids": "whole", "factors": "whole"}
        if self.by_experts:
            experts = self._own_experts(call, args.get("factors", "expert_weights"))
            for param in ("w", "bias"):
                if param in args:
                    args[param] = self._cut(args[param], 0, experts)
            args["ids"] += OWN
            if "factors" in args:
                args["factors"] += OWN
            self._emit(Call(call.op, args, call.attrs), {**forms, "y": "whole"})
            return
        start, stop = self._range(self.spans["gated"])
        rows = 2 * start, 2 * stop  # gates and ups stand in turns
        args["w"] = self._cut(args["w"], -2, rows)
        if "bias" in args:
            args["bias"] = self._cut(args["bias"], -1, rows)
        self._emit(Call(call.op, args, call.attrs), {**forms, "y": "own"})

    def _own_experts(self, call: Call, weights: str) -> tuple[int, int]:
        """Emit the renaming of experts; return the run of them that is the rank's."""
        assert self.spec.moe is not None
        first, last = part(self.spec.moe.experts, 1, self.of.rank, self.of.count)
        ids = call.args["ids"]
        args = {"ids": ids, "weights": weights}
        for param, name in list(args.items()):
            args[f"own_{param}"] = f"{name}{OWN}"
            self.buffers[f"{name}{OWN}"] = self.plan.buffers[name]
        attrs = {"first": first, "count": last - first}
        self.calls.append(Call("own_experts", args, attrs))
        return first, last

    def _down(self, call: Call) -> None:
        """Emit the second product of experts, of which the sum over ranks is meant."""
        args = dict(call.args)
        forms: dict[str, Form] = {"x": "own", "y": "partial", "ids": "whole", "weights": "whole"}
        if self.by_experts:
            assert self.spec.moe is not None
            experts = part(self.spec.moe.experts, 1, self.of.rank, self.of.count)
            for param in ("w", "bias"):
                if param in args:
                    args[param] = self._cut(args[param], 0, experts)
            args["ids"] += OWN
            if "weights" in args:
                args["weights"] += OWN
            forms["x"] = "whole"
        elif self._sums_up("gated", self.of.formats[args["w"]]):
            args["w"] = self._cut(args["w"], -1, self._range(self.spans["gated"]))
        else:
            rows = self._range(self._span(args["y"]))
            args["w"] = self._cut(args["w"], -2, rows)
            if "bias" in args:
                args["bias"] = self._cut(args["bias"], -1, rows)
            self._emit(
                Call(call.op, args, call.attrs),
                {**forms, "x": "whole", "y": "own", "residual": "own"},
            )
            return
        bias = args.get("bias", "")
        self._once(args, forms)
        if bias and self.by_experts:  # of its own experts each rank adds it
            args["bias"] = bias
        self._emit(Call(call.op, args, call.attrs), forms)

    def _cut(self, name: str, axis: int, run: tuple[int, int]) -> str:
        """Note the part of a weight that is used; return its name in the Plan."""
        own = HEAD if name == EMBED and self.spec.tied else name
        self.of.cuts[own] = Cut(name, axis, *run)
        return own

    def _emit(self, call: Call, forms: Mapping[str, Form]) -> None:
        """Append a call whose buffers have the forms that it wants; by default, ranks' own."""
        args = dict(call.args)
        writes = written(call)
        for param in OPS[call.op].params:
            name = args.get(param.name, "")
            if name not in self.plan.buffers:
                continue
            form = forms.get(param.name, "own" if name in self.spans else "whole")
            if param.kind != "out":
                self._bring(name, form)
            args[param.name] = self._named(name, form)
        self.calls.append(Call(call.op, args, call.attrs))
        for param in OPS[call.op].params:
            name = call.args.get(param.name, "")
            if name in self.plan.buffers and name in writes and param.kind != "in":
                self.forms[name] = forms.get(param.name, "own" if name in self.spans else "whole")

    def _bring(self, name: str, form: Form) -> None:
        """Emit what gives a buffer the form that a call reads."""
        there = self.forms.get(name, "whole" if name not in self.spans else "own")
        if there == form:
            return
        if there == "partial":
            self.calls.append(Call("all_reduce", {"x": name}))
            there = self.forms[name] = "whole"
        own, span = self._named(name, "own"), self._span(name)
        if there == "own" and form == "whole":
            args = {"x": own, "y": name}
            self.calls.append(Call("all_gather", args, {"unit": span.unit}))
        elif there == "whole" and form == "own":
            start, _ = self._range(span)
            self.calls.append(Call("own_columns", {"x": name, "y": own}, {"start": start}))
        self.forms[name] = form

    def _named(self, name: str, form: Form) -> str:
        """Return the name of a form of a buffer; declare it."""
        if form != "own":
            return name
        start, stop = self._range(self._span(name))
        known = self.plan.buffers[name]
        shape = (*known.shape[:-1], stop - start)
        self.buffers[f"{name}{OWN}"] = Buffer(shape, known.dtype, known.rows)
        return f"{name}{OWN}"

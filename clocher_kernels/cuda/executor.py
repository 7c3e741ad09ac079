"""The CUDA executor: bind a Plan once, then replay one CUDA graph per step."""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clocher_kernels.cuda import attention, bsr, elementwise, kv, linear, moe, sampling
from clocher_kernels.cuda.fused import FUSED, stacked
from clocher_kernels.cuda.launch import Device, Launch, current_device
from clocher_kernels.cuda.prepack import DeviceTensor, as_torch
from clocher_kernels.cuda.raw_module import DeviceWorkTouch
from clocher_kernels.cuda.step import (
    InputBlock,
    Progress,
    Weight,
    activation_types,
    allocate,
    bucket,
    buffer_bytes,
    capture,
    check_memory,
    compile_side_by_side,
    context_buckets,
    host_bytes,
    place,
    row_buckets,
    token_buckets,
)
from clocher_kernels.errors import DeviceError, OutOfMemory, ShapeError, UnsupportedOp
from clocher_kernels.guards import refuse_in_window
from clocher_kernels.ops.rewrite import runs
from clocher_kernels.plan import Call, Executor, Plan

LOWER: dict[str, Callable[..., list[Launch]]] = {
    lower.__name__: lower
    for lower in (
        elementwise.advance,
        attention.attention,
        bsr.bsr_linear,
        elementwise.embed,
        elementwise.fake_quantize,
        elementwise.gather_rows,
        elementwise.hadamard,
        elementwise.join_heads,
        kv.kv_append,
        linear.linear,
        moe.moe_down,
        moe.moe_gate_up,
        kv.page_bounds,
        elementwise.quantize,
        elementwise.rms_norm,
        elementwise.rope,
        moe.route,
        sampling.sample,
        kv.select_pages,
    )
}
"""Op -> function that lowers a call of it to launches."""
LOWER_GREEDY = {**LOWER, "sample": sampling.sample_greedy}
"""The same for steps with only greedy rows."""

Key = tuple[int, int, int]
"""Tokens, output rows and cache cells of a captured step."""
_executors: "weakref.WeakSet[CudaExecutor]" = weakref.WeakSet()


class CudaExecutor(Executor):
    """Execute a Plan as CUDA graphs, one for each bucket of (tokens, output rows, cache cells).

    Positions, tokens and draws advance on the device; the host sends new inputs with `upload` and
    reads results with `fetch`. `weights` has a QuantTensor for each "matrix", an fp32 array for
    each "vector", or the results of `step.place`. `activations` between matmuls are "f16", "bf16"
    or "f32". `fast_batch`: see `Device`. `device` None is the current GPU. `progress` gets (bytes
    copied, total bytes). `beside`: an executor whose stream is shared.

    Raises:
        OutOfMemory: weights and buffers do not fit; nothing stays allocated.
        ShapeError: an array does not fit its op.
        UnsupportedOp: no kernel for an op, or for its format.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, Weight],
        *,
        activations: str = "f16",
        fast_batch: bool = False,
        device: Device | None = None,
        progress: Progress | None = None,
        beside: "CudaExecutor | None" = None,
    ) -> None:
        self.plan = plan
        self.device = current_device() if device is None else device
        if fast_batch:
            self.device = replace(self.device, fast_batch=True)
        self.isa = f"sm_{self.device.capability}" if self.device.capability else "interpreter"
        on_gpu = self.device.torch_device == "cuda"
        if beside is not None:
            self._stream = beside._stream
        else:
            self._stream = torch.cuda.Stream() if on_gpu else None
        self._token_buckets = token_buckets(plan.tokens, plan.rows)
        self._page_cells, cells = _cache_cells(plan)
        self._counters = {c.args["counts"] for c in plan.calls if c.op == "select_pages"}
        self._context_buckets = context_buckets(cells)
        self._graphs: dict[tuple[Key, bool], Callable[[], None]] = {}
        self._lost_to_fork: object = None
        self._no_memory = ""
        self._longest = 0
        self._greedy = True
        self._fresh = False
        self._new: tuple[int | None, int | None] = None, None  # masks and edits to send
        types = activation_types(plan, activations)
        needed = {name: weights[name] for name in plan.weights}
        if on_gpu:
            free, _ = torch.cuda.mem_get_info()
            nodes = 2 * len(self.buckets()) * len(plan.calls)
            check_memory(host_bytes(needed), buffer_bytes(plan, types), nodes, free)
        with self._out_of_memory(), self._on_stream():
            self._inputs = InputBlock(plan, self.device)
            self._values = {
                **allocate(plan, types, self.device),
                **self._inputs.tensors,
                **{
                    name: as_torch(table, "f32").to(self.device.torch_device)
                    for name, table in plan.consts.items()
                },
                **place(needed, self.device, progress),
            }
            self._runs = [
                (run, stacked(run, self._values) if run.kind in FUSED else None)
                for run in runs(plan)
            ]
            self._pinned = {
                name: torch.empty(b.shape, dtype=self._values[name].dtype, pin_memory=on_gpu)
                for name, b in plan.buffers.items()
                if b.role == "output" or name in self._counters
            }
        _executors.add(self)

    def array(self, name: str) -> np.ndarray:
        """Return the host array of an input buffer, at capacity; `upload` sends it."""
        return self._inputs.host[name]

    def upload(self, masks: int | None = None, edits: int | None = None) -> None:
        """Let the next step copy the inputs, the first masks and edits or all; OutOfMemory."""
        self._refuse_lost()
        self._fresh, self._new = True, (masks, edits)

    def upload_tables(self) -> None:
        """Copy the page tables now; the other inputs stay as the last step left them."""
        self._refuse_lost()
        with self._on_stream():
            self._inputs.upload_tables()

    def step(self, tokens: int, rows: int) -> None:
        """Launch a step for `tokens` tokens and `rows` output rows; ShapeError beyond capacity."""
        key = self._key(tokens, rows)
        if key not in self._graphs:
            self._prepare(*key)
        self._graphs[key]()
        self._longest += 1 if rows else 0

    def peek(self, name: str, count: int) -> np.ndarray:
        """Return the current first rows of a buffer, fp32."""
        self.synchronize()
        values: np.ndarray = self._values[name][:count].float().cpu().numpy()
        return values

    def _key(self, tokens: int, rows: int) -> tuple[Key, bool]:
        self._refuse_lost()
        if not (0 < tokens <= self.plan.tokens and 0 <= rows <= self.plan.rows):
            raise ShapeError(
                f"a step of {tokens} tokens and {rows} rows; the Plan has room for "
                f"{self.plan.tokens} and {self.plan.rows}"
            )
        wide = bucket(tokens, self._token_buckets)
        high = bucket(rows, row_buckets(wide, self.plan.rows, self.plan.tokens))
        if self._fresh:
            self._fill_up(tokens, wide, rows, high)
            self._longest = _longest(self._inputs.host, tokens)
            temperature = self._inputs.host.get("temperature")
            self._greedy = temperature is not None and not temperature[:high].any()
            with self._on_stream():
                self._inputs.upload(*self._new)
            self._fresh = False
        cells = bucket(self._longest, self._context_buckets)
        return (wide, high, cells), self._greedy or not rows

    def fetch(
        self, name: str, count: int, meanwhile: Callable[[], None] | None = None
    ) -> np.ndarray:
        """Return the first rows of an output buffer, or of counts; valid until the next fetch.

        It waits for the steps launched so far, but not for one that `meanwhile` launches.
        """
        pinned = self._pinned[name][:count]
        with self._on_stream():
            pinned.copy_(self._values[name][:count], non_blocking=True)
        copied = None if self._stream is None else self._stream.record_event()
        if meanwhile is not None:
            meanwhile()
        if copied is not None:
            copied.synchronize()
        return pinned.numpy()

    def synchronize(self) -> None:
        """Wait until the device has done all steps."""
        if self._stream is not None:
            self._stream.synchronize()

    def warm(self) -> None:
        """Compile every kernel and capture every graph, for temperature 0 and for others."""
        drawn = "temperature" in self._inputs.host
        for key in self.buckets():
            for greedy in (True, False) if key[1] and drawn else (not key[1],):
                if (key, greedy) not in self._graphs:
                    self._prepare(key, greedy)

    def buckets(self) -> list[Key]:
        """Return every bucket that steps are captured for."""
        return [
            (wide, high, cells)
            for wide in self._token_buckets
            for high in row_buckets(wide, self.plan.rows, self.plan.tokens)
            for cells in self._context_buckets
        ]

    def work_touch(self, bytes_per_token: int, stride: int) -> DeviceWorkTouch:
        """Return a work-touch of the weights in device memory, on the steps' stream."""
        planes: list[Tensor] = []
        for name in self.plan.weights:
            value = self._values[name]
            planes += value.planes.values() if isinstance(value, DeviceTensor) else [value]
        with self._on_stream():
            return DeviceWorkTouch(planes, bytes_per_token, stride, self._stream)

    def running(self) -> AbstractContextManager[None]:
        """Return an empty context: a GPU has no threads to keep awake. DeviceError after a fork."""
        self._refuse_lost()
        return nullcontext()

    def close(self) -> None:
        """Free graphs, weights and buffers."""
        if self._lost_to_fork is not None:
            return
        self.synchronize()
        self._graphs.clear()
        self._values.clear()
        self._pinned.clear()

    def lower(self, key: Key, greedy: bool = False) -> list[Launch]:
        """Return the launches of a step; `greedy` needs fewer."""
        table, buffers = LOWER_GREEDY if greedy else LOWER, self.plan.buffers
        made: list[Launch] = []
        for run, whole in self._runs:
            rows_of = [buffers[n].rows for c in run.calls for n in c.args.values() if n in buffers]
            if key[1] == 0 and "R" in rows_of:
                continue
            given = [self._arguments(call, key) for call in run.calls]
            fuse = FUSED.get(run.kind)
            if fuse and (launches := fuse(run, given, whole, self.device)):
                made += launches
                continue
            for call, arguments in zip(run.calls, given, strict=True):
                if call.op not in LOWER:
                    raise UnsupportedOp(
                        f"the CUDA back end has no kernel for {call.op!r}; it has "
                        f"{', '.join(sorted(LOWER))}"
                    )
                made += table[call.op](**arguments, device=self.device)
        return made

    def _arguments(self, call: Call, key: Key) -> dict[str, Any]:
        """Return the arguments of a call, cut to the step, and its attributes."""
        tokens, rows, cells = key
        arguments = {}
        for param, name in call.args.items():
            value, buffer = self._values[name], self.plan.buffers.get(name)
            follows = buffer.rows if buffer else ""
            if follows:
                value = value[: tokens if follows == "M" else rows]
            elif param == "pages":
                value = value[:, : -(-cells // self._page_cells)]
            arguments[param] = value
        return {**arguments, **call.attrs}

    def forsake(self) -> None:
        """Detach a forked child from the device: no step finds a graph there."""
        self._lost_to_fork, self._graphs = self._graphs, {}

    def _refuse_lost(self) -> None:
        if self._no_memory:
            raise OutOfMemory(self._no_memory)
        if self._lost_to_fork is not None:
            raise DeviceError(
                "the model was loaded on a GPU before this process was forked, which CUDA does not "
                "survive; load it here, or start processes with multiprocessing's 'spawn'"
            )

    def _prepare(self, key: Key, greedy: bool) -> None:
        self._refuse_lost()
        refuse_in_window("capture a CUDA graph")
        with self._out_of_memory(), self._on_stream():
            # The launches run once before capture; restore the inputs that they advance.
            stepped = [*self._inputs.tensors, *self._counters]
            kept = {name: self._values[name].clone() for name in stepped}
            launches = self.lower(key, greedy)
            if self._stream is not None:
                compile_side_by_side(launches)
            try:
                self._graphs[key, greedy] = capture(launches, self._stream)
            finally:
                for name, tensor in kept.items():
                    self._values[name].copy_(tensor)

    def _fill_up(self, tokens: int, wide: int, rows: int, high: int) -> None:
        """Fill the step up to its bucket with copies of its last token and row.

        A copied token stores the same values in the same cell. A copied row belongs to a copied
        token while there is one, so that each advances its own token; else the host rewrites all
        inputs afterwards.
        """
        host = self._inputs.host
        for name, array in host.items():
            follows = self.plan.buffers[name].rows
            if follows == "M":
                array[tokens:wide] = array[tokens - 1]
            elif follows == "R" and rows:
                array[rows:high] = array[rows - 1]
        if "rows" in host and rows:
            host["rows"][rows:high] = np.minimum(tokens + np.arange(high - rows), wide - 1)

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)  # does nothing for None

    @contextmanager
    def _out_of_memory(self) -> Iterator[None]:
        """Turn the device's allocation failure into an OutOfMemory with a next step."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._graphs.clear()
            self._values = {}
            torch.cuda.empty_cache()
            self._no_memory = (
                f"the GPU ran out of memory: {str(error).splitlines()[0]}; lower --context or "
                "--batch, or choose a smaller --kv-dtype"
            )
            raise OutOfMemory(self._no_memory) from None


def _forked() -> None:
    for executor in list(_executors):
        executor.forsake()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _cache_cells(plan: Plan) -> tuple[int, int]:
    """Return the cells of a page and of a sequence; (1, 1) without a cache."""
    for call in plan.calls:
        if "pages" in call.args:
            page = call.attrs.get("cells") or plan.buffers[call.args["k_cache"]].shape[2]
            return page, page * plan.buffers[call.args["pages"]].shape[1]
    return 1, 1


def _longest(inputs: Mapping[str, np.ndarray], tokens: int) -> int:
    """Return the most cells that one of the step's tokens may read."""
    if "ends" not in inputs:
        return 1
    # A tree node sees its own cell last, as far beyond the end as its highest bit.
    return int(inputs["ends"][:tokens].max()) + int(inputs["ancestors"][:tokens].max()).bit_length()

"""Walk a model over calibration text, layer by layer, showing every linear's input.

Calls of the model's Plan run with the ops' references, but matmuls use fp32 BLAS, attention takes a
whole sequence and experts are visited one after another. One decoded matrix is in memory; hidden
states live in an unnamed temporary file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Float, Format, parse_format
from clocher_kernels.ops import OPS, of_experts
from clocher_kernels.ops.contract import has_codes
from clocher_kernels.ops.linear import finish
from clocher_kernels.plan import Call, Plan
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.engine.load import head_as_stored
from clocher_runtime.models.build import Sizes, build_plan
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import Need, inventory, layer_name
from clocher_runtime.quantize.inputs import (
    ExpertInputs,
    Observer,
    RowStore,
    Site,
    Text,
    causal_attention,
    clamped_swiglu,
    expert_matrix,
    look_up_rows,
    multiplies,
    sites_of,
    source_of,
)

CHUNK_TOKENS = 2048
"""Tokens per chunk; longer sequences are a chunk of their own."""

_LOGITS = 1 << 26
_HEAD_ROWS = 1 << 14


@dataclass(slots=True)
class _Chunk:
    """Consecutive sequences computed together; buffers by name."""

    rows: slice
    lengths: tuple[int, ...]
    buffers: dict[str, np.ndarray] = field(default_factory=dict)


class Walk:
    """A float forward pass over sequences, advanced layer by layer."""

    def __init__(self, checkpoint: Checkpoint, text: Text, directory: Path | None = None) -> None:
        self.checkpoint, self.text = checkpoint, text
        self.spec = head_as_stored(spec_from_config(checkpoint.config), checkpoint)
        if max(text.lengths) > self.spec.max_positions:
            raise UsageError(
                f"a calibration sequence has {max(text.lengths)} tokens; the model takes "
                f"{self.spec.max_positions}; make the sequences shorter"
            )
        if max(text.ids) >= self.spec.vocab_size:
            raise UsageError(
                f"token {max(text.ids)} in the calibration text; the model's vocabulary has "
                f"{self.spec.vocab_size}; tokenise the text with the model's tokenizer"
            )
        self._needs = inventory(self.spec)
        self.plan = self._plan()
        norms = [layer_name(i, "input_layernorm.weight") for i in range(self.spec.num_layers)]
        read = [call.args.get("weight") for call in self.plan.calls]
        last = next(i for i, c in enumerate(self.plan.calls) if c.op == "gather_rows")
        starts = [*(read.index(name) for name in norms), last]
        self._layers = [self.plan.calls[a:b] for a, b in pairwise(starts)]
        self._first, self._tail = self.plan.calls[: starts[0]], self.plan.calls[starts[-1] :]
        self._chunks = [_Chunk(rows, lengths) for rows, lengths in text.chunks(CHUNK_TOKENS)]
        hidden = self.spec.hidden_size
        self.state = RowStore(text.tokens, hidden, directory)
        self._next = RowStore(text.tokens, hidden, directory)
        moe = self.spec.moe is not None
        self._kept = {"x": RowStore(text.tokens, hidden, directory)} if moe else {}
        self._overlay: Mapping[str, QuantTensor] = {}
        self.restart()

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def sites(self, layer: int) -> list[Site]:
        """Return the linears of a layer, grouped by input."""
        return list(sites_of(layer, self._layers[layer]).values())

    def matrices(self, layer: int) -> list[str]:
        """Return the names of a layer's matrices."""
        return [call.args["w"] for call in self._layers[layer] if multiplies(call)]

    def restart(self) -> None:
        """Embed the text: the state before layer 0."""
        for chunk in self._chunks:
            chunk.buffers = {"ids": self.text.ids[chunk.rows]}
            self._run(chunk, self._first)
            self.state[chunk.rows] = chunk.buffers["h"]
            chunk.buffers = {}
        self.checkpoint.release()

    def layer(
        self,
        index: int,
        observer: Observer | None = None,
        weights: Mapping[str, QuantTensor] | None = None,
    ) -> None:
        """Compute a layer from the state, showing inputs; `weights` replace the checkpoint's."""
        self._overlay = weights or {}
        calls = self._layers[index]
        first_of = sites_of(index, calls)
        experts = next((i for i, call in enumerate(calls) if of_experts(call)), len(calls))
        router: dict[str, list[np.ndarray]] = {"experts": [], "expert_weights": []}
        for chunk in self._chunks:
            chunk.buffers = {"h": self.state[chunk.rows]}
            self._run(chunk, calls[:experts], first_of, observer)
            self._next[chunk.rows] = chunk.buffers["h"]
            if experts < len(calls):
                self._kept["x"][chunk.rows] = chunk.buffers["x"]
                for name, parts in router.items():
                    parts.append(chunk.buffers[name])
            chunk.buffers = {}
            self.state.release()
            self._next.release()
        if experts < len(calls):
            ids, chosen = (np.concatenate(parts) for parts in router.values())
            gate_up, down = calls[experts : experts + 2]
            self._experts(gate_up, down, ids, chosen, observer)
        self._overlay = {}
        self.checkpoint.release()

    def advance(self) -> None:
        """Make the last `layer` result the state."""
        self.state, self._next = self._next, self.state

    def save(self, store: RowStore) -> None:
        """Copy the state into a store."""
        for chunk in self._chunks:
            store[chunk.rows] = self.state[chunk.rows]
            store.release()

    def restore(self, store: RowStore) -> None:
        """Take the state from a store."""
        for chunk in self._chunks:
            self.state[chunk.rows] = store[chunk.rows]
            store.release()

    def logits(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (rows, logits [m, V]) after the last layer, a few rows at a time."""
        for rows, x, name in self._head():
            table = self.tensor(name)
            vocab = table.shape[0]
            step = max(1, _LOGITS // vocab)
            for start in range(0, len(x), step):
                piece = x[start : start + step]
                y = np.empty((len(piece), vocab), np.float32)
                for first in range(0, vocab, _HEAD_ROWS):
                    part = slice(first, first + _HEAD_ROWS)
                    y[:, part] = piece @ look_up_rows(table, part).T
                first = rows.start + start
                yield slice(first, first + len(piece)), y

    def head_inputs(self, observer: Observer) -> None:
        """Show the inputs of the output head after the last layer."""
        for rows, x, name in self._head():
            observer.linear(Site(-1, (name,)), x, rows)

    def _head(self) -> Iterator[tuple[slice, np.ndarray, str]]:
        norm, head = (c for c in self._tail if c.op == "rms_norm" or multiplies(c))
        for chunk in self._chunks:
            chunk.buffers = {norm.args["x"]: self.state[chunk.rows]}
            self._run(chunk, (norm,))
            x, chunk.buffers = chunk.buffers[norm.args["y"]], {}
            yield chunk.rows, x, head.args["w"]

    def tensor(self, name: str) -> QuantTensor:
        """Return a matrix: replaced, ternarised or as stored."""
        if name in self._overlay:
            return self._overlay[name]
        tensor = self.checkpoint.tensor(name)
        if self._ternarised(name, self._needs[name]):
            return encode(tensor.decode(), parse_format("ternary_f32"))
        return tensor

    def _plan(self) -> Plan:
        formats: dict[str, Format] = {}
        for name, need in self._needs.items():
            if need.kind == "vector":
                continue
            online = self._ternarised(name, need)
            stored = self.checkpoint.tensors.get(name)
            if stored is not None:
                formats[name] = parse_format("ternary_f32") if online else stored.format
        longest = max(self.text.lengths)
        return build_plan(self.spec, formats, Sizes(tokens=1, rows=1, slots=1, context=longest))

    def _ternarised(self, name: str, need: Need) -> bool:
        stored = self.checkpoint.tensors.get(name)
        floating = stored is not None and isinstance(stored.format, Float)
        return self.spec.ternarize and need.kind == "linear" and floating

    def _run(
        self,
        chunk: _Chunk,
        calls: Sequence[Call],
        first_of: Mapping[int, Site] | None = None,
        observer: Observer | None = None,
    ) -> None:
        for number, call in enumerate(calls):
            if observer is not None and first_of and number in first_of:
                observer.linear(first_of[number], chunk.buffers[source_of(call)], chunk.rows)
            if call.op == "kv_append":
                continue
            if call.op == "embed":
                table = self.tensor(call.args["table"])
                chunk.buffers[call.args["y"]] = look_up_rows(table, chunk.buffers["ids"])
            elif call.op == "linear" and not has_codes(call):
                self._linear(chunk, call)
            elif call.op == "attention":
                self._attention(chunk, call)
            else:
                OPS[call.op].reference(**self._arguments(chunk, call), **call.attrs)

    def _arguments(self, chunk: _Chunk, call: Call) -> dict[str, np.ndarray | QuantTensor]:
        values: dict[str, np.ndarray | QuantTensor] = {}
        for param, name in call.args.items():
            if name == "positions":
                values[param] = self.text.positions[chunk.rows]
            elif name in self.plan.consts:
                values[param] = self.plan.consts[name]
            elif name in self.plan.buffers:
                if name not in chunk.buffers:
                    buffer = self.plan.buffers[name]
                    rows = chunk.rows.stop - chunk.rows.start
                    made = np.empty((rows, *buffer.shape[1:]), buffer.allocate().dtype)
                    chunk.buffers[name] = made
                values[param] = chunk.buffers[name]
            elif OPS[call.op].param(param).kind == "vector":
                values[param] = self.checkpoint.tensor(name).decode()
            else:
                values[param] = self.tensor(name)
        return values

    def _vector(self, call: Call, param: str) -> np.ndarray | None:
        name = call.args.get(param)
        return None if name is None else self.checkpoint.tensor(name).decode()

    def _linear(self, chunk: _Chunk, call: Call) -> None:
        total = chunk.buffers[call.args["x"]] @ self.tensor(call.args["w"]).decode().T
        times, residual = (
            chunk.buffers[call.args[name]] if name in call.args else None
            for name in ("times", "residual")
        )
        y = np.empty_like(total)
        activation = str(call.attrs.get("activation", "none"))
        cap = float(call.attrs.get("cap", 1.0))
        finish(total, y, self._vector(call, "bias"), times, residual, activation, cap)
        chunk.buffers[call.args["y"]] = y

    def _attention(self, chunk: _Chunk, call: Call) -> None:
        sinks = self._vector(call, "sinks")
        scale, window = float(call.attrs["scale"]), int(call.attrs["window"])
        q, k, v = (chunk.buffers[name] for name in ("q", "k", "v"))
        y, start = np.empty_like(q), 0
        for length in chunk.lengths:
            part = slice(start, start + length)
            y[part] = causal_attention(
                q[part], k[part], v[part], self.spec.head_dim, scale, window, sinks
            )
            start += length
        chunk.buffers[call.args["y"]] = y

    def _experts(
        self,
        gate_up: Call,
        down: Call,
        ids: np.ndarray,
        chosen: np.ndarray,
        observer: Observer | None,
    ) -> None:
        names = gate_up.args["w"], down.args["w"]
        biases = [self._vector(call, "bias") for call in (gate_up, down)]
        limit, alpha = float(gate_up.attrs["limit"]), float(gate_up.attrs["alpha"])
        x_rows = self._kept["x"]
        for expert in range(self.tensor(names[0]).shape[0]):
            tokens, places = np.nonzero(ids == expert)
            up_matrix = expert_matrix(self.tensor(names[0]), expert)
            down_matrix: np.ndarray | None = None

            def hidden(
                rows: np.ndarray, expert: int = expert, matrix: np.ndarray = up_matrix
            ) -> ExpertInputs:
                x = x_rows[rows]
                product = x @ matrix.T
                if biases[0] is not None:
                    product += biases[0][expert]
                gated = clamped_swiglu(product, limit, alpha)
                return ExpertInputs(x, gated, np.ones(len(rows), np.float32))

            for start in range(0, len(tokens), CHUNK_TOKENS):
                rows = tokens[start : start + CHUNK_TOKENS]
                router = chosen[rows, places[start : start + CHUNK_TOKENS]]
                inputs = hidden(rows)
                if observer is not None:
                    mine = ExpertInputs(inputs.x, inputs.gated, router)
                    observer.expert(names, expert, mine, rows)
                if down_matrix is None:
                    down_matrix = expert_matrix(self.tensor(names[1]), expert)
                product = inputs.gated @ down_matrix.T
                if biases[1] is not None:
                    product += biases[1][expert]
                product *= router[:, None]
                self._next.add(rows, product)
                x_rows.release()
                self._next.release()
            if observer is not None:
                observer.expert_done(names, expert, hidden)
            self.checkpoint.release()

"""Walk a model over calibration text, layer by layer, showing every linear's input.

Calls of the model's Plan run with the ops' references, but matmuls use fp32 BLAS, attention takes a
whole sequence and experts are visited one after another. One decoded matrix is in memory; hidden
states live in an unnamed temporary file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Float, Format, parse_format
from clocher_kernels.ops import OPS, of_experts, written
from clocher_kernels.ops.contract import has_codes
from clocher_kernels.ops.linear import finish
from clocher_kernels.ops.rewrite import CODES
from clocher_kernels.plan import Call
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert.rounding import look_up
from clocher_runtime.engine.load import head_as_stored
from clocher_runtime.models.build import Sizes, build_plan
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import inventory, layer_name
from clocher_runtime.quantize.inputs import RowStore, Text

CHUNK_TOKENS = 2048
"""Tokens per chunk; longer sequences are a chunk of their own."""

_LOGITS = 1 << 26
_HEAD_ROWS = 1 << 14
_QUERIES = 256


ExpertInputs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Inputs x [m, K] and gated [m, I] of an expert's two matmuls, and the router's weights [m]."""
Hidden = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Tokens [m] of a layer -> an expert's input x [m, K] and gated hidden layer [m, I]."""


class Observer:
    """Receives the inputs while a layer is computed; `rows` are tokens."""

    def linear(self, weights: tuple[str, ...], x: np.ndarray, rows: slice) -> None:
        """Take the inputs [m, K] of the linears with these weights."""

    def expert(
        self, weights: tuple[str, str], expert: int, inputs: ExpertInputs, rows: np.ndarray
    ) -> None:
        """Take the inputs of an expert's two matmuls for the next tokens that are routed to it."""

    def expert_done(self, weights: tuple[str, str], expert: int, hidden: Hidden) -> None:
        """Note that an expert has received all its tokens."""


class _Chunk(NamedTuple):
    """Consecutive sequences computed together; buffers by name."""

    rows: slice
    lengths: tuple[int, ...]
    buffers: dict[str, np.ndarray]


class Walk:
    """A float forward pass over sequences, advanced layer by layer."""

    def __init__(self, checkpoint: Checkpoint, text: Text) -> None:
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
        needs = inventory(self.spec)
        self._ternarised = {  # floats that the model rounds when it runs
            name
            for name, stored in checkpoint.tensors.items()
            if self.spec.ternarize
            and isinstance(stored.format, Float)
            and name in needs
            and needs[name].kind == "linear"
        }
        formats: dict[str, Format] = {
            name: parse_format("ternary_f32") if name in self._ternarised else stored.format
            for name, stored in checkpoint.tensors.items()
            if name in needs and needs[name].kind != "vector"
        }
        sizes = Sizes(tokens=1, rows=1, slots=1, context=max(text.lengths))
        self.plan = build_plan(self.spec, formats, sizes)
        norms = [layer_name(i, "input_layernorm.weight") for i in range(self.spec.num_layers)]
        read = [call.args.get("weight") for call in self.plan.calls]
        last = next(i for i, c in enumerate(self.plan.calls) if c.op == "gather_rows")
        starts = [*(read.index(name) for name in norms), last]
        self._layers = [self.plan.calls[a:b] for a, b in pairwise(starts)]
        self._first, self._tail = self.plan.calls[: starts[0]], self.plan.calls[starts[-1] :]
        self.state, self._next = self.store(), self.store()
        self._expert_inputs = self.store() if self.spec.moe else None
        self._overlay: Mapping[str, QuantTensor] = {}
        self.restart()

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def store(self, columns: int = 0) -> RowStore:
        """Return room for a row of each token; by default for hidden states."""
        return RowStore(len(self.text.ids), columns or self.spec.hidden_size)

    def matrices(self, layer: int) -> list[str]:
        """Return the names of a layer's matrices."""
        return [call.args["w"] for call in self._layers[layer] if _multiplies(call)]

    def restart(self) -> None:
        """Embed the text: the state before layer 0."""
        for chunk in self._chunks():
            chunk.buffers["ids"] = self.text.ids[chunk.rows]
            self._run(chunk, self._first)
            self.state[chunk.rows] = chunk.buffers["h"]
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
        experts = next((i for i, call in enumerate(calls) if of_experts(call)), len(calls))
        shown = _shared_inputs(calls)
        routed = []
        for chunk in self._chunks():
            chunk.buffers["h"] = self.state[chunk.rows]
            self._run(chunk, calls[:experts], shown, observer)
            self._next[chunk.rows] = chunk.buffers["h"]
            if self._expert_inputs and experts < len(calls):
                self._expert_inputs[chunk.rows] = chunk.buffers["x"]
                routed.append([chunk.buffers[name] for name in ("experts", "expert_weights")])
            self.state.release()
            self._next.release()
        if self._expert_inputs and routed:
            ids, chosen = map(np.concatenate, zip(*routed, strict=True))
            both = calls[experts], calls[experts + 1]
            self._experts(both, self._expert_inputs, ids, chosen, observer or Observer())
        self._overlay = {}
        self.checkpoint.release()

    def advance(self) -> None:
        """Make the last `layer` result the state."""
        self.state, self._next = self._next, self.state

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
                    y[:, part] = piece @ look_up(table, part).T
                first = rows.start + start
                yield slice(first, first + len(piece)), y

    def head_inputs(self, observer: Observer) -> None:
        """Show the inputs of the output head after the last layer."""
        for rows, x, name in self._head():
            observer.linear((name,), x, rows)

    def tensor(self, name: str) -> QuantTensor:
        """Return a matrix: replaced, ternarised or as stored."""
        if name in self._overlay:
            return self._overlay[name]
        tensor = self.checkpoint.tensor(name)
        if name in self._ternarised:
            return encode(tensor.decode(), parse_format("ternary_f32"))
        return tensor

    def _chunks(self) -> Iterator[_Chunk]:
        return (_Chunk(rows, lengths, {}) for rows, lengths in self.text.chunks(CHUNK_TOKENS))

    def _head(self) -> Iterator[tuple[slice, np.ndarray, str]]:
        norm, head = (c for c in self._tail if c.op == "rms_norm" or _multiplies(c))
        for chunk in self._chunks():
            chunk.buffers[norm.args["x"]] = self.state[chunk.rows]
            self._run(chunk, (norm,))
            yield chunk.rows, chunk.buffers[norm.args["y"]], head.args["w"]

    def _run(
        self,
        chunk: _Chunk,
        calls: Sequence[Call],
        shown: Mapping[int, tuple[str, ...]] | None = None,
        observer: Observer | None = None,
    ) -> None:
        for number, call in enumerate(calls):
            if observer and shown and number in shown:
                observer.linear(shown[number], chunk.buffers[_source(call)], chunk.rows)
            if call.op == "embed":
                table = self.tensor(call.args["table"])
                chunk.buffers[call.args["y"]] = look_up(table, chunk.buffers["ids"])
            elif call.op == "linear" and not has_codes(call):
                self._linear(chunk, call)
            elif call.op == "attention":
                self._attention(chunk, call)
            elif call.op != "kv_append":
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
        scale, window = float(call.attrs["scale"]), int(call.attrs["window"])
        sinks = self._vector(call, "sinks")
        rows = chunk.rows.stop - chunk.rows.start
        q, k, v = (
            chunk.buffers[name].reshape(rows, -1, self.spec.head_dim) for name in ("q", "k", "v")
        )
        y, start = np.empty_like(q), 0
        for length in chunk.lengths:
            part = slice(start, start + length)
            y[part] = causal_attention(q[part], k[part], v[part], scale, window, sinks)
            start += length
        chunk.buffers[call.args["y"]] = y.reshape(rows, -1)

    def _experts(
        self,
        calls: tuple[Call, Call],
        inputs: RowStore,
        ids: np.ndarray,
        chosen: np.ndarray,
        observer: Observer,
    ) -> None:
        names = calls[0].args["w"], calls[1].args["w"]
        biases = [self._vector(call, "bias") for call in calls]
        limit, alpha = float(calls[0].attrs["limit"]), float(calls[0].attrs["alpha"])

        def matmul(x: np.ndarray, matrix: np.ndarray, which: int, expert: int) -> np.ndarray:
            bias = biases[which]
            return np.asarray(x @ matrix.T + (np.float32(0) if bias is None else bias[expert]))

        for expert in range(self.tensor(names[0]).shape[0]):
            tokens, places = np.nonzero(ids == expert)
            up = look_up(self.tensor(names[0]), expert)
            down: np.ndarray | None = None

            def hidden(
                rows: np.ndarray, expert: int = expert, up: np.ndarray = up
            ) -> tuple[np.ndarray, np.ndarray]:
                x = inputs[rows]
                return x, clamped_swiglu(matmul(x, up, 0, expert), limit, alpha)

            for start in range(0, len(tokens), CHUNK_TOKENS):
                rows = tokens[start : start + CHUNK_TOKENS]
                router = chosen[rows, places[start : start + CHUNK_TOKENS]]
                x, gated = hidden(rows)
                observer.expert(names, expert, (x, gated, router), rows)
                if down is None:
                    down = look_up(self.tensor(names[1]), expert)
                self._next.add(rows, matmul(gated, down, 1, expert) * router[:, None])
                inputs.release()
                self._next.release()
            observer.expert_done(names, expert, hidden)
            self.checkpoint.release()


def _source(call: Call) -> str:
    """Return a matmul's float input buffer."""
    return call.args["x"].removesuffix(CODES)


def _multiplies(call: Call) -> bool:
    return call.op == "linear" or of_experts(call)


def _shared_inputs(calls: Sequence[Call]) -> dict[int, tuple[str, ...]]:
    """Return, by the first matmul of each input, the weights of those that share it."""
    first: dict[str, int] = {}
    members: dict[int, tuple[str, ...]] = {}
    for number, call in enumerate(calls):
        if _multiplies(call) and OPS[call.op].param("x").dims == "M K":
            start = first.setdefault(_source(call), number)
            members[start] = (*members.get(start, ()), call.args["w"])
        for name in written(call):
            first.pop(name, None)
    return members


def causal_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    window: int,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Attend over one whole sequence: the `attention` op with an empty cache.

    `q`: [T, H, D], `k` and `v`: [T, Hkv, D], fp32; `window`: visible keys, the query included; 0
    for all; `sinks`: [H], logits added to the denominator. Returns [T, H, D] fp32.
    """
    group = q.shape[1] // k.shape[1]
    out = np.empty_like(q)
    for start in range(0, len(q), _QUERIES):
        stop = min(start + _QUERIES, len(q))
        first = max(0, start - window + 1) if window else 0
        distance = np.arange(start, stop)[:, None] - np.arange(first, stop)
        hidden = (distance < 0) | (distance >= (window or len(q)))
        for head in range(q.shape[1]):
            logits = q[start:stop, head] @ k[first:stop, head // group].T
            logits *= np.float32(scale)
            logits[hidden] = -np.inf
            top = logits.max(axis=1, keepdims=True)
            if sinks is not None:
                top = np.maximum(top, sinks[head])
            np.exp(logits - top, out=logits)
            total = logits.sum(axis=1, keepdims=True)
            if sinks is not None:
                total += np.exp(sinks[head] - top)
            out[start:stop, head] = (logits @ v[first:stop, head // group]) / total
    return out


def clamped_swiglu(product: np.ndarray, limit: float, alpha: float) -> np.ndarray:
    """Return gated [m, I] of interleaved gate and up [m, 2 I]; see `ops.moe`."""
    gate, up = np.minimum(product[:, 0::2], limit), np.clip(product[:, 1::2], -limit, limit)
    return np.asarray((up + 1) * gate / (1 + np.exp(-alpha * gate)), np.float32)

"""What an error in a matrix's output costs, token by token: gradients of a model's own choices.

If a matrix W becomes W + E, the KL divergence grows by about (g^T E x)^2 / 2 at a token with input
x, where g is the gradient, by the output, of the log probability of a token drawn from the model's
own prediction: the Fisher information is the Hessian of the divergence. GPTQ rounds rows
independently, so a token counts with |g|^2. That is a hundredth of the mean for many tokens and a
hundred times the mean for some: the values of a first token, which heads with nothing to find
attend to, must stay near zero.

The hidden states before every layer are kept; from the last layer to the first each is computed
again, and the derivatives of its calls are taken in reverse.

Source: SqueezeLLM (arXiv 2306.07629), section 4.1; YAQA (arXiv 2505.22988), section 3.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from clocher_kernels.ops.elementwise import activate
from clocher_kernels.plan import Call
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert.rounding import row_pieces
from clocher_runtime.quality.evaluate import Progress
from clocher_runtime.quantize.calibration_text import Text
from clocher_runtime.quantize.capture import Buffers, Tape, Walk

PART_TOKENS = 8192
"""Tokens, in whole sequences, whose hidden states are kept at a time."""

_BLOCK_ELEMENTS = 1 << 25
_STEP = np.float32(2**-8)

Grads = dict[str, np.ndarray]
"""Buffer -> gradient by what it holds, [m, F] fp32."""
Note = Callable[[Call, np.ndarray, np.ndarray], None]
"""Takes a linear, its inputs, and the gradient by their products, before bias and activation."""


def token_weights(
    checkpoint: Checkpoint,
    text: Text,
    threads: int = 1,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> dict[str, np.ndarray]:
    """Return by matrix how much each token of a text counts: |g|^2, [T] fp32.

    Empty if a call of the model, such as one of experts, has no derivative here.
    """
    rng = np.random.default_rng([seed, 2])
    parts = list(text.chunks(PART_TOKENS))
    found: dict[str, list[np.ndarray]] = {}
    for number, (rows, lengths) in enumerate(parts):
        walk = Walk(checkpoint, Text(text.ids[rows], lengths, text.held[rows]), threads)
        if not has_derivative(walk):
            return {}

        def note(call: Call, x: np.ndarray, slope: np.ndarray) -> None:
            found.setdefault(call.args["w"], []).append(np.einsum("ij,ij->i", slope, slope))

        layers, before = walk.spec.num_layers, []
        total = 2 * len(parts) * layers
        for layer in range(layers):
            before.append(walk.store())
            before[-1].take(walk.state)
            walk.layers([layer])
            progress("calibrating: gradients", 2 * number * layers + layer + 1, total)
        slopes = walk.store()
        for place, tape, buffers in walk.replay(None, walk.state):
            grads = {"logits": _drawn(buffers["logits"], rng)}
            slopes[place] = backwards(walk, tape, grads, note)["last"]
        for layer in reversed(range(layers)):
            for place, tape, _ in walk.replay(layer, before.pop()):
                slopes[place] = backwards(walk, tape, {"h": slopes[place]}, note)["h"]
                slopes.release()
            progress("calibrating: gradients", 2 * (number + 1) * layers - layer, total)
    return {name: np.concatenate(each) for name, each in found.items()}


def _drawn(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Make logits [m, V] gradients by them of -log p(y), for a y drawn from each row; return these.

    Row by row: a vocabulary is large.
    """
    for row, at in zip(logits, rng.random(len(logits)), strict=True):
        row -= row.max()
        np.exp(row, out=row)
        sums = row.cumsum(dtype=np.float64)
        row /= sums[-1]
        row[min(np.searchsorted(sums, at * sums[-1], "right"), len(row) - 1)] -= 1
    return logits


def has_derivative(walk: Walk) -> bool:
    """Return whether all calls of a model have one here."""
    return all(map(_has_derivative, walk.calls()))


def backwards(walk: Walk, tape: Tape, grads: Grads, note: Note) -> Grads:
    """Take the derivatives of calls in reverse, noting those of linears."""
    for number in reversed(range(len(tape))):
        call, seen = tape[number]
        args = call.args
        if call.op == "linear":
            _linear(walk, call, seen, grads, note)
        elif call.op == "rms_norm":
            _rms_norm(walk, call, seen, grads)
        elif call.op == "rope":
            cos, sin = (walk.vector(args[name])[seen["positions"]] for name in ("cos", "sin"))
            grads[args["x"]] = _turned_back(grads[args["x"]], cos, sin, int(call.attrs["head"]))
        elif call.op == "attention":
            own = next(each for each in tape if each[0].args.get("v_cache") == args["v_cache"])
            dim = walk.plan.buffers[args["v_cache"]].shape[-1]
            gradients = _attention(call, seen, own[1], grads.pop(args["y"]), dim)
            grads |= zip((args["q"], own[0].args["k"], own[0].args["v"]), gradients, strict=True)
    return grads


def _has_derivative(call: Call) -> bool:
    if call.op == "attention":
        return not ({"sinks", "listed"} & call.args.keys() or call.attrs["softcap"])
    return call.op in ("linear", "rms_norm", "rope", "kv_append")


def _add(grads: Grads, name: str, values: np.ndarray) -> None:
    grads[name] = grads[name] + values if name in grads else values


def _linear(walk: Walk, call: Call, seen: Buffers, grads: Grads, note: Note) -> None:
    args, matrix = call.args, walk.tensor(call.args["w"])
    slope = grads.pop(args["y"])
    if "residual" in args:
        _add(grads, args["residual"], slope)
    kind, cap = str(call.attrs.get("activation", "none")), float(call.attrs.get("cap", 1.0))
    if kind != "none" or "times" in args:
        sums = np.concatenate([seen["x"] @ each.T for _, each in decoded_blocks(matrix)], axis=1)
        if "bias" in args:
            sums += walk.vector(args["bias"])
        here, ahead = (_active(kind, sums + step, cap) for step in (np.float32(0), _STEP))
        if "times" in args:
            _add(grads, args["times"], slope * here)
            slope = slope * seen["times"]
        slope = slope * ((ahead - here) / _STEP)
    for rows, each in decoded_blocks(matrix):
        _add(grads, args["x"], slope[:, rows] @ each)
    note(call, seen["x"], slope)


def _active(kind: str, sums: np.ndarray, cap: float) -> np.ndarray:
    return sums if kind == "none" else activate(kind, sums, cap).astype(np.float32)


def decoded_blocks(matrix: QuantTensor) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield some rows of a matrix [N, K] at a time, decoded."""
    start = 0
    for (piece,) in row_pieces(matrix, elements=_BLOCK_ELEMENTS):
        stop = start + piece.shape[0]
        yield slice(start, stop), piece.decode()
        start = stop


def _rms_norm(walk: Walk, call: Call, seen: Buffers, grads: Grads) -> None:
    args, weight = call.args, walk.vector(call.args["weight"])
    slope = grads.pop(args["y"])
    if "residual" in args:
        _add(grads, args["residual"], slope)
    x = seen["x"].reshape(len(slope), -1, len(weight))
    inverse = 1 / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(call.attrs["eps"]))
    normal, slopes = x * inverse, slope.reshape(x.shape) * weight
    along = (normal * slopes).mean(axis=-1, keepdims=True)
    _add(grads, args["x"], (inverse * (slopes - normal * along)).reshape(slope.shape))


def _turned_back(slope: np.ndarray, cos: np.ndarray, sin: np.ndarray, head: int) -> np.ndarray:
    """Return gradients by what was rotated; cos and sin [m, P] of each token."""
    half = cos.shape[1]
    whole = slope.reshape(len(slope), -1, head).copy()
    first, second = slope.reshape(whole.shape)[..., :half], whole[..., half : 2 * half].copy()
    whole[..., :half] = first * cos[:, None] + second * sin[:, None]
    whole[..., half : 2 * half] = second * cos[:, None] - first * sin[:, None]
    return whole.reshape(slope.shape)


def _attention(
    call: Call, seen: Buffers, stored: Buffers, slope: np.ndarray, dim: int
) -> list[np.ndarray]:
    """Return gradients by queries, keys and values, a sequence and a head at a time."""
    scale, window, chunk = (call.attrs[name] for name in ("scale", "window", "chunk"))
    given = seen["q"] * np.float32(scale), stored["k"], stored["v"], slope
    made = [np.zeros_like(each) for each in given[:3]]
    ends = np.flatnonzero(np.diff(seen["slots"])) + 1
    for start, stop in pairwise([0, *ends, len(slope)]):
        at = np.arange(stop - start)
        behind = at[:, None] - at
        shown = behind >= 0
        if window:
            shown &= behind < window
        if chunk:
            shown &= at[:, None] // chunk == at // chunk
        hidden = np.where(shown, np.float32(0), np.float32(-np.inf))
        q, k, v, dy, dq, dk, dv = (
            each[start:stop].reshape(len(at), -1, dim) for each in (*given, *made)
        )
        for head in range(q.shape[1]):
            of = head * k.shape[1] // q.shape[1]
            p = q[:, head] @ k[:, of].T
            p += hidden
            p -= p.max(axis=1, keepdims=True)
            np.exp(p, out=p)
            p /= p.sum(axis=1, keepdims=True)
            ds = dy[:, head] @ v[:, of].T
            ds -= np.einsum("ij,ij->i", p, ds)[:, None]
            ds *= p
            dq[:, head] = ds @ k[:, of] * np.float32(scale)
            dk[:, of] += ds.T @ q[:, head]
            dv[:, of] += p.T @ dy[:, head]
    return made

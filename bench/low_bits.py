r"""Two to five bits a weight: what each idea is worth at equal bytes of the whole model.

\b
    python -m bench low_bits --model-dir F16.gguf --calib-text CALIB --text TEXT --turns JSONL \
        --recipe "3 g64 s6 levels gptq" --peer IQ3_S.gguf=F16_OF_IT.gguf --keep PARTS --json OUT

A study, not a format: matrices are rounded and put back as floats (torch), activations are fp32, so
only the loss of the weights is seen. A recipe is bits and switches: gN weights share a scale of sN
bits under a row's f16 (s16: f16 alone); `levels` learns the values by k-means weighted by the
Hessian's diagonal (else they are uniform); `gptq` corrects later columns; rotN rotates inputs by
random signs and a Hadamard matrix of N; tcqV codes rows of a column by a trellis of 2^V states;
headN gives embeddings and head N bits; mixN spreads N bits over the tensors by the Fisher
information of their outputs. A peer is a file whose size counts, and a copy of it in f16; for
blocks of 256, four rows of 576 columns were laid end to end before llama-quantize.
"""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from math import prod, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
import transformers
from torch import nn

from bench import real
from bench.experiment import TEAM, experiment
from bench.record import Row
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import COUNT, PATH
from clocher_runtime.quantize.gptq import Factor, factorise

PARITY = {0: (0, 0), 2: (0o5, 0o2), 3: (0o13, 0o4), 4: (0o23, 0o4), 8: (0o515, 0o362)}
"""Ungerboeck's codes for amplitudes (1982): h0, h1 of 2^V states."""
_SEQUENCE, _BLOCK, _SAMPLE, _AT_ONCE = 64, 128, 1 << 17, 128
_ROUNDS, _F16, _DRAWN, _MOST = 4, 16, 4, 6
_CANDIDATES = np.concatenate([np.linspace(0.5, 1.15, 14), -np.linspace(0.5, 1.15, 14)])
_HEAD = "lm_head"
Matrices = dict[str, torch.Tensor]


class Recipe(NamedTuple):
    """How a matrix is rounded."""

    bits: int
    group: int = 64
    scale: int = 16
    levels: bool = False
    gptq: bool = False
    rotate: int = 0
    trellis: int = 0
    head: int = 0
    mix: float = 0.0


def parse(text: str) -> Recipe:
    """Return the recipe that a text spells."""
    first, *words = text.split()
    own: dict[str, Any] = {"bits": int(first)}
    names = {"g": "group", "s": "scale", "rot": "rotate", "tcq": "trellis", "head": "head"}
    for word in words:
        name = word.rstrip("0123456789.")
        number = word[len(name) :]
        if name == "mix":
            own["mix"] = float(number)
        else:
            own[names.get(name, name)] = int(number) if number else True
    return Recipe(**own)


@numba.njit(parallel=True, fastmath=True, cache=True)
def search(w, h, levels, group, candidates):  # type: ignore[no-untyped-def]
    """Return scales [N, K / group] that minimise sum h (w - s level)^2; w [N, K], h [K]."""
    rows, columns = w.shape
    found = np.empty((rows, columns // group), np.float32)
    extreme = levels[np.argmax(np.abs(levels))]
    for n in numba.prange(rows):
        best = np.empty(group, np.float32)
        for g in range(columns // group):
            x, weight = w[n, g * group : (g + 1) * group], h[g * group : (g + 1) * group]
            top = x[np.argmax(np.abs(x))] / extreme
            least = np.float32(np.inf)
            found[n, g] = 1e-8
            if top == 0:
                continue
            for c in candidates:
                inverse = np.float32(1 / (top * c))
                best[:] = np.float32(1e30)
                for level in levels:
                    for j in range(group):
                        d = x[j] * inverse - level
                        best[j] = min(best[j], d * d)
                error = np.float32(0)
                for j in range(group):
                    error += best[j] * weight[j]
                error /= inverse * inverse
                if error < least:
                    least = error
                    found[n, g] = top * c
    return found


@numba.njit(fastmath=True)
def _viterbi(near, states, subset, start, free, cost, moves):  # type: ignore[no-untyped-def]
    """Fill moves [L, S] with the better predecessors; return the costs of the end states."""
    half = states // 2
    cost[:] = np.float32(0 if free else 1e30)
    cost[start] = 0
    new = np.empty_like(cost)
    for t in range(len(near)):
        for p in range(half):
            same, other = near[t, subset[p]], near[t, subset[p] ^ 2]
            a, b = cost[p] + same, cost[p + half] + other
            c, d = cost[p] + other, cost[p + half] + same
            moves[t, 2 * p], new[2 * p] = b < a, min(a, b)
            moves[t, 2 * p + 1], new[2 * p + 1] = d < c, min(c, d)
        cost[:] = new


@numba.njit(fastmath=True)
def _walk(moves, state, half, path):  # type: ignore[no-untyped-def]
    """Trace states back from the end; path [L] gets the state before each step; return it."""
    for t in range(len(path) - 1, -1, -1):
        state = (state >> 1) + half * moves[t, state]
        path[t] = state
    return state


@numba.njit(parallel=True, fastmath=True, cache=True)
def correct(w, step, levels, upper, subset, length):  # type: ignore[no-untyped-def]
    """Round w [N, B] column by column, correcting later ones; return codes and errors [N, B].

    step [N, B]: scales; upper [B, B]: of the Hessian's factor. With S = len(subset) > 1 states,
    `length` rows of a column are a tail-biting sequence: level 4 m + 2 z1 + z0, where z0 and z1
    are given by the state and one bit of a weight (subset: 2 z1 + z0 for 0), m by its others.
    """
    rows, columns = w.shape
    codes = np.empty((rows, columns), np.uint8)
    error = np.empty((rows, columns), np.float32)
    states = len(subset)
    for part in numba.prange(-(-rows // length)):
        first, last = part * length, min(rows, (part + 1) * length)
        size = last - first
        near = np.empty((size, 4), np.float32)
        index = np.empty((size, 4), np.uint8)
        cost, path = np.empty(states, np.float32), np.empty(size, np.int64)
        moves = np.empty((size, states), np.uint8)
        for i in range(columns):
            for r in range(size):
                x, s = w[first + r, i] / step[first + r, i], step[first + r, i] ** 2
                near[r] = np.float32(1e30)
                for k in range(len(levels)):
                    sub = k % 4 if states > 1 else 0
                    d = (x - levels[k]) ** 2 * s
                    if d < near[r, sub]:
                        near[r, sub], index[r, sub] = d, k
            if states > 1:
                half = size // 2
                turned = np.concatenate((near[half:], near[:half]))
                _viterbi(turned, states, subset, 0, True, cost, moves)
                _walk(moves, np.argmin(cost), states // 2, path)
                start = path[size - half]
                _viterbi(near, states, subset, start, False, cost, moves)
                _walk(moves, start, states // 2, path)
                for r in range(size):
                    after = path[r + 1] if r + 1 < size else start
                    codes[first + r, i] = index[r, subset[path[r]] ^ (2 * (after & 1))]
            else:
                codes[first : first + size, i] = index[:, 0]
            for r in range(first, last):
                e = (w[r, i] - step[r, i] * levels[codes[r, i]]) / upper[i, i]
                error[r, i] = e
                for j in range(i + 1, columns):
                    w[r, j] -= e * upper[i, j]
    return codes, error


@cache
def subsets(memory: int) -> np.ndarray:
    """Return 2 z1 + z0 of each state for a next bit of 0, [2^memory]; bit 0 is the newest."""
    h0, h1 = PARITY[memory]
    states = range(1 << memory)
    found = [2 * ((s & h0 >> 1).bit_count() & 1) + ((s & h1 >> 1).bit_count() & 1) for s in states]
    return np.array(found, np.int64)


def rotation(columns: int, size: int) -> np.ndarray:
    """Return a block of random signs and Hadamard, [K / size, size, size]: w @ block."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.default_rng(0).choice([-1, 1], (columns // size, size, 1))
    return (signs * matrix / sqrt(size)).astype(np.float32)


def turn(x: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Multiply columns of x [M, K] by blocks [K / n, n, n]."""
    parts = x.reshape(len(x), len(blocks), -1).transpose(1, 0, 2) @ blocks
    return np.ascontiguousarray(parts.transpose(1, 0, 2).reshape(x.shape))


def learn(w: np.ndarray, h: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Return levels [2^bits] to choose scales with, and those of codes: 2^(bits + 1) in a trellis.

    w: [N, K], h: [K], the importance of a column.
    """
    count, group = 1 << recipe.bits, recipe.group
    levels = np.linspace(-1, 1 - 2 / count, count, dtype=np.float32)
    rows = min(len(w), max(_SEQUENCE, _SAMPLE // w.shape[1] // _SEQUENCE * _SEQUENCE))
    chosen = np.random.default_rng(0).choice(len(w), rows, replace=False)
    sample, weight = w[np.sort(chosen)], np.broadcast_to(h, (rows, len(h)))
    for _ in range(4 if recipe.levels else 0):
        step = search(sample, h, levels, group, _CANDIDATES).repeat(group, 1)
        levels = _lloyd(sample, step, weight, levels, 0)
    if not recipe.trellis:
        return levels, levels
    # Half the spacing, and a little farther out.
    wide = np.interp(np.arange(2 * count) / 2 - 0.25, np.arange(count), levels)
    wide[0], wide[-1] = 1.5 * wide[0] - 0.5 * wide[2], 1.5 * wide[-1] - 0.5 * wide[-3]
    step = search(sample, h, levels, group, _CANDIDATES).repeat(group, 1)
    return levels, _lloyd(sample, step, weight, wide.astype(np.float32), recipe.trellis)


def _lloyd(
    w: np.ndarray, step: np.ndarray, h: np.ndarray, levels: np.ndarray, memory: int
) -> np.ndarray:
    """Move levels to the weighted mean of the weights that take them, in some rounds."""
    x, s, weight = (np.ascontiguousarray(each.T).reshape(-1, 1) for each in (w, step, h))
    weight = (weight * s * s)[:, 0]
    one = np.ones((1, 1), np.float32)
    for _ in range(_ROUNDS):
        codes = correct(x.copy(), s, levels, one, subsets(memory), _SEQUENCE)[0][:, 0]
        total = np.bincount(codes, weight, len(levels))
        moved = np.bincount(codes, weight * (x / s)[:, 0], len(levels))
        levels = np.where(total > 0, moved / np.maximum(total, 1e-30), levels).astype(np.float32)
    return levels


class Input(NamedTuple):
    """What a matrix's input says, in the rotated columns."""

    hessian: np.ndarray  # [K, K]
    blocks: np.ndarray | None  # of the rotation
    factor: Factor | None  # of the Hessian, for gptq


def prepare(hessian: np.ndarray, recipe: Recipe) -> Input:
    """Rotate and factorise a Hessian [K, K]."""
    blocks = None
    if recipe.rotate:
        blocks = rotation(len(hessian), recipe.rotate)
        hessian = turn(np.ascontiguousarray(turn(hessian, blocks).T), blocks)
    return Input(hessian, blocks, factorise(hessian) if recipe.gptq else None)


def quantise(w: np.ndarray, given: Input, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Return w [N, K] rounded, and its loss tr(E H E^T) by row, [N]."""
    hessian, blocks, factor = given
    if blocks is not None:
        w = turn(w, blocks)
    size = w.shape[1]
    h = np.ascontiguousarray(np.diagonal(hessian)) + np.float32(1e-6 * np.trace(hessian) / size)
    coarse, levels = learn(w, h, recipe)
    plain = not (recipe.levels or recipe.gptq or recipe.scale < _F16)
    scales = search(w, h, coarse, recipe.group, np.ones(1) if plain else _CANDIDATES)
    if recipe.scale < _F16:
        unit = np.abs(scales).max(1, keepdims=True) / ((1 << (recipe.scale - 1)) - 1)
        code = np.rint(scales / unit)
        scales = np.where(code == 0, np.sign(scales), code).astype(np.float32) * unit
    if factor is None:
        factor = Factor(np.arange(size), np.eye(size, dtype=np.float32), 0)
    order, upper = factor.order, factor.upper
    rest, out, subset = w[:, order], np.empty_like(w), subsets(recipe.trellis)
    for at in range(0, size, _BLOCK):
        here, later = order[at : at + _BLOCK], slice(at + _BLOCK, None)
        step = np.ascontiguousarray(scales[:, here // recipe.group])
        square = np.ascontiguousarray(upper[at : at + _BLOCK, at : at + _BLOCK])
        part = np.ascontiguousarray(rest[:, at : at + _BLOCK])
        codes, error = correct(part, step, levels, square, subset, _SEQUENCE)
        out[:, here] = step * levels[codes]
        if recipe.gptq:
            rest[:, later] -= error @ upper[at : at + _BLOCK, later]
    wrong = w - out
    loss = np.einsum("nk,nk->n", wrong @ hessian, wrong)
    return turn(out, blocks.transpose(0, 2, 1)) if blocks is not None else out, loss


class Study:
    """A model, what its matrices read in one text, and its hidden states on others."""

    def __init__(self, asked: Any) -> None:
        self.model = loaded(asked.source)
        self.linears = {n: m for n, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        self.floats = {n: m.weight.detach().clone() for n, m in self.linears.items()}
        self.hessians: dict[str, torch.Tensor] = {}
        self.fisher = {n: torch.zeros(m.out_features) for n, m in self.linears.items()}
        tokenizer = real.tokenizer_of(asked.source)
        (calib,) = real.windows_of(tokenizer, asked.calib, None, 1 << 16).values()
        self.windows = calib[:: max(1, len(calib) // asked.samples)][: asked.samples]
        self.kinds = real.windows_of(tokenizer, asked.text, asked.turns, asked.windows)
        self.base = {kind: hidden(self.model, of) for kind, of in self.kinds.items()}

    def collect(self) -> None:
        """Sum x x^T of inputs, and the squared gradients of outputs for drawn tokens."""
        seen: list[Any] = [None, ""]

        def note(name: str, _: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            if inputs[0] is seen[0]:  # q, k, v and gate, up share their inputs
                self.hessians[name] = self.hessians[seen[1]]
                return
            seen[:] = inputs[0], name
            x = inputs[0].detach().flatten(0, 1)
            self.hessians.setdefault(name, torch.zeros(2 * x.shape[1:])).addmm_(x.T, x)

        def grads(name: str, _: nn.Module, __: Any, outputs: tuple[torch.Tensor]) -> None:
            self.fisher[name] += outputs[0].flatten(0, 1).square().sum(0)

        hooks: list[Any] = []
        for name, module in self.linears.items():
            hooks.append(module.register_forward_pre_hook(partial(note, name)))
            hooks.append(module.register_full_backward_hook(partial(grads, name)))
        self.put({})
        torch.manual_seed(0)
        for number, ids in enumerate(self.windows):
            wanted = number % _DRAWN == 0
            with torch.set_grad_enabled(wanted):
                rows = self.model.get_input_embeddings()(torch.tensor([ids])).detach()
                logits = self.model(inputs_embeds=rows.requires_grad_(wanted)).logits[0]
            if wanted:
                drawn = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
                nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
        for hook in hooks:
            hook.remove()

    def put(self, matrices: Matrices) -> None:
        """Replace weights; those that are not named become the model's own."""
        for name, module in self.linears.items():
            module.weight.data = matrices.get(name, self.floats[name])
        self.model.get_input_embeddings().weight = self.model.lm_head.weight

    def round(self, recipe: Recipe, bits: Mapping[str, int]) -> tuple[Matrices, dict[str, float]]:
        """Return the matrices of a recipe, and half the Fisher-weighted loss of each."""
        if not self.hessians:
            self.collect()
        found, losses = Matrices(), {}
        tokens = real.WINDOW * len(self.windows)
        drawn = real.WINDOW * -(-len(self.windows) // _DRAWN)
        last: Any = None, None
        for name, w in self.floats.items():
            own = recipe._replace(bits=bits[name])
            if name == _HEAD:  # a row of the embeddings is read alone
                own = own._replace(trellis=0, rotate=0)
            if self.hessians[name] is not last[0]:
                last = self.hessians[name], prepare(self.hessians[name].numpy() / tokens, own)
            out, loss = quantise(w.numpy(), last[1], own)
            found[name] = torch.from_numpy(out)
            losses[name] = float(self.fisher[name].numpy() @ loss) / drawn / 2
        return found, losses

    def allocate(self, recipe: Recipe) -> dict[str, int]:
        """Return bits of each matrix, `mix` a weight in all; a bit more quarters its loss."""
        if not recipe.mix:
            even = dict.fromkeys(self.floats, recipe.bits)
            return even | {_HEAD: recipe.head or recipe.bits}
        loss = self.round(recipe, dict.fromkeys(self.floats, recipe.bits))[1]
        size = {name: w.numel() for name, w in self.floats.items()}
        chosen = dict.fromkeys(self.floats, 2)
        room = (recipe.mix - recipe.scale / recipe.group - 2) * sum(size.values())
        while fits := [n for n, bits in chosen.items() if bits < _MOST and size[n] <= room]:
            best = max(fits, key=lambda n: loss[n] / size[n] * 4.0 ** -chosen[n])
            chosen[best] += 1
            room -= size[best]
        return chosen

    def nbytes(self, recipe: Recipe, bits: Mapping[str, int]) -> float:
        """Return the bytes: a row has a scale in f16, a level a byte, vectors are fp32."""
        vectors = sum(4 * p.numel() for p in self.model.parameters() if p.ndim == 1)
        own = recipe.scale / recipe.group
        return vectors + sum(
            w.numel() * (bits[n] + own) / 8 + 2 * len(w) + (2 << bits[n])
            for n, w in self.floats.items()
        )

    @torch.no_grad()
    def score(self, model: Any) -> real.Sums:
        """Return the sums of `real.judge` over the windows, by kind, beside the floats."""
        found: real.Sums = {}
        for kind, windows in self.kinds.items():
            x, own = hidden(model, windows), self.base[kind]
            ids = torch.tensor([each[real.FIRST + 1 :] for each in windows]).flatten()
            for at in range(0, len(ids), _AT_ONCE):
                here = slice(at, at + _AT_ONCE)
                log = (x[here] @ model.lm_head.weight.T).log_softmax(-1)
                ref = (own[here] @ self.floats[_HEAD].T).log_softmax(-1)
                kld = (ref.exp() * (ref - log)).sum(-1).double()
                sums = {"tokens": len(kld), "kld": kld.sum(), "kld2": kld.square().sum()}
                sums["same"] = (log.argmax(-1) == ref.argmax(-1)).sum()
                sums["nll"] = -log.gather(1, ids[here, None]).double().sum()
                for key, value in sums.items():
                    found[f"{kind} {key}"] = found.get(f"{kind} {key}", 0.0) + float(value)
        return found

    def ours(self, text: str) -> real.Sums:
        """Return the bytes and the sums of a recipe."""
        recipe = parse(text)
        bits = self.allocate(recipe)
        made, losses = self.round(recipe, bits)
        self.put(made)
        found = {"bytes": self.nbytes(recipe, bits), "fisher": sum(losses.values())}
        return found | self.score(self.model)

    def theirs(self, text: str) -> real.Sums:
        """Return the bytes and the sums of a peer's file."""
        file, floats = map(Path, text.split("="))
        # Beside the tensors there are names and the vocabulary, as in the copy of f16.
        more = file.stat().st_size - floats.stat().st_size
        return {"bytes": more + open_checkpoint(floats).nbytes} | self.score(loaded(floats))


def loaded(path: Path) -> Any:
    """Return a GGUF model of f16 in fp32."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def hidden(model: Any, windows: real.Windows) -> torch.Tensor:
    """Return the head's inputs for the scored tokens of windows, [T, K]."""
    found = [model.model(torch.tensor([ids])).last_hidden_state[0] for ids in windows]
    return torch.cat([x[real.FIRST : real.WINDOW - 1] for x in found])


@experiment(
    "low_bits",
    __doc__,
    option("--model-dir", PATH, "GGUF file of f16, head tied", name="source", required=True),
    option("--calib-text", PATH, name="calib", required=True),
    option("--samples", COUNT, "windows of 512 tokens", default=32),
    option("--text", PATH, required=True),
    option("--turns", PATH, required=True),
    option("--windows", COUNT, "of each of them", default=8),
    option("--recipe", str, name="recipes", multiple=True),
    option("--peer", str, "FILE=F16 of it", name="peers", multiple=True),
    option("--keep", PATH, required=True),
    TEAM,
    title="{model}",
)
def main(asked: Any) -> Iterator[Row]:
    """Measure what is missing; yield the row of each recipe and peer."""
    torch.set_num_threads(asked.threads)
    numba.set_num_threads(asked.threads)
    parts, study = real.Parts(asked.keep, None), cache(lambda: Study(asked))
    stored = open_checkpoint(asked.source).tensors.values()
    params = sum(prod(tensor.shape) for tensor in stored)
    parts.do("floats", lambda: study().score(study().model))

    def measure(text: str) -> real.Sums:
        return study().theirs(text) if "=" in text else study().ours(text)

    about = {
        "model": asked.source.stem,
        "calibration": f"{asked.samples} x {real.WINDOW} tokens of {asked.calib.name}",
        "evaluation": f"{asked.text.name}, {asked.turns.name}",
    }
    for text in (*asked.recipes, *asked.peers):
        name = Path(text.split("=")[0]).stem if "=" in text else text
        parts.do(name, partial(measure, text))
        found = parts.get(name)
        row: Row = about | {"name": name, "bytes": int(found["bytes"])}
        if "=" in text:
            row["calibration"] = f"importance matrix, {asked.calib.name}"
        row |= {"bits": 8 * found["bytes"] / params, "mib": found["bytes"] / (1 << 20)}
        for kind in ("text", "turns"):
            own, exact = (
                {k.split()[1]: v for k, v in of.items() if k.startswith(f"{kind} ")}
                for of in (found, parts.get("floats"))
            )
            row |= {f"{k}_{kind}": v for k, v in real.summary(own, exact).items()}
        yield row | {"fisher": found.get("fisher"), "seconds": found["seconds"]}


if __name__ == "__main__":
    main()

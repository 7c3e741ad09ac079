r"""Two to five bits a weight: what `Tcq` loses at equal bytes of the whole model.

\b
    python -m bench low_bits --model-dir F16.gguf --calib-text CALIB --text TEXT --turns JSONL \
        --recipe "3 blind damp0.01" --peer IQ3_S.gguf=F16_OF_IT.gguf --keep PARTS --json OUT

Matrices are rounded as `clocher quantize` does, and put back as floats (torch); activations are
fp32, so only the loss of the weights is seen. A recipe is bits and switches: dampD, the Hessian's
damping (0: rounded without correction); `blind`: tokens weigh alike, else half by their squared
gradients; mixN spreads N bits over the tensors by the Fisher information of their outputs. A peer
is a file whose size counts, and a copy of it in f16. Before llama-quantize channels were permuted,
so that none meets the grid that the floats came from, and rows laid end to end for blocks of 256.
"""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn

from bench import real
from bench.experiment import TEAM, experiment
from bench.record import Row
from clocher_kernels.formats import Format, Int8, Tcq
from clocher_kernels.formats.base import turn
from clocher_kernels.formats.tcq import GROUP, LEVELS
from clocher_kernels.quant_tensor import encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import COUNT, PATH
from clocher_runtime.convert import trellis
from clocher_runtime.quantize.alloc import Option, choose
from clocher_runtime.quantize.gptq import factorise

DISTORTION = {2: 0.0873, 3: 0.0239, 4: 0.00684, 5: 0.00233, 8: 1e-4}
"""Mean squared error of a normal distribution by bits of a weight."""


class Recipe(NamedTuple):
    """How a matrix is rounded."""

    bits: int
    damp: float = 0.05  # of the Hessian; 0: later columns are not corrected
    blind: bool = False  # the Hessian does not see which tokens matter
    mix: float = 0.0  # bits of a weight in all


def parse(text: str) -> Recipe:
    """Return the recipe that a text spells."""
    first, *words = text.split()
    own: dict[str, Any] = {}
    for word in words:
        name = word.rstrip("0123456789.")
        own[name] = float(word[len(name) :]) if word != name else True
    return Recipe(int(first), **own)


def format_of(bits: int) -> Format:
    """Return the format of a matrix with so many bits a weight."""
    return Tcq(bits) if bits in LEVELS else Int8("row", "f16")


def quantise(
    w: np.ndarray, hessian: np.ndarray, recipe: Recipe, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return w [N, K] rounded, and its loss tr(E H E^T) by row, [N], of a Hessian [K, K]."""
    own, fmt = turn(w, GROUP), format_of(recipe.bits)
    hessian = turn(np.ascontiguousarray(turn(hessian, GROUP).T), GROUP)
    if isinstance(fmt, Tcq):
        made = trellis.search(own, fmt, threads=threads)
        order = trellis.order_of(np.diagonal(hessian))
        if recipe.damp and (factor := factorise(hessian, recipe.damp, order=order)):
            made = trellis.solve(own, made, factor.order, factor.upper, threads=threads)
        out = made.stored()
    else:
        out = turn(encode(w, fmt).decode(), GROUP)
    wrong = own - out
    return turn(out, GROUP), np.einsum("nk,nk->n", wrong @ hessian, wrong)


class Study:
    """A model, and what its matrices read in one text."""

    def __init__(self, asked: Any, texts: real.Texts) -> None:
        self.model, self.threads, self.texts = loaded(asked.source), asked.threads, texts
        self.linears = {n: m for n, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        self.floats = {n: m.weight.detach() for n, m in self.linears.items()}
        self.hessians: dict[str, torch.Tensor] = {}
        self.fisher: dict[str, torch.Tensor] = {}
        self.blind: bool | None = None
        self.losses: dict[Recipe, dict[str, float]] = {}
        tokenizer = real.tokenizer_of(asked.source)
        (calib,) = real.windows_of(tokenizer, asked.calib, None, 1 << 16).values()
        self.windows = calib[:: max(1, len(calib) // asked.samples)][: asked.samples]

    def collect(self, blind: bool) -> None:
        """Sum x x^T of inputs and the squared gradients of outputs, for drawn tokens."""
        inputs: dict[str, torch.Tensor] = {}

        def note(name: str, _: nn.Module, given: tuple[torch.Tensor]) -> None:
            inputs[name] = given[0].detach().flatten(0, 1)

        def grads(name: str, _: nn.Module, __: Any, outputs: tuple[torch.Tensor]) -> None:
            x, square = inputs.pop(name), outputs[0].flatten(0, 1).square()
            self.fisher[name] += square.sum(0)
            weight = square.sum(1, keepdim=True)
            weight = weight / weight.mean().clamp_min(1e-30)
            weight = torch.ones_like(weight) if blind else 0.5 + 0.5 * weight
            self.hessians[name].addmm_((weight * x).T, x)

        hooks: list[Any] = []
        for name, module in self.linears.items():
            self.fisher[name] = torch.zeros(module.out_features)
            self.hessians[name] = torch.zeros(2 * (module.in_features,))
            hooks.append(module.register_forward_pre_hook(partial(note, name)))
            hooks.append(module.register_full_backward_hook(partial(grads, name)))
        self.put({})
        torch.manual_seed(0)
        for ids in self.windows:
            rows = self.model.get_input_embeddings()(torch.tensor([ids])).requires_grad_()
            logits = self.model(inputs_embeds=rows).logits[0]
            drawn = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
            nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
        for hook in hooks:
            hook.remove()
        self.blind = blind

    def put(self, matrices: Mapping[str, torch.Tensor]) -> None:
        """Replace weights; those that are not named become the model's own."""
        for name, module in self.linears.items():
            module.weight.data = matrices.get(name, self.floats[name])
        self.model.get_input_embeddings().weight = self.model.lm_head.weight

    def round(
        self, recipe: Recipe, bits: Mapping[str, int]
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Return the matrices of a recipe, and half the Fisher-weighted loss of each."""
        if self.blind is not recipe.blind:
            self.collect(recipe.blind)
        found, losses = {}, {}
        tokens = real.WINDOW * len(self.windows)
        for name, w in self.floats.items():
            hessian, own = self.hessians[name].numpy() / tokens, recipe._replace(bits=bits[name])
            out, loss = quantise(w.numpy(), hessian, own, self.threads)
            found[name] = torch.from_numpy(out)
            losses[name] = float(self.fisher[name].numpy() @ loss) / tokens / 2
        return found, losses

    def allocate(self, recipe: Recipe) -> dict[str, int]:
        """Return bits of each matrix, `mix` a weight in all."""
        if not recipe.mix:
            return dict.fromkeys(self.floats, recipe.bits)
        key = recipe._replace(mix=0.0)
        if key not in self.losses:
            self.losses[key] = self.round(key, self.allocate(key))[1]
        options = [
            [
                Option(fmt, fmt.nbytes(tuple(w.shape)), self.losses[key][name] * wrong)
                for fmt, wrong in ((format_of(bits), wrong) for bits, wrong in DISTORTION.items())
            ]
            for name, w in self.floats.items()
        ]
        budget = int(recipe.mix * sum(w.numel() for w in self.floats.values()) / 8)
        each = zip(self.floats, choose(options, budget).taken, strict=True)
        return {name: [*DISTORTION][taken] for name, taken in each}

    def nbytes(self, bits: Mapping[str, int]) -> int:
        """Return the bytes; vectors are fp32."""
        vectors = sum(4 * p.numel() for p in self.model.parameters() if p.ndim == 1)
        shapes = {name: tuple(w.shape) for name, w in self.floats.items()}
        return vectors + sum(format_of(bits[n]).nbytes(shape) for n, shape in shapes.items())

    def ours(self, text: str) -> real.Sums:
        """Return the bytes and the sums of a recipe."""
        recipe = parse(text)
        bits = self.allocate(recipe)
        made, losses = self.round(recipe, bits)
        self.put(made)
        found = {"bytes": self.nbytes(bits), "fisher": sum(losses.values())}
        return found | self.texts.sums(logits_of(self.model))


def loaded(path: Path) -> Any:
    """Return a GGUF model of f16 in fp32."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.requires_grad_(False).eval()


def logits_of(model: Any) -> real.Logits:
    """Return the logits of a model of torch."""
    return torch.no_grad()(lambda ids: model(torch.tensor([ids])).logits[0].numpy())


def theirs(text: str, texts: real.Texts) -> real.Sums:
    """Return the bytes and the sums of a peer's file."""
    file, floats = map(Path, text.split("="))
    # Beside the tensors there are names and the vocabulary, as in the copy of f16.
    more = file.stat().st_size - floats.stat().st_size
    nbytes = more + open_checkpoint(floats).nbytes
    return {"bytes": nbytes} | texts.sums(logits_of(loaded(floats)))


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
    parts, source = real.Parts(asked.keep, None), asked.source
    texts = real.Texts(asked, parts, asked.windows, lambda: logits_of(loaded(source)))
    study = cache(lambda: Study(asked, texts))
    params = sum(prod(tensor.shape) for tensor in open_checkpoint(source).tensors.values())

    def measure(text: str) -> real.Sums:
        return theirs(text, texts) if "=" in text else study().ours(text)

    about = {
        "model": source.stem,
        "calibration": f"{asked.samples} x {real.WINDOW} tokens of {asked.calib.name}",
        "evaluation": f"{asked.text.name}, {asked.turns.name}",
    }
    for text in (*asked.recipes, *asked.peers):
        peer = "=" in text
        name = Path(text.split("=")[0]).stem if peer else text
        parts.do(name, partial(measure, text))
        found = parts.get(name)
        row: Row = about | {"name": name, "bytes": int(found["bytes"])}
        if peer:
            row["calibration"] = f"importance matrix, {asked.calib.name}"
        row |= {"bits": 8 * found["bytes"] / params, "mib": found["bytes"] / (1 << 20)}
        row |= texts.fields(found)
        yield row | {"fisher": found.get("fisher"), "seconds": found["seconds"]}


if __name__ == "__main__":
    main()

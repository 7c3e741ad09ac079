r"""Two to five bits a weight: what `Tcq` loses at equal bytes of the whole model.

\b
    python -m bench low_bits --model-dir F16.gguf --calib-text CALIB --text TEXT --turns JSONL \
        --recipe "3 blind damp0.01" --peer IQ3_S.gguf=F16_OF_IT.gguf --keep PARTS --json OUT

Matrices are rounded and put back as floats (torch), activations are fp32, so only the loss of the
weights is seen. A recipe is bits and switches: dampD, the Hessian's damping (0: rounded without
correction); `blind`: tokens weigh alike, else half by their squared gradients; mixN spreads N bits
over the tensors by the Fisher information of their outputs. A peer is a file whose size counts, and
a copy of it in f16. Before llama-quantize channels were permuted, so that none meets the grid that
the floats came from, and rows laid end to end for blocks of 256.
"""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from bench import real
from bench.experiment import TEAM, experiment
from bench.low_bits_rounding import DISTORTION, Recipe, format_of, parse, prepare, quantise
from bench.record import Row
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import COUNT, PATH

_AT_ONCE = 128
_HEAD = "lm_head"
Matrices = dict[str, torch.Tensor]


class Study:
    """A model, what its matrices read in one text, and its hidden states on others."""

    def __init__(self, asked: Any) -> None:
        self.model, self.threads = loaded(asked.source), asked.threads
        self.linears = {n: m for n, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        self.floats = {n: m.weight.detach() for n, m in self.linears.items()}
        self.hessians: dict[str, torch.Tensor] = {}
        self.fisher: dict[str, torch.Tensor] = {}
        self.blind: bool | None = None
        self.losses: dict[Recipe, dict[str, float]] = {}
        tokenizer = real.tokenizer_of(asked.source)
        (calib,) = real.windows_of(tokenizer, asked.calib, None, 1 << 16).values()
        self.windows = calib[:: max(1, len(calib) // asked.samples)][: asked.samples]
        self.kinds = real.windows_of(tokenizer, asked.text, asked.turns, asked.windows)
        self.base = {kind: hidden(self.model, of) for kind, of in self.kinds.items()}

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

    def put(self, matrices: Matrices) -> None:
        """Replace weights; those that are not named become the model's own."""
        for name, module in self.linears.items():
            module.weight.data = matrices.get(name, self.floats[name])
        self.model.get_input_embeddings().weight = self.model.lm_head.weight

    def round(self, recipe: Recipe, bits: Mapping[str, int]) -> tuple[Matrices, dict[str, float]]:
        """Return the matrices of a recipe, and half the Fisher-weighted loss of each."""
        if self.blind is not recipe.blind:
            self.collect(recipe.blind)
        found, losses = Matrices(), {}
        tokens = real.WINDOW * len(self.windows)
        for name, w in self.floats.items():
            given = prepare(self.hessians[name].numpy() / tokens, recipe)
            out, loss = quantise(w.numpy(), given, recipe._replace(bits=bits[name]), self.threads)
            found[name] = torch.from_numpy(out)
            losses[name] = float(self.fisher[name].numpy() @ loss) / tokens / 2
        return found, losses

    def allocate(self, recipe: Recipe) -> dict[str, int]:
        """Return bits of each matrix, `mix` a weight in all."""
        even = dict.fromkeys(self.floats, recipe.bits)
        if not recipe.mix:
            return even
        key = recipe._replace(mix=0.0)
        if key not in self.losses:
            self.losses[key] = self.round(key, even)[1]
        loss, most = self.losses[key], max(DISTORTION)
        chosen = dict.fromkeys(self.floats, min(DISTORTION))
        more = dict(zip(DISTORTION, [*DISTORTION][1:], strict=False))

        def cost(name: str, bits: int) -> int:
            return format_of(bits).nbytes(tuple(self.floats[name].shape))

        def gain(name: str) -> float:
            now, then = chosen[name], more[chosen[name]]
            return (
                loss[name]
                * (DISTORTION[now] - DISTORTION[then])
                / (cost(name, then) - cost(name, now))
            )

        total = sum(w.numel() for w in self.floats.values())
        room = recipe.mix * total / 8 - sum(cost(*each) for each in chosen.items())
        while fits := [
            name
            for name, now in chosen.items()
            if now < most and cost(name, more[now]) - cost(name, now) <= room
        ]:
            best = max(fits, key=gain)
            room -= cost(best, more[chosen[best]]) - cost(best, chosen[best])
            chosen[best] = more[chosen[best]]
        return chosen

    def nbytes(self, bits: Mapping[str, int]) -> int:
        """Return the bytes; vectors are fp32."""
        vectors = sum(4 * p.numel() for p in self.model.parameters() if p.ndim == 1)
        shapes = {name: tuple(w.shape) for name, w in self.floats.items()}
        return vectors + sum(format_of(bits[n]).nbytes(shape) for n, shape in shapes.items())

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
        found = {"bytes": self.nbytes(bits), "fisher": sum(losses.values())}
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

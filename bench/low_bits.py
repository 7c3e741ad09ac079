r"""Two to five bits a weight: what each idea is worth at equal bytes of the whole model.

\b
    python -m bench low_bits --model-dir F16.gguf --calib-text CALIB --text TEXT --turns JSONL \
        --recipe "3 g64 s6 levels gptq" --peer IQ3_S.gguf=F16_OF_IT.gguf --keep PARTS --json OUT

A study, not a format: matrices are rounded and put back as floats (torch), activations are fp32, so
only the loss of the weights is seen. A recipe is bits and switches: gN weights share a scale of sN
bits under a row's f16 (s16: f16 alone); `levels` learns the values by k-means weighted by the
Hessian's diagonal (else they are uniform); `gptq` corrects later columns; rotN rotates inputs by
random signs and a Hadamard matrix of N; tcq3 codes rows of a column by a trellis of 2^3 states;
headN gives embeddings and head N bits; mixN spreads N bits over the tensors by the Fisher
information of their outputs. A peer is a file whose size counts, and a copy of it in f16; for
blocks of 256, four rows of 576 columns were laid end to end before llama-quantize.
"""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import numba
import torch
import transformers
from torch import nn

from bench import real
from bench.experiment import TEAM, experiment
from bench.low_bits_rounding import Recipe, parse, prepare, quantise
from bench.record import Row
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import COUNT, PATH

_AT_ONCE, _DRAWN, _MOST = 128, 4, 6
_HEAD = "lm_head"
Matrices = dict[str, torch.Tensor]


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

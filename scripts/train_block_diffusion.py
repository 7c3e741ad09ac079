#!/usr/bin/env python3
"""Turn a small Llama model into one that also decodes by block diffusion, on a CPU.

    python scripts/train_block_diffusion.py --model-dir MODEL --text DIR_OR_FILE ... \
        --held-out valid.txt --out-dir OUT --minutes 30 --threads 2

The recipe: each window of text goes through the model as three streams at once. Two noisy
streams hide some tokens of every block (each hides what the other shows) and guess them from
their block and the clean text before it; the third is the clean text with the ordinary causal
mask and the ordinary next-token loss. So the same weights decode one token at a time as before,
by diffusion (several tokens of a block per pass), and losslessly (a block drafted in one pass,
checked in one causal pass). The last fifth also sharpens what the model already guesses right.

--text takes files or directories (every .py below; tests, idlelib, encodings and site-packages
are left out). A file that the held-out text contains is never trained on.

What is written: config.json with "block_diffusion", model.safetensors (bf16), the tokenizer's
files and training.json (settings, times, losses). A checkpoint every minute lets --resume go on.

    python scripts/train_block_diffusion.py --evaluate --model-dir OUT --held-out valid.txt

prints the next-token loss on the held-out text, tokens per pass for several thresholds, and how
many drafted tokens the lossless mode accepts. Needs torch: pip install '.[torch]'.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from block_diffusion_torch import BadInput, Shape, Weights, load_model, losses, noise
from block_diffusion_torch_eval import autoregressive_loss, lossless, threshold
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

WARM_UP = 30
SAVE_SECONDS = 60.0
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95)
HELD_OUT_CHARACTERS = 60_000
WINDOW = 256
CONFIDENCE = 0.1
SKIPPED = {"test", "tests", "idlelib", "encodings", "site-packages", "__pycache__"}


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-dir", type=Path, required=True, help="the model to read")
    parser.add_argument("--text", type=Path, nargs="+", help="training text: files, directories")
    parser.add_argument("--held-out", type=Path, help="text never to be trained on")
    parser.add_argument("--out-dir", type=Path, help="where the converted model is written")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--evaluate", action="store_true", help="measure --model-dir instead")
    length.add_argument(
        "--minutes",
        type=float,
        help="processor time of the training, a thread (so 30 with --threads 2 is at most an hour "
        "of processor time); a machine that others use takes longer by the clock",
    )
    length.add_argument("--steps", type=int, help="or a number of steps (repeatable runs)")
    parser.add_argument(
        "--block-size",
        type=int,
        nargs="+",
        default=[4, 8],
        help="tokens per block; of several, each step draws one and config.json names the first",
    )
    parser.add_argument("--mask-token", default="<|mask|>", help="a token of the tokenizer")
    parser.add_argument("--batch", type=int, default=4, help=f"windows of {WINDOW} tokens a step")
    parser.add_argument("--lr", type=float, default=6e-4, help="peak; falls to a tenth (cosine)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--prompts", type=int, default=12, help="with --evaluate: texts to continue"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from OUT's checkpoint of a stopped training"
    )
    return parser


def source_files(paths: list[Path]) -> list[tuple[str, str]]:
    """(name, text) of each training file, in a fixed order."""
    found: list[tuple[str, str]] = []
    for path in paths:
        if path.is_file():
            found.append((path.name, path.read_text(encoding="utf-8", errors="replace")))
        elif path.is_dir():
            for file in sorted(path.rglob("*.py")):
                name = file.relative_to(path)
                if not SKIPPED & set(name.parts):
                    found.append((name.as_posix(), file.read_text("utf-8", errors="replace")))
        else:
            raise BadInput(f"--text {path}: no such file or directory")
    return found


def without_held_out(files: list[tuple[str, str]], held_out: str) -> list[tuple[str, str]]:
    """The files that the held-out text has neither a heading nor a third of the lines of."""
    known = {line for line in held_out.splitlines() if len(line) >= 24}
    kept = []
    for name, text in files:
        lines = {line for line in text.splitlines() if len(line) >= 24}
        headed = f"# {name}\n" in held_out
        if not headed and len(lines & known) * 3 <= len(lines):
            kept.append((name, text))
    return kept


def token_stream(tokenizer: Tokenizer, files: list[tuple[str, str]], end: int) -> torch.Tensor:
    """All files' ids in one row, an end token after each."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([f"# {name}\n{text}" for name, text in files]):
        ids += [*encoding.ids, end]
    if len(ids) < 2 * WINDOW:
        raise BadInput(f"--text holds {len(ids)} tokens; at least {2 * WINDOW} are needed")
    return torch.tensor(ids)


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Warm-up by steps, then a cosine over the run's progress (0..1) down to a tenth."""
    cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return peak * min(1.0, (step + 1) / WARM_UP) * cosine


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name, flush to the disk, then rename."""
    temporary = path.with_name(path.name + ".part")
    write(temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def save_model(
    args: argparse.Namespace, config: dict[str, object], mask_id: int, w: Weights
) -> None:
    """The Hugging Face directory of the converted model."""
    config = dict(config)
    config["block_diffusion"] = {
        "block_size": args.block_size[0],
        "mask_token_id": mask_id,
        "context": "causal",
    }
    half = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in w.items()}
    write_whole(
        args.out_dir / "model.safetensors", lambda p: save_file(half, p, metadata={"format": "pt"})
    )
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (args.model_dir / file).is_file():
            shutil.copyfile(args.model_dir / file, args.out_dir / file)
    text = json.dumps(config, indent=2) + "\n"
    write_whole(args.out_dir / "config.json", lambda p: p.write_text(text))


def write_checkpoint(
    path: Path,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    step: int,
    wall: float,
    cpu: float,
) -> None:
    """Weights, AdamW's moments and how far the training is, as a safetensors file."""
    tensors = {f"weights.{name}": tensor.detach() for name, tensor in weights.items()}
    for name, tensor in weights.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"{moment}.{name}"] = optimizer.state[tensor][moment]
    metadata = {"step": str(step), "wall": str(wall), "cpu": str(cpu)}
    write_whole(path, lambda part: save_file(tensors, part, metadata=metadata))


def read_checkpoint(
    path: Path, weights: Weights, optimizer: torch.optim.Optimizer
) -> tuple[int, float, float]:
    """Fill weights and moments in; (steps, wall seconds, processor seconds) so far."""
    if not path.is_file():
        raise BadInput(f"--resume: {path} is not there; start without --resume")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        names = set(file.keys())
        for name, tensor in weights.items():
            if f"weights.{name}" not in names:
                raise BadInput(f"--resume: {path} is of another model: it has no {name}")
            with torch.no_grad():
                tensor.copy_(file.get_tensor(f"weights.{name}"))
            optimizer.state[tensor] = {
                "step": torch.tensor(float(metadata["step"])),
                "exp_avg": file.get_tensor(f"exp_avg.{name}"),
                "exp_avg_sq": file.get_tensor(f"exp_avg_sq.{name}"),
            }
    return int(metadata["step"]), float(metadata["wall"]), float(metadata["cpu"])


def keep_freed_memory() -> None:
    """Tell glibc to keep what torch frees: each step would ask the kernel for it all again."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_max = -1, -4
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


def train(args: argparse.Namespace) -> None:
    """Read, train, write; progress goes to stderr."""
    if args.text is None or args.out_dir is None or (args.minutes is None and args.steps is None):
        raise BadInput("training needs --text, --out-dir, and --minutes or --steps")
    for block in args.block_size:
        if block < 2 or WINDOW % block:
            raise BadInput(f"--block-size {block}: expected a divisor of {WINDOW}, at least 2")
    keep_freed_memory()
    torch.set_grad_enabled(True)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    config, shape, weights = load_model(args.model_dir)
    tokenizer = Tokenizer.from_file(str(args.model_dir / "tokenizer.json"))
    mask_id = tokenizer.token_to_id(args.mask_token)
    if mask_id is None:
        raise BadInput(
            f"--mask-token {args.mask_token!r} is not in the tokenizer; name one that is"
        )
    end = config.get("eos_token_id")
    files = source_files(args.text)
    if args.held_out is not None:
        if not args.held_out.is_file():
            raise BadInput(f"--held-out {args.held_out}: no such file")
        whole = len(files)
        files = without_held_out(files, args.held_out.read_text(encoding="utf-8"))
        print(f"{whole - len(files)} of {whole} files are held out", file=sys.stderr)
    ids = token_stream(tokenizer, files, end if isinstance(end, int) else 0)
    print(f"{len(files)} files, {len(ids)} tokens, mask token id {mask_id}", file=sys.stderr)

    # The row of a token that no text holds was never trained: the mean is a neutral start.
    embedding = weights["model.embed_tokens.weight"]
    embedding[mask_id] = embedding.mean(0)
    for tensor in weights.values():
        tensor.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in weights.values() if w.ndim > 1], "weight_decay": 0.05},
            {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0},
        ],
        lr=args.lr,
        betas=(0.9, 0.95),
    )
    args.out_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out_dir / "training.checkpoint"
    step, wall_before, cpu_before = 0, 0.0, 0.0
    if args.resume:
        step, wall_before, cpu_before = read_checkpoint(checkpoint, weights, optimizer)

    started, cpu_started, saved = time.monotonic(), time.process_time(), time.monotonic()
    smooth = {"diffusion": 0.0, "autoregressive": 0.0}
    while True:
        wall = wall_before + time.monotonic() - started
        cpu = cpu_before + time.process_time() - cpu_started
        progress = step / args.steps if args.steps else cpu / (60 * args.minutes * args.threads)
        if progress >= 1:
            break
        # Each step's draws depend on the seed and the step alone, so a resumed run repeats them.
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        pick = int(torch.randint(len(args.block_size), (), generator=generator))
        block = args.block_size[pick]
        at = torch.randint(len(ids) - WINDOW, (args.batch,), generator=generator)
        batch = torch.stack([ids[i : i + WINDOW] for i in at.tolist()])
        masked = noise(args.batch, WINDOW, block, generator)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args.lr, step, progress)
        sharpen = CONFIDENCE * (progress >= 0.8)
        loss = losses(weights, shape, batch, masked, block, mask_id, sharpen)
        optimizer.zero_grad()
        loss.total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        keep = min(0.98, step / (step + 1))
        for name in smooth:
            smooth[name] = keep * smooth[name] + (1 - keep) * float(getattr(loss, name))
        step += 1
        if step % 10 == 0 or not sys.stderr.isatty():
            bar = "#" * int(30 * progress)
            tail = "\r" if sys.stderr.isatty() else "\n"
            if sys.stderr.isatty() or step % 10 == 0:
                print(
                    f"[{bar:30}] {progress:4.0%} step {step}  diffusion {smooth['diffusion']:.3f}"
                    f"  autoregressive {smooth['autoregressive']:.3f} nats"
                    f"  {cpu:.0f} s of processor time in {wall:.0f} s",
                    end=tail,
                    file=sys.stderr,
                    flush=True,
                )
        if time.monotonic() - saved >= SAVE_SECONDS:
            saved = time.monotonic()
            write_checkpoint(checkpoint, weights, optimizer, step, wall, cpu)
    report = {
        "steps": step,
        "tokens": step * args.batch * WINDOW,
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "threads": args.threads,
        "seed": args.seed,
        "block_sizes": args.block_size,
        "batch": args.batch,
        "lr": args.lr,
        "training_loss": {k: round(v, 4) for k, v in smooth.items()},
    }
    save_model(args, config, mask_id, weights)
    text = json.dumps(report, indent=2) + "\n"
    write_whole(args.out_dir / "training.json", lambda p: p.write_text(text))
    checkpoint.unlink(missing_ok=True)
    print(f"\nwrote {args.out_dir}: {text}", file=sys.stderr)


def evaluate(args: argparse.Namespace) -> dict[str, object]:
    """The figures of a model card, by --held-out."""
    if args.held_out is None or not args.held_out.is_file():
        raise BadInput(f"--held-out {args.held_out}: --evaluate needs a file of text")
    torch.set_num_threads(args.threads)
    config, shape, weights = load_model(args.model_dir)
    tokenizer = Tokenizer.from_file(str(args.model_dir / "tokenizer.json"))
    text = args.held_out.read_text(encoding="utf-8")[:HELD_OUT_CHARACTERS]
    ids = torch.tensor(tokenizer.encode(text).ids)
    if len(ids) < WINDOW:
        raise BadInput(f"--held-out holds {len(ids)} tokens; at least {WINDOW} are needed")
    found: dict[str, object] = {
        "autoregressive_loss": round(autoregressive_loss(weights, shape, ids), 4)
    }
    stated = config.get("block_diffusion")
    if not isinstance(stated, dict):
        return found
    mask_id = int(stated["mask_token_id"])
    space = (len(ids) - 128) // args.prompts
    prompts = [ids[i * space : i * space + 128].tolist() for i in range(args.prompts)]
    for block in args.block_size:
        found[f"block_{block}"] = decoding_figures(weights, shape, prompts, block, mask_id)
    return found


def decoding_figures(
    weights: Weights, shape: Shape, prompts: list[list[int]], block: int, mask_id: int
) -> dict[str, float]:
    """Tokens per pass of each threshold, and what lossless drafts are worth; 64 tokens each."""
    figures: dict[str, float] = {}
    for tau in THRESHOLDS:
        made = passes = 0
        for prompt in prompts:
            ids, taken = threshold(weights, shape, prompt, 64, block, mask_id, tau)
            made, passes = made + len(ids), passes + taken
        figures[f"tokens_per_pass_at_{tau}"] = round(made / passes, 3)
    drafts = accepted = 0
    for prompt in prompts:
        _, drafted, agreed = lossless(weights, shape, prompt, 64, block, mask_id)
        drafts, accepted = drafts + drafted, accepted + agreed
    figures["lossless_accepted_of_a_draft"] = round(accepted / drafts, 3)
    return figures


def main() -> int:
    """The command; a user's mistake is one line and status 2."""
    args = arguments().parse_args()
    try:
        if args.evaluate:
            print(json.dumps(evaluate(args), indent=2))
        else:
            train(args)
    except BadInput as error:
        print(f"train_block_diffusion: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

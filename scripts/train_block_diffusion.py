#!/usr/bin/env python3
"""Turn a small Llama model into one that also decodes by block diffusion, on a CPU.

    python scripts/train_block_diffusion.py --model-dir MODEL --text DIR_OR_FILE ... \
        --held-out valid.txt --out-dir OUT --minutes 30 --threads 2

The recipe: each window of text goes through the model as three streams at once. Two noisy
streams mask some tokens of every block (each masks what the other shows) and predict them from
their block and the clean text before it; the third is the clean text with the ordinary causal
mask and the ordinary next-token loss. So the same weights decode one token at a time as before,
by diffusion (several tokens of a block per forward), and losslessly (a block drafted in one
forward, verified in a causal one). The last fifth also sharpens right predictions.

--text takes files or directories (every .py below; tests, idlelib, encodings and site-packages
are left out). A file that the held-out text contains is never trained on.

What is written: config.json with "block_diffusion", model.safetensors (bf16), the tokenizer's
files and training.json (settings, times, losses).

Needs torch: pip install '.[torch]'. `clocher perplexity` tells the next-token loss of the result,
`clocher run --diffusion threshold:0.9` its tokens per forward.
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
from block_diffusion_torch import BadInput, Weights, load_model, losses, noise
from safetensors.torch import save_file
from tokenizers import Tokenizer

WARM_UP = 30
WINDOW = 256
CONFIDENCE = 0.1
SKIPPED = {"test", "tests", "idlelib", "encodings", "site-packages", "__pycache__"}


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model-dir", type=Path, required=True, help="the model to read")
    add("--text", type=Path, nargs="+", help="training text: files, directories")
    add("--held-out", type=Path, help="text never to be trained on")
    add("--out-dir", type=Path, help="where the converted model is written")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="processor time of each thread")
    length.add_argument("--steps", type=int, help="or a number of steps (repeatable runs)")
    add(
        "--block-size",
        type=int,
        nargs="+",
        default=[4, 8],
        help="tokens per block; of several, each step draws one and config.json names the first",
    )
    add("--mask-token", default="<|mask|>", help="a token of the tokenizer")
    add("--batch", type=int, default=4, help=f"windows of {WINDOW} tokens a step")
    add("--lr", type=float, default=6e-4, help="peak; falls to a tenth (cosine)")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=os.cpu_count() or 1)
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
    """Drop files whose heading, or over a third of whose lines, the held-out text contains."""
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


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, so that steps need not fault it in again."""
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

    # The row of a token absent from all text was never trained: the mean is a neutral start.
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
    step, started, cpu_started = 0, time.monotonic(), time.process_time()
    smooth = {"diffusion": 0.0, "autoregressive": 0.0}
    while True:
        wall, cpu = time.monotonic() - started, time.process_time() - cpu_started
        progress = step / args.steps if args.steps else cpu / (60 * args.minutes * args.threads)
        if progress >= 1:
            break
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
        if step % 10 == 0:
            means = "  ".join(f"{name} {value:.3f}" for name, value in smooth.items())
            end = "\r" if sys.stderr.isatty() else "\n"
            line = f"{progress:4.0%} step {step}  {means} nats  {cpu:.0f} s of processor time"
            print(f"{line} in {wall:.0f} s", end=end, file=sys.stderr, flush=True)
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
    print(f"\nwrote {args.out_dir}: {text}", file=sys.stderr)


def main() -> int:
    """Run the command; a user's mistake is one line and status 2."""
    try:
        train(arguments().parse_args())
    except BadInput as error:
        print(f"train_block_diffusion: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

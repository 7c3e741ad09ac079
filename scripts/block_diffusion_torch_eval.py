"""What a converted model is worth, in torch and without a cache: for its card, not for speed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from block_diffusion_torch import Shape, Weights, head, hidden_states

WINDOW = 256


def text_logits(
    weights: Weights, shape: Shape, ids: list[int], committed: int, rows: slice
) -> torch.Tensor:
    """Logits [rows, vocab] of a text whose first `committed` tokens see only what precedes them.

    The tokens after them, an active block, see everything.
    """
    length = len(ids)
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    sees[committed:] = True
    hidden = hidden_states(weights, shape, torch.tensor([ids]), torch.arange(length), sees)
    return head(weights, shape, hidden[0, rows])


@torch.no_grad()
def autoregressive_loss(weights: Weights, shape: Shape, ids: torch.Tensor) -> float:
    """Mean nats per token over consecutive windows of 256 tokens, each alone; the rest is left."""
    total, windows = 0.0, len(ids) // WINDOW
    sees = torch.ones(WINDOW, WINDOW, dtype=torch.bool).tril()
    for i in range(windows):
        batch = ids[None, i * WINDOW : (i + 1) * WINDOW]
        hidden = hidden_states(weights, shape, batch, torch.arange(WINDOW), sees)
        total += float(F.cross_entropy(head(weights, shape, hidden[0, :-1]), batch[0, 1:]))
    return total / windows


@torch.no_grad()
def threshold(
    weights: Weights,
    shape: Shape,
    prompt: list[int],
    count: int,
    block: int,
    mask_id: int,
    tau: float,
) -> tuple[list[int], int]:
    """(ids of at least `count` tokens after the prompt, passes) by the threshold rule.

    A pass commits every masked token whose probability is above tau, or else the surest one;
    never the mask itself. The passes are those that denoise: with a fused commit there are no
    others. The first block begins with the rest of the prompt that fills no block.
    """
    ids, passes = list(prompt), 0
    while len(ids) < len(prompt) + count:
        start = len(ids) // block * block
        text = ids + [mask_id] * (start + block - len(ids))
        while mask_id in text[len(ids) :]:
            logits = text_logits(weights, shape, text, start, slice(start, None))
            logits[:, mask_id] = -torch.inf
            chance, chosen = logits.softmax(-1).max(-1)
            passes += 1
            masked = [i for i in range(block) if text[start + i] == mask_id]
            sure = [i for i in masked if chance[i] > tau]
            for i in sure or [max(masked, key=lambda i: float(chance[i]))]:
                text[start + i] = int(chosen[i])
        ids = text
    return ids[len(prompt) :], passes


@torch.no_grad()
def lossless(
    weights: Weights, shape: Shape, prompt: list[int], count: int, block: int, mask_id: int
) -> tuple[list[int], int, int]:
    """(ids after the prompt, drafted blocks, accepted tokens) of drafting and verifying.

    A bidirectional pass guesses a block of masks behind the text; a causal one tells how many
    of the guesses are the model's own greedy tokens, and the one that follows them.
    """
    ids, drafts, accepted = list(prompt), 0, 0
    while len(ids) < len(prompt) + count:
        known = len(ids)
        logits = text_logits(
            weights, shape, ids + [mask_id] * block, known, slice(known, known + block)
        )
        logits[:, mask_id] = -torch.inf
        draft = logits.argmax(-1).tolist()
        logits = text_logits(weights, shape, ids + draft, known + block, slice(known - 1, None))
        own = logits.argmax(-1).tolist()
        agreed = next((i for i in range(block) if draft[i] != own[i]), block)
        ids += own[: agreed + 1]
        drafts, accepted = drafts + 1, accepted + agreed
    return ids[len(prompt) :], drafts, accepted

"""A Llama forward in torch with a free attention mask, for block-diffusion training.

A sequence is laid out as streams that share their positions: noisy ones (some tokens are the mask
token) and a clean one. A noisy row sees its own block and the clean tokens of earlier blocks; a
clean row is causal, so the clean stream stays the ordinary autoregressive model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]


class BadInput(ValueError):
    """Unusable user input; the text has the reason and the next step."""


@dataclass(frozen=True)
class Shape:
    """The fields of a Llama config.json that the forward needs."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    eps: float
    theta: float
    tied: bool


_UNSUPPORTED = (
    ("model_type", "llama", "only 'llama' models are converted"),
    ("attention_bias", False, "only models without biases are converted"),
    ("mlp_bias", False, "only models without biases are converted"),
    ("hidden_act", "silu", "only 'silu' is converted"),
)


def read_shape(config: dict[str, object]) -> Shape:
    """The shape of a plain Llama model; BadInput if this forward cannot compute it."""
    for name, only, why in _UNSUPPORTED:
        if config.get(name, None if name == "model_type" else only) != only:
            raise BadInput(f"{name} is {config.get(name)!r}; {why}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    assert isinstance(rope, dict)
    if rope.get("rope_type", "default") != "default":
        raise BadInput(f"rope_type is {rope['rope_type']!r}; only 'default' is converted")

    def integer(name: str, default: int | None = None) -> int:
        value = config.get(name, default)
        if not isinstance(value, int):
            raise BadInput(f"config.json: {name} is {value!r}; expected an integer")
        return value

    def number(value: object) -> float:
        if not isinstance(value, int | float):
            raise BadInput(f"config.json: {value!r} is no number")
        return float(value)

    heads, hidden = integer("num_attention_heads"), integer("hidden_size")
    return Shape(
        layers=integer("num_hidden_layers"),
        heads=heads,
        kv_heads=integer("num_key_value_heads", heads),
        head_dim=integer("head_dim", hidden // heads),
        hidden=hidden,
        vocab=integer("vocab_size"),
        eps=number(config.get("rms_norm_eps", 1e-6)),
        theta=number(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def load_model(directory: Path) -> tuple[dict[str, object], Shape, Weights]:
    """(config, shape, float32 weights) of a model directory with one model.safetensors."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (directory / name).is_file():
            raise BadInput(f"{directory}: no {name}; expected a Hugging Face model directory")
    try:
        config = json.loads((directory / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise BadInput(f"{directory / 'config.json'}: not JSON ({error})") from error
    shape = read_shape(config)
    weights = {k: v.float() for k, v in load_file(directory / "model.safetensors").items()}
    return config, shape, weights


def rope(positions: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [len(positions), head_dim / 2]."""
    half = shape.head_dim // 2
    frequency = shape.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double()[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, halves convention; x [..., tokens, head_dim]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def hidden_states(
    weights: Weights, shape: Shape, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The normed last hidden states [N, T, hidden].

    ids [N, T]; positions [T]; mask bool, broadcastable to [N, 1, T, T], True where a row sees.
    """
    rows, length = ids.shape
    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    cos, sin = rope(positions, shape)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (shape.hidden,), weights[name], shape.eps)

    def heads(x: torch.Tensor, name: str, count: int) -> torch.Tensor:
        return F.linear(x, weights[name]).view(rows, length, count, -1).transpose(1, 2)

    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm.weight")
        q = rotate(heads(h, at + "self_attn.q_proj.weight", shape.heads), cos, sin)
        k = rotate(heads(h, at + "self_attn.k_proj.weight", shape.kv_heads), cos, sin)
        v = heads(h, at + "self_attn.v_proj.weight", shape.kv_heads)
        repeat = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
        y = y.transpose(1, 2).reshape(rows, length, -1)
        x = x + F.linear(y, weights[at + "self_attn.o_proj.weight"])
        h = norm(x, at + "post_attention_layernorm.weight")
        gate = F.silu(F.linear(h, weights[at + "mlp.gate_proj.weight"]))
        up = F.linear(h, weights[at + "mlp.up_proj.weight"])
        x = x + F.linear(gate * up, weights[at + "mlp.down_proj.weight"])
    return norm(x, "model.norm.weight")


def head(weights: Weights, shape: Shape, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [..., vocab] of normed hidden states."""
    name = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    return F.linear(hidden, weights[name])


def stream_mask(length: int, block: int, noisy: int) -> torch.Tensor:
    """Bool [(noisy+1)*length]^2: what each row of [noisy streams | clean stream] sees."""
    i = torch.arange(length)
    own = i[:, None] // block == i[None] // block
    earlier = i[None] // block < i[:, None] // block
    causal = i[None] <= i[:, None]
    mask = torch.zeros((noisy + 1) * length, (noisy + 1) * length, dtype=torch.bool)
    clean = slice(noisy * length, None)
    for stream in range(noisy):
        rows = slice(stream * length, (stream + 1) * length)
        mask[rows, rows], mask[rows, clean] = own, earlier
    mask[clean, clean] = causal
    return mask


def noise(rows: int, length: int, block: int, generator: torch.Generator) -> torch.Tensor:
    """Bool [rows, length]: the tokens that the first noisy stream masks; the second masks the rest.

    Half of the blocks are as the decoder first sees them: all masked, or all but the first token.
    In the others each token is masked with probability t from U(.3, 1), stratified over a row's
    blocks (antithetic).
    """
    blocks = length // block
    spread = (torch.rand(rows, 1, generator=generator) + torch.arange(blocks) / blocks) % 1.0
    order = torch.rand(rows, blocks, generator=generator).argsort(1)
    t = 0.3 + 0.7 * spread.gather(1, order)
    masked = torch.rand(rows, blocks, block, generator=generator) < t[..., None]
    kind = torch.rand(rows, blocks, 1, generator=generator)
    first = torch.arange(block) >= 1
    masked = torch.where(kind < 0.5, first.expand_as(masked), masked)
    masked = masked | (kind < 0.25)
    return masked.view(rows, length)


@dataclass(frozen=True)
class Losses:
    """Mean losses in nats per token; `total` is what is minimised."""

    total: torch.Tensor
    diffusion: torch.Tensor
    autoregressive: torch.Tensor


def losses(
    weights: Weights,
    shape: Shape,
    ids: torch.Tensor,
    masked: torch.Tensor,
    block: int,
    mask_id: int,
    confidence: float,
) -> Losses:
    """Both objectives of a batch; ids [N, T] clean, masked [N, T] of the first noisy stream.

    Masks are complementary: every token is a noisy target exactly once, so the plain mean replaces
    CE/t. `confidence` weighs the entropy at positions whose best token is right (LLaDA2).
    """
    length = ids.shape[1]
    streams = [torch.where(masked, mask_id, ids), torch.where(masked, ids, mask_id), ids]
    positions = torch.arange(length).repeat(3)
    sees = stream_mask(length, block, 2)
    hidden = hidden_states(weights, shape, torch.cat(streams, 1), positions, sees)
    first, second, clean = (hidden[:, i * length : (i + 1) * length] for i in range(3))
    logits = head(weights, shape, torch.where(masked[..., None], first, second)).float()
    diffusion = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    ahead = head(weights, shape, clean[:, :-1]).float()
    autoregressive = F.cross_entropy(ahead.flatten(0, 1), ids[:, 1:].flatten())
    total = diffusion + autoregressive
    if confidence:
        right = logits.argmax(-1) == ids
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        total = total + confidence * (entropy * right).sum() / right.sum().clamp(min=1)
    return Losses(total, diffusion.detach(), autoregressive.detach())

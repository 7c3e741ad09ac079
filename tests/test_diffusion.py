"""Block diffusion: what a session makes beside a loop that computes everything anew."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import make
from sessions import make_session
from transformers import PreTrainedModel

from clocher_kernels.errors import FormatError, UnsupportedModel, UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.requests import Token

BLOCK, PART = 4, 2
PROMPTS = ([5, 9, 7, 30, 4, 8, 1], [11, 12, 13, 14, 15, 16, 17, 18], [3], list(range(1, 40)))
NEW = 21
_RULES = ("static:4", "static:1", "static:2", "dynamic:0.5", "threshold:0.02", "factor:1.9")
_RULES = (*_RULES, "entropy:3", "joint:0.02,0.03")


class Reference:
    """A model of transformers that sees what a mask says, and no cache.

    Args:
        model: of torch.
        context: "causal", "block", or "shift" where logits of the latter are of the next token.
        mask: id of the mask.
    """

    def __init__(self, model: PreTrainedModel, context: str, mask: int) -> None:
        self.model, self.context, self.mask = model.float(), context, mask
        model.config._attn_implementation = "eager"

    def logits(self, known: list[int], canvas: list[int]) -> np.ndarray:
        """Return the logits [B, V] of a canvas behind finished blocks."""
        start, total = len(known), len(known) + len(canvas)
        seen = np.zeros((total, total), bool)
        for row in range(total):
            end = row + 1 if self.context == "causal" else (row // BLOCK + 1) * BLOCK
            seen[row, : end if row < start else total] = True
        added = torch.where(torch.tensor(seen), 0.0, torch.finfo(torch.float32).min)
        with torch.no_grad():
            out = self.model(torch.tensor([known + canvas]), attention_mask=added[None, None])
        return out.logits[0, start if canvas else -1 :].numpy()

    def chance(self, known: list[int], canvas: list[int]) -> np.ndarray:
        """Return the probabilities [B, V] f64 of tokens other than the mask."""
        logits = self.logits(known, canvas).astype(np.float64)
        if self.context == "shift" and canvas:
            logits = np.concatenate([logits[:1], logits[:-1]])
        logits[:, self.mask] = -np.inf
        chance = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(chance / chance.sum(axis=1, keepdims=True))

    def text(self, prompt: list[int], new: int, rule: str) -> tuple[list[int], int]:
        """Return the tokens behind a prompt, and the passes: rules written out, block by block."""
        ids, passes = list(prompt), 0
        while len(ids) < len(prompt) + new:
            start = len(ids) // BLOCK * BLOCK
            known, own = ids[:start], len(ids) - start
            canvas = ids[start:] + [self.mask] * (BLOCK - own)
            spent = 0
            part = PART if self.context == "shift" else BLOCK
            if self.context == "shift" and not own:
                canvas[0], own = int(self.chance(known, []).argmax()), 1
                passes += 1
            while True:
                chance = self.chance(known, canvas)
                passes += 1
                before = list(canvas)
                spent += self.mask not in canvas[own:]
                canvas = written(rule, chance, canvas, self.mask, own, part)
                if rule.startswith("joint"):
                    if self.mask not in canvas[own:] and (canvas == before or spent >= 16):
                        break
                elif self.mask not in canvas[own:]:
                    break
            ids = known + canvas
        return ids[len(prompt) :][:new], passes


def written(
    rule: str, chance: np.ndarray, canvas: list[int], mask: int, own: int, part: int
) -> list[int]:
    """Return a canvas after a pass. Position by position, as the papers say it."""
    name, _, rest = rule.partition(":")
    numbers = [float(n) for n in rest.split(",")]
    best = [int(np.argmax(row)) for row in chance]
    open_ = [at for at in range(own, BLOCK) if canvas[at] == mask]
    p = {at: chance[at][best[at]] for at in open_ if at // part == open_[0] // part}
    order = sorted(p, key=lambda at: (-p[at], at))
    usual = order[: int(np.ceil(BLOCK / (numbers[0] if name == "static" else 4)))]
    above = [at for at in order if p[at] > numbers[0]]
    if name == "static":
        take = usual
    elif name == "dynamic":
        take = above if len(above) >= len(usual) else usual
    elif name in ("threshold", "joint"):
        take = above or order[:1]
    elif name == "factor":
        fits = [n for n in range(1, len(order) + 1) if (n + 1) * (1 - p[order[n - 1]]) < numbers[0]]
        take = order[: max(fits, default=1)]
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = {at: -np.nansum(chance[at] * np.log(chance[at])) for at in p}
        rising = sorted(p, key=lambda at: (spread[at], at))
        take = []
        for at in rising:
            if sum(spread[other] for other in take) > numbers[0]:
                break
            take.append(at)
    out = list(canvas)
    for at in take:
        out[at] = best[at]
    if name == "joint":
        for at in range(own, BLOCK):
            if canvas[at] != mask and best[at] != canvas[at] and chance[at][best[at]] > numbers[1]:
                out[at] = best[at]
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make("llama", 3, path)
    return path


def denoising(folder: Path, context: str, to: Path) -> Model:
    """Return a model with the entry that says that it denoises blocks."""
    to.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    mask = config["vocab_size"] - 2
    config["block_diffusion"] = {
        "block_size": BLOCK,
        "mask_token_id": mask,
        "context": "block" if context == "shift" else context,
        **({"shift": True, "sub_block_size": PART} if context == "shift" else {}),
    }
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    (to / "config.json").write_text(json.dumps(config))
    return load_model(open_checkpoint(to))


def context_of(model: Model) -> str:
    blocks = model.spec.diffusion
    assert blocks is not None
    return "shift" if blocks.shift else blocks.context


@pytest.fixture(scope="module", params=["causal", "block", "shift"])
def model(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: Any) -> Iterator[Model]:
    found = denoising(folder, request.param, tmp_path_factory.mktemp(request.param))
    yield found
    found.checkpoint.release()


@pytest.fixture(scope="module")
def causal(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    found = denoising(folder, "causal", tmp_path_factory.mktemp("lossless"))
    yield found
    found.checkpoint.release()


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return make("llama", 3, tmp_path_factory.mktemp("torch"))


def made(
    model: Model, prompts: Any, new: int = NEW, ask: dict[str, Any] | None = None, **settings: Any
) -> list[list[Token]]:
    """Return the tokens of each prompt."""
    settings = {"batch": len(prompts), "context": 96, "kv_dtype": "f32"} | settings
    session = make_session(model, **settings)
    try:
        out: list[list[Token]] = [[] for _ in prompts]
        for token in session.generate(prompts, new, **{"stop_ids": frozenset(), **(ask or {})}):
            out[token.sequence].append(token)
        return out
    finally:
        session.close()


def ids_of(found: list[list[Token]]) -> list[list[int]]:
    return [[token.id for token in tokens] for tokens in found]


@pytest.mark.parametrize("rule", _RULES)
@pytest.mark.one_in(3)
def test_cached_blocks_are_those_of_a_loop_without_a_cache(
    model: Model, torch_model: PreTrainedModel, rule: str
) -> None:
    blocks = model.spec.diffusion
    assert blocks is not None
    reference = Reference(torch_model, context_of(model), blocks.mask)
    found = made(model, PROMPTS, diffusion=rule)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        expected, passes = reference.text(list(prompt), NEW, rule)
        assert [token.id for token in tokens] == expected
        assert blocks.mask not in expected
        # The pass that writes a block denoises the next one: passes are steps.
        whole = (len(prompt) + NEW) % BLOCK == 0
        assert tokens[-1].forwards == passes if whole else tokens[-1].forwards <= passes
        assert not any(token.forwards for token in tokens[:-1])


def test_logits_are_those_that_a_token_was_written_from(
    model: Model, torch_model: PreTrainedModel
) -> None:
    blocks = model.spec.diffusion
    assert blocks is not None
    reference = Reference(torch_model, context_of(model), blocks.mask)
    prompt = list(PROMPTS[1])
    (tokens,) = made(model, [prompt], 8, {"logits": True}, diffusion="static:1")
    ids, masks, rows = prompt + [token.id for token in tokens], [blocks.mask] * BLOCK, []
    for start in (8, 12):
        if not blocks.shift:
            rows.append(reference.logits(ids[:start], masks))
            continue
        rows.append(reference.logits(ids[:start], []))
        first = reference.logits(ids[:start], [ids[start], *masks[1:]])
        second = reference.logits(ids[:start], [*ids[start : start + 2], *masks[2:]])
        rows += [first[:1], second[1:3]]
    expected = np.concatenate(rows)
    found = np.array([token.logits for token in tokens])
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("rule", ["threshold:0.02", "joint:0.02,0.03", "lossless"])
def test_alone_in_a_batch_in_pieces_and_after_preemption(
    model: Model, causal: Model, rule: str
) -> None:
    model = causal if rule == "lossless" else model
    prompts = [*PROMPTS, list(range(2, 70))]
    alone = [ids_of(made(model, [p], diffusion=rule))[0] for p in prompts]
    assert ids_of(made(model, prompts, diffusion=rule)) == alone
    assert ids_of(made(model, prompts, diffusion=rule, batch=2)) == alone
    # Pieces of 10 tokens; two pages of 64 cells for all.
    few = made(model, prompts, diffusion=rule, chunk=10, kv_pages=3, prefix_cache=True)
    assert ids_of(few) == alone


def test_lossless_gives_the_ids_of_one_token_after_the_other(causal: Model) -> None:
    plain = made(causal, PROMPTS, 40, diffusion="off")
    found = made(causal, PROMPTS, 40)
    assert ids_of(found) == ids_of(plain)
    assert all(tokens[-1].forwards == 40 for tokens in plain)
    assert all(tokens[-1].forwards <= 40 for tokens in found)
    ends = frozenset(ids_of(plain)[0][7:9])
    cut = {"stop_ids": ends}
    assert made(causal, PROMPTS, 40, cut) == made(causal, PROMPTS, 40, cut, diffusion="off")


def test_lossless_draws_the_same_tokens(causal: Model) -> None:
    ask = {"sampling": Sampling(temperature=1.0, top_p=0.9, seed=5)}
    assert made(causal, PROMPTS, ask=ask) == made(causal, PROMPTS, ask=ask, diffusion="off")


def test_a_drawn_text_depends_on_its_seed_alone(model: Model) -> None:
    def drawn(seed: int, prompts: Any) -> list[list[int]]:
        ask = {"sampling": Sampling(temperature=1.0, seed=seed)}
        return ids_of(made(model, prompts, ask=ask, diffusion="static:2"))

    first = drawn(1, PROMPTS)
    assert first == [drawn(1, [prompt])[0] for prompt in PROMPTS]
    assert first != drawn(2, PROMPTS)
    blocks = model.spec.diffusion
    assert blocks is not None and all(blocks.mask not in ids for ids in first)


def test_an_end_token_ends_inside_a_block(model: Model) -> None:
    whole = ids_of(made(model, PROMPTS[:1], diffusion="static:1"))[0]
    at = next(i for i, token in enumerate(whole) if whole.index(token) == i and i % 4 == 1)
    (cut,) = made(model, PROMPTS[:1], ask={"stop_ids": {whole[at]}}, diffusion="static:1")
    assert [token.id for token in cut] == whole[: at + 1]
    assert cut[-1].finish == "stop"


def test_texts_of_both_kinds_share_passes(causal: Model) -> None:
    session = make_session(causal, batch=4, context=96, kv_dtype="f32")
    kinds = ("off", "threshold:0.02", "lossless", "joint:0.02,0.03")
    try:
        calls = [
            session.generate([prompt], NEW, stop_ids=frozenset(), diffusion=kind)
            for prompt, kind in zip(PROMPTS, kinds, strict=True)
        ]
        found: list[list[int]] = [[] for _ in kinds]
        for tokens in zip(*calls, strict=True):
            for ids, token in zip(found, tokens, strict=True):
                ids.append(token.id)
    finally:
        session.close()
    for ids, prompt, kind in zip(found, PROMPTS, kinds, strict=True):
        assert ids == ids_of(made(causal, [prompt], diffusion=kind))[0]


def test_a_text_finds_no_keys_of_one_that_was_scored(model: Model) -> None:
    """A text is scored as a decoder reads it, which is not how whole blocks are read."""
    prompt = list(range(2, 72))  # more than a page
    (alone,) = ids_of(made(model, [prompt], diffusion="static:2"))
    settings = {"context": 96, "kv_dtype": "f32", "prefix_cache": True, "all_logits": True}
    session = make_session(model, **settings, diffusion="static:2")
    try:
        session.logits(prompt)
        for cached in (0 if context_of(model) != "causal" else 64, 64):
            tokens = list(session.generate([prompt], NEW, stop_ids=frozenset()))
            assert [token.id for token in tokens] == alone
            assert tokens[0].cached == cached
    finally:
        session.close()


def test_a_prompt_with_the_mask_in_it_keeps_it(model: Model, torch_model: PreTrainedModel) -> None:
    blocks = model.spec.diffusion
    assert blocks is not None
    prompt = [4, 8, 1, 6, 9, blocks.mask]
    reference = Reference(torch_model, context_of(model), blocks.mask)
    expected, _ = reference.text(prompt, 10, "static:4")
    assert ids_of(made(model, [prompt], 10, diffusion="static:4")) == [expected]


def test_the_context_holds_whole_blocks(model: Model) -> None:
    (tokens,) = made(model, [[1, 2, 3]], 400, context=30, diffusion="static:1")
    assert len(tokens) == 28 - 3
    assert tokens[-1].finish == "length"
    with pytest.raises(UsageError, match="no room for a block"):
        made(model, [list(range(28))], context=30, diffusion="static:1")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("often", "diffusion: got 'often', expected one of static"),
        ("threshold:2", "from 0 to 1"),
        ("threshold:", "takes 1 number"),
        ("static:1.5", "takes 1 number"),
        ("joint:0.5", "takes 2 numbers"),
        ("factor:-1", "takes 1 number"),
        (3, "diffusion: got 3, expected auto, off, lossless or a rule"),
    ],
)
def test_what_cannot_be_asked_for(causal: Model, asked: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        make_session(causal, diffusion=asked)


def test_who_has_no_blocks(folder: Path, causal: Model, tmp_path: Path) -> None:
    plain = load_model(open_checkpoint(folder))
    with pytest.raises(UsageError, match="does not denoise blocks"):
        make_session(plain, diffusion="lossless")
    session = make_session(plain)
    assert session.diffusion == "off"
    with pytest.raises(UsageError, match="decodes no blocks"):
        next(session.generate([[1]], 2, diffusion="static:4"))
    session.close()
    plain.checkpoint.release()
    with pytest.raises(UsageError, match="drafted by the model itself"):
        make_session(causal, speculate="suffix")
    block = denoising(folder, "block", tmp_path / "block")
    for asked in ("off", "lossless"):
        with pytest.raises(UsageError, match="see each other"):
            make_session(block, diffusion=asked)
    block.checkpoint.release()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"block_size": 3}, "block_size"),
        ({"mask_token_id": 1 << 20}, "mask token"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"context": "wide"}, "context"),
        ({"shift": True}, "shifted logits"),
        ({"sub_block_size": 3}, "divisor of block_size"),
    ],
)
def test_damaged_entries_of_a_config(
    folder: Path, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["block_diffusion"] = {"block_size": 4, "mask_token_id": 1, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((FormatError, UnsupportedModel), match=told):
        load_model(open_checkpoint(tmp_path))


@pytest.mark.parametrize("pays", [True, False])
def test_blocks_are_guessed_while_that_is_faster(
    causal: Model, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(causal, context=160, kv_dtype="f32")
    step, sizes = session.executor.step, []

    def noted(tokens: int, rows: int) -> None:
        sizes.append(tokens)
        step(tokens, rows)

    session.executor.step = noted  # type: ignore[method-assign]
    costs = session.scheduler.forwards.costs
    costs.note(1, 1 << 60 if pays else 1)
    monkeypatch.setattr(costs, "note", lambda tokens, ns: None)
    try:
        ids = [token.id for token in session.generate([PROMPTS[0]], 140, stop_ids=frozenset())]
    finally:
        session.close()
    assert ids == ids_of(made(causal, PROMPTS[:1], 140, context=160, diffusion="off"))[0]
    behind = sizes[1:-BLOCK]  # at the end there is no room
    bare = [i for i, size in enumerate(behind) if size == 1]
    assert bare[:2] == [1, 33] if pays else len(bare) > 60

"""The trained model that denoises blocks: three ways to decode from one file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sessions import make_session

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.speculation.gate import Trial
from clocher_runtime.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
PROMPT, NEW = 64, 96


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    found = load_model(open_checkpoint(DATA / "clocher-tiny-blocks"))
    yield found
    found.checkpoint.release()


def decoded(model: Model, texts: int, diffusion: str) -> tuple[list[list[int]], float]:
    """Go on with pieces of held-out code; return the ids of each, and tokens a pass."""
    checkpoint = model.checkpoint
    tokenizer = Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)
    ids = tokenizer.encode((DATA / "valid.txt").read_text(encoding="utf-8")[:250_000])
    apart = len(ids) // texts
    prompts = [ids[i * apart :][:PROMPT] for i in range(texts)]
    session = make_session(model, batch=8, context=256, diffusion=diffusion)
    made: list[list[int]] = [[] for _ in prompts]
    passes = 0
    try:
        for token in session.generate(prompts, NEW, stop_ids=frozenset()):
            made[token.sequence].append(token.id)
            passes += token.forwards
    finally:
        session.close()
    return made, texts * NEW / passes


@pytest.mark.parametrize(
    "texts", [pytest.param(4, id="some"), pytest.param(105, id="10 k", marks=pytest.mark.slow)]
)
def test_lossless_ids_are_those_of_the_model(
    model: Model, texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks are guessed whatever that costs.
    monkeypatch.setattr(Trial, "note", lambda *_: None)
    ids, a_pass = decoded(model, texts, "lossless")
    plain, one = decoded(model, texts, "off")
    assert ids == plain
    assert one == 1 < a_pass


def test_a_lower_threshold_writes_more_in_a_pass(model: Model) -> None:
    rates = [decoded(model, 4, f"threshold:{tau}")[1] for tau in (0.9, 0.5, 0.3)]
    assert 1 <= rates[0] < rates[1] < rates[2] <= 4

"""scripts/train_block_diffusion.py: masks, losses, checkpoint, figures, and mistakes."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from weight_files import DATA, LLAMA, ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import block_diffusion_torch as model
import train_block_diffusion as command

MASK = 8
BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random Llama of two layers with the tokenizer of the tiny models."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    shutil.copyfile(LLAMA / "tokenizer.json", path / "tokenizer.json")
    return path


def run(*given: object) -> int:
    """Run the command as a user does."""
    old, sys.argv = sys.argv, ["train_block_diffusion.py", *map(str, given)]
    try:
        return command.main()
    finally:
        sys.argv = old


def train(folder: Path, out: Path, *more: object) -> int:
    text = DATA / "calib.txt"
    return run(
        *("--model-dir", folder, "--text", text, "--out-dir", out, "--threads", 1),
        *("--batch", 1, "--block-size", BLOCK, "--lr", 3e-3, *more),
    )


def test_what_each_stream_sees() -> None:
    length = 12
    sees = model.stream_mask(length, BLOCK, 2).numpy()
    for row in range(3 * length):
        for key in range(3 * length):
            row_stream, i = divmod(row, length)
            key_stream, j = divmod(key, length)
            if row_stream == 2:  # clean: the ordinary decoder
                expected = key_stream == 2 and j <= i
            elif key_stream == 2:  # noisy sees clean: finished blocks alone
                expected = j // BLOCK < i // BLOCK
            else:
                expected = key_stream == row_stream and j // BLOCK == i // BLOCK
            assert sees[row, key] == expected


def test_the_clean_stream_is_the_ordinary_model(folder: Path) -> None:
    _, shape, weights = model.load_model(folder)
    ids = torch.randint(9, 4096, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = LlamaForCausalLM.from_pretrained(folder)(ids).logits
        noisy = torch.full_like(ids, MASK)
        hidden = model.hidden_states(
            weights,
            shape,
            torch.cat([noisy, noisy, ids], 1),
            torch.arange(32).repeat(3),
            model.stream_mask(32, BLOCK, 2),
        )
        ours = model.head(weights, shape, hidden[:, 64:])
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_every_block_is_masked_somewhere_and_half_are_drafts() -> None:
    masked = model.noise(64, 256, BLOCK, torch.Generator().manual_seed(0)).view(-1, BLOCK).numpy()
    count = masked.sum(axis=1)
    draft = masked[:, 1:].all(axis=1)
    assert 0.5 <= draft.mean() <= 0.75
    assert 0.6 < count.mean() / BLOCK < 0.9


def test_both_losses_fall_and_the_model_is_written(folder: Path, tmp_path: Path) -> None:
    assert train(folder, tmp_path, "--steps", 40) == 0
    _, shape, before = model.load_model(folder)
    config, _, after = model.load_model(tmp_path)
    assert config["block_diffusion"] == {
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "context": "causal",
    }
    tokenizer = command.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode((DATA / "valid.txt").read_text()[:6000]).ids[:512])[None]
    masked = model.noise(1, 512, BLOCK, torch.Generator().manual_seed(5))
    with torch.no_grad():
        old = model.losses(before, shape, ids, masked, BLOCK, MASK, 0.0)
        new = model.losses(after, shape, ids, masked, BLOCK, MASK, 0.0)
    assert new.diffusion < old.diffusion - 0.5
    assert new.autoregressive < old.autoregressive - 0.5
    report = json.loads((tmp_path / "training.json").read_text())
    assert report["steps"] == 40 and report["cpu_seconds"] > 0
    assert not list(tmp_path.glob("*.part"))


def test_held_out_files_are_left_out() -> None:
    line = "a line that is long enough to count as one, number"
    held = "# kept/a.py\n" + "\n".join(f"{line} {i}" for i in range(9))
    files = [
        ("kept/a.py", "anything"),
        ("moved.py", "\n".join(f"{line} {i}" for i in range(4, 12))),
        ("other.py", "\n".join(f"{line} {i}" for i in range(8, 90))),
    ]
    assert [name for name, _ in command.without_held_out(files, held)] == ["other.py"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--block-size", 3, "--steps", 1), "--block-size 3"),
        (("--mask-token", "<none>", "--steps", 1), "--mask-token"),
        (("--text", "nowhere", "--steps", 1), "no such file"),
        (("--held-out", "nowhere", "--steps", 1), "--held-out"),
        ((), "--minutes or --steps"),
        (("--model-dir", "nowhere", "--steps", 1), "config.json"),
    ],
)
def test_mistakes_are_one_line(
    given: tuple, says: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folder, tmp_path, *given) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("train_block_diffusion: ") and says in line

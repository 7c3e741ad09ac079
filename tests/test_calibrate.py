"""Calibration: the walk equals the model, experts are counted, runs resume, bytes repeat."""

from pathlib import Path

import numpy as np
import pytest
from block_models import CONFIGS as BLOCKS
from block_models import write_model
from calibration import make_plan, sequences
from random_models import BITNET as BITNETS
from random_models import FAMILIES, MORE_FAMILIES, make, make_bitnet, make_mxfp4
from sessions import make_session
from weight_files import BITNET, GPTOSS, LLAMA, convert, write_first_layers

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Float
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert.q4_entries import PlaneFile, part_of, plane_hashes
from clocher_runtime.convert.q4_map import parse_q4_map
from clocher_runtime.engine.load import load_model
from clocher_runtime.quantize.calibrate import calibrate
from clocher_runtime.quantize.calibration_text import make_text
from clocher_runtime.quantize.capture import ExpertInputs, Hidden, Observer, RowStore, Walk
from clocher_runtime.quantize.job import CalibrationText, Job, run_job
from clocher_runtime.quantize.plan import QuantPlan

EXPERTS = "model.layers.{}.mlp.experts.{}"


def rule(pattern: str, method: str, group: int = 128, **more: str) -> dict:
    return {"pattern": pattern, "dtype": "int4w", "group": group, "method": method, **more}


class Memory:
    """A plane file in memory; it can refuse to write, as a killed job does."""

    def __init__(self, writes: int = 1000) -> None:
        self.tensors: dict[str, QuantTensor] = {}
        self.records: dict[str, dict] = {}
        self.left = writes

    def resume(self, tensors) -> None:
        assert list(self.records) == list(tensors)[: len(self.records)]

    def add(self, name, tensor, record) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.tensors[name] = tensor
        self.records[name] = record


def same(one: dict[str, QuantTensor], other: dict[str, QuantTensor]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(plane, other[name].planes[key])
        for name, tensor in one.items()
        for key, plane in tensor.planes.items()
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def logits_of(walk: Walk, weights: dict[str, QuantTensor] | None = None) -> np.ndarray:
    walk.restart()
    for layer in range(walk.spec.num_layers):
        walk.layer(layer, None, weights)
        walk.advance()
    pieces = [(rows, logits.copy()) for rows, logits in walk.logits()]
    assert [rows.start for rows, _ in pieces] == sorted(rows.start for rows, _ in pieces)
    return np.concatenate([logits for _, logits in pieces])


@pytest.mark.parametrize("model", [LLAMA, GPTOSS, BITNET], ids=["llama", "gptoss", "bitnet"])
def test_the_walk_gives_the_logits_of_a_session(model):
    equals_session(open_checkpoint(model), (150, 1, 37, 270))


def write_random(family: str, seed: int, folder: Path) -> Checkpoint:
    """Write a random model of a family, or of a way to store one."""
    if family in BLOCKS:
        folder.mkdir()
        write_model(family, folder)
    elif family == "mxfp4":
        make_mxfp4(seed, folder)
    elif family in BITNETS:
        make_bitnet(family, seed, folder, use_rms_norm=seed == 1)
    else:
        make(family, seed, folder)
    return open_checkpoint(folder)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", (*FAMILIES, *MORE_FAMILIES, *BLOCKS, "mxfp4", *BITNETS))
def test_the_walk_of_every_family_gives_the_logits_of_a_session(family, seed, tmp_path):
    equals_session(write_random(family, seed, tmp_path / "model"), (90, 1, 37, 96))


def equals_session(checkpoint: Checkpoint, lengths: tuple[int, ...]) -> None:
    """Compare logits of random texts with a session's: equal but for the order of experts."""
    rng = np.random.default_rng(0)
    vocab = checkpoint.config["vocab_size"]
    text = [[int(i) for i in rng.integers(0, vocab, n)] for n in lengths]
    walk = Walk(checkpoint, make_text(text))
    got = logits_of(walk)
    session = make_session(
        load_model(checkpoint),
        context=max(lengths),
        chunk=64,
        act_prec="fp32",
        kv_dtype="f32",
        all_logits=True,
    )
    expected = np.concatenate([session.logits(sequence) for sequence in text])
    session.close()
    if walk.spec.moe is None:
        assert np.array_equal(got, expected)
    assert np.square(got - expected).mean() <= 1e-12 * np.square(expected).mean()


class Adding(Observer):
    """Adds up what the experts' shown inputs give, with down projections [E, N, I]."""

    def __init__(self, down: np.ndarray, tokens: int) -> None:
        self.down, self.total = down, np.zeros((tokens, down.shape[1]))

    def expert(self, weights, expert: int, inputs: ExpertInputs, rows: np.ndarray) -> None:
        assert weights[1].endswith("down_proj")
        self.total[rows] += inputs[1] @ self.down[expert].T * inputs[2][:, None]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "llama4", "deepseek_v3"])
def test_the_inputs_shown_of_experts_are_those_that_make_their_outputs(family, tmp_path):
    checkpoint = write_random(family, 3, tmp_path / "model")
    walk = Walk(checkpoint, make_text([[1, 2, 3] * 20, [4, 5, 6] * 15]))
    layer = next(i for i in range(walk.spec.num_layers) if walk.spec.has_experts(i))
    for i in range(layer):
        walk.layer(i)
        walk.advance()
    name = f"model.layers.{layer}.mlp.experts.down_proj"
    down = walk.tensor(name).decode()
    seen, before = Adding(down, len(walk.text.ids)), walk.store()
    before.take(walk.state)
    walk.layer(layer, seen)
    walk.advance()
    whole = walk.state[:]
    walk.state.take(before)
    walk.layer(layer, None, {name: encode(np.zeros_like(down), Float("f32"))})
    walk.advance()
    assert np.abs(seen.total).max() > 0.1
    assert np.allclose(whole - walk.state[:], seen.total, atol=1e-4)


def test_a_text_of_many_chunks_is_that_of_one(monkeypatch):
    checkpoint = open_checkpoint(GPTOSS)
    ids = sequences(checkpoint, 1, 600)[0]
    text = make_text([ids[:40], ids[40:80], ids[80:300], ids[300:310], ids[310:450], ids[450:]])
    whole = logits_of(Walk(checkpoint, text))
    monkeypatch.setattr("clocher_runtime.quantize.capture.CHUNK_TOKENS", 50)
    monkeypatch.setattr("clocher_runtime.quantize.capture._LOGITS", 4096 * 7)
    assert np.allclose(logits_of(Walk(checkpoint, text)), whole, rtol=1e-4, atol=1e-4)


class Watcher(Observer):
    """Counts what the walk shows."""

    def __init__(self) -> None:
        self.sites: list[tuple[tuple[str, ...], int, slice]] = []
        self.routed: dict[int, list[int]] = {}
        self.weights: dict[int, float] = {}
        self.finished: list[int] = []

    def linear(self, weights: tuple[str, ...], x: np.ndarray, rows: slice) -> None:
        assert np.isfinite(x).all()
        self.sites.append((weights, x.shape[1], rows))

    def expert(self, weights, expert: int, inputs: ExpertInputs, rows: np.ndarray) -> None:
        self.routed.setdefault(expert, []).extend(int(row) for row in rows)
        for row, weight in zip(rows, inputs[2], strict=True):
            self.weights[int(row)] = self.weights.get(int(row), 0) + float(weight)

    def expert_done(self, weights, expert: int, hidden: Hidden) -> None:
        rows = np.arange(3)
        assert hidden(rows).shape == (3, 256)
        self.finished.append(expert)


def test_inputs_are_shown_once_and_every_routed_token_is_counted():
    checkpoint = open_checkpoint(GPTOSS)
    walk = Walk(checkpoint, make_text(sequences(checkpoint, 3, 60)))
    watcher = Watcher()
    walk.layer(0, watcher)
    prefix = "model.layers.0."
    attention = tuple(f"{prefix}self_attn.{name}_proj.weight" for name in "qkv")
    router = (f"{prefix}mlp.router.weight", f"{prefix}mlp.experts.gate_up_proj")
    assert [site[0] for site in watcher.sites] == [
        attention,
        (f"{prefix}self_attn.o_proj.weight",),
        router,
    ]
    assert watcher.finished == list(range(8))
    assert sum(len(rows) for rows in watcher.routed.values()) == 2 * 180
    assert watcher.weights == pytest.approx(dict.fromkeys(range(180), 1.0), rel=1e-5)


def test_experts_with_few_tokens_are_quantised_with_their_layers_statistics():
    checkpoint = open_checkpoint(GPTOSS)
    plan = make_plan(checkpoint, rule(r".*layers\.[01]\..*experts.*proj", "gptq"), requantize=True)
    text = sequences(checkpoint, 6, 64)
    parts = Memory()
    calibrate(checkpoint, plan, text, planes=parts)
    known = parts.records
    assert set(known) == set(parts.tensors) == set(plan.tensors)
    for name, record in known.items():
        tensor = parts.tensors[name]
        tensor.check()
        assert tensor.format == plan.tensors[name].format
        source = checkpoint.tensor(name).decode()
        for expert in range(8):
            wrong = tensor.decode()[expert] - source[expert]
            assert np.square(wrong).sum() < 0.1 * np.square(source[expert]).sum()
        least, p5, median, most = record["tokens_seen"]
        assert 0 <= least <= p5 <= median <= most <= 5 * 64
        assert "pooled statistics in" in record["fallback"]
        assert record["err"]["out_nmse"] <= record["err"]["out_nmse_rtn"] * 1.02
        assert record["err"]["out_nmse_worst"] >= record["err"]["out_nmse"]


def test_dense_layers_embedding_and_head():
    checkpoint = open_checkpoint(LLAMA)
    plan = make_plan(
        checkpoint,
        rule(".*layers.0.*(q|o|down)_proj.*", "gptq", 32, zero="per-group"),
        rule(".*layers.0.*k_proj.*", "imx"),
        rule(".*layers.0.*v_proj.*", "rtn"),
        rule("lm_head.weight", "gptq", 64),
        rule("model.embed_tokens.weight", "imx", 32),
    )
    parts = Memory()
    calibrate(checkpoint, plan, sequences(checkpoint, 12, 100), planes=parts)
    known = dict(parts.records)
    assert list(parts.records) == sorted(parts.records, key=part_of)
    assert len(known) == 6
    assert not any("v_proj" in name for name in known)
    embedding = known.pop("model.embed_tokens.weight")
    assert embedding["tokens_seen"] == [0] and "fallback" not in embedding
    for record in known.values():
        assert record["tokens_seen"] == [1100]
        assert record["err"]["out_nmse"] < record["err"]["out_nmse_rtn"]


def test_a_killed_run_goes_on_and_gives_the_same_bytes(tmp_path):
    checkpoint = open_checkpoint(LLAMA)
    plan = make_plan(checkpoint, rule(r".*layers\.[024]\..*_proj.*", "imx"))
    text = sequences(checkpoint, 4, 50)
    whole, broken = Memory(), Memory(writes=17)  # of 7 a layer
    calibrate(checkpoint, plan, text, planes=whole, threads=2)
    expected = whole.records
    with pytest.raises(KeyboardInterrupt):
        calibrate(checkpoint, plan, text, planes=broken)
    broken.left = 4
    layers = []
    calibrate(
        checkpoint,
        plan,
        text,
        planes=broken,
        progress=lambda what, done, total: layers.append((done, total, what)),
    )
    assert broken.records == expected
    assert same(whole.tensors, broken.tensors)
    assert layers[0][0] == 0, "a layer is shown as it begins: it may take minutes"
    assert layers[-1][0] == 5, "layer 5 has nothing to do"

    for _ in range(2):
        with PlaneFile(tmp_path / "q4.json", "job") as file:
            calibrate(checkpoint, plan, text, planes=file)
            assert file.records == expected
            file.finish()
            assert same(file.tensors, whole.tensors)


def test_only_what_is_held_out_measures():
    text = make_text([[1, 2], [3], [4, 5, 6]], held_out=2)
    judged = text.judged()
    assert judged.ids.tolist() == text.ids[text.held].tolist()
    assert sum(judged.lengths) == len(judged.ids) < 6 and judged.held.all()


def test_the_seed_chooses_what_is_held_out():
    text = [[1, 2, 3]] * 40
    held = [make_text(text, seed).held for seed in (0, 0, 1)]
    assert held[0].sum() == 3 * round(40 / 16)
    assert np.array_equal(held[0], held[1])
    assert not np.array_equal(held[0], held[2])
    assert make_text([[1], [2, 3]]).held.sum() in (1, 2)


def test_rows_stay_when_their_pages_go(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = RowStore(1000, 100)
    store[10:20] = np.ones((10, 100), np.float32)
    store[np.array([12, 15])] = np.full((2, 100), 3, np.float32)
    store.release()
    other = RowStore(1000, 100)
    other.take(store)
    assert np.array_equal(other[:], store[:])
    assert store[9:21].sum(axis=1).tolist() == [0] + [100, 100, 300] * 2 + [100] * 4 + [0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([[1, 2]], "expected at least 2"),
        ([[1, 2], []], "none empty"),
        ([[1, 2], [4096]], "vocabulary has 4096"),
    ],
    ids=["one-sequence", "empty-sequence", "foreign-token"],
)
def test_unusable_texts_are_refused(text, message):
    checkpoint = open_checkpoint(LLAMA)
    plan = make_plan(checkpoint, rule(".*q_proj.*", "imx"))
    with pytest.raises(UsageError, match=message):
        calibrate(checkpoint, plan, text, planes=Memory())


def test_calibration_lowers_the_divergence_of_a_trained_model(tmp_path):
    checkpoint = open_checkpoint(write_first_layers(LLAMA, tmp_path / "model", 2))
    text = sequences(checkpoint, 16, 160)
    walk = Walk(checkpoint, make_text(sequences(checkpoint, 2, 256, "valid.txt")))
    reference = log_softmax(logits_of(walk))
    divergence = {}
    for method in ("rtn", "imx", "gptq"):
        plan = make_plan(checkpoint, rule(".*_proj.*", "imx" if method == "rtn" else method))
        if method == "rtn":
            weights = {n: round_of(checkpoint, plan, n) for n in plan.tensors}
        else:
            parts = Memory()
            calibrate(checkpoint, plan, text, planes=parts)
            weights = parts.tensors
        scores = log_softmax(logits_of(walk, weights))
        divergence[method] = float((np.exp(reference) * (reference - scores)).sum(axis=1).mean())
    assert divergence["imx"] < divergence["rtn"]
    assert divergence["gptq"] < 0.5 * divergence["rtn"]


@pytest.mark.parametrize("dtype", ["fp8", "mxfp4"])
def test_floating_codes_are_calibrated_written_and_run(dtype, tmp_path):
    model = write_first_layers(LLAMA, tmp_path / "model", 1)
    checkpoint = open_checkpoint(model)
    rules = {"version": 1, "rules": [{"pattern": ".*_proj.*", "dtype": dtype, "method": "imx"}]}
    record = {"name": "t", "nbytes": 1, "sha256": "0" * 64, "sequences": 4, "seq_len": 64} | {
        "tokens": 256, "tokens_sha256": "0" * 64, "bos": False, "seed": 0
    }  # fmt: skip
    text = CalibrationText(tuple(map(tuple, sequences(checkpoint, 4, 64))), record)
    q4 = parse_q4_map(rules, Path("rules"))
    job = Job(checkpoint, tmp_path / "q4.json", q4, calibration=text, min_cosine=0.99)
    outcome = run_job(job, job.plan())
    assert outcome.verdict == "pass"
    assert "imx" in {each.entry["method"] for each in outcome.done}
    convert(model, tmp_path / "out", tmp_path / "q4.json")
    made = open_checkpoint(tmp_path / "out", verify=True)
    for _, entry in outcome.done:
        tensor = made.tensor(entry["name"])
        assert plane_hashes(tensor) == entry["sha256"]
        rounded = encode(checkpoint.tensor(entry["name"]).decode(), tensor.format)
        assert (plane_hashes(rounded) == entry["sha256"]) == (entry["method"] == "rtn")
        out = entry["err"]
        assert out["out_nmse"] <= 1.02 * out["out_nmse_rtn"]
    session = make_session(load_model(made), threads=2, context=16, all_logits=True)
    assert np.isfinite(session.logits([1, 2, 3])).all()
    session.close()


def round_of(checkpoint: Checkpoint, plan: QuantPlan, name: str) -> QuantTensor:
    fmt = plan.tensors[name].format
    values = checkpoint.tensor(name).decode()
    return QuantTensor(values.shape, fmt, fmt.encode(values))

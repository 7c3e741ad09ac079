"""The quality gate: exact scores, honest intervals, verdicts, tensor errors, the script."""

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from ggml_encode import encode as encode_ggml
from weight_files import DATA, LLAMA, rng

from clocher_kernels.errors import ModelError, UsageError
from clocher_kernels.formats import Ggml, parse_format
from clocher_kernels.formats.ggml import TRIED_KINDS
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.iebin import IebinWriter
from clocher_runtime.config.engine import WEIGHTS_ALONE
from clocher_runtime.convert.q4_map import load_q4_map
from clocher_runtime.engine.load import load_model
from clocher_runtime.quality import compare as compare_module
from clocher_runtime.quality import gate
from clocher_runtime.quality.compare import (
    DOCUMENT_TOKENS,
    Comparison,
    Documents,
    Summary,
    TokenScores,
    compare,
    cut,
    score_window,
    summarise,
)
from clocher_runtime.quality.evaluate import (
    Record,
    Row,
    check_alike,
    decode_speed,
    evaluate,
    table,
    weight_errors,
)
from clocher_runtime.quality.statistics import Estimate, block_means, of_documents, student
from clocher_runtime.quality.tensor_error import expected_rms, measure, same
from clocher_runtime.quantize.job import (
    records_beside,
    records_of,
    records_of_gptq,
)
from clocher_runtime.subcommands import quality as command
from clocher_runtime.text.tokenizer import Tokenizer

TEXT = DATA / "valid.txt"


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.longdouble)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


# Scores of tokens


@pytest.mark.parametrize("step", [1, 40, 1 << 20], ids=["row", "few-rows", "whole"])
@pytest.mark.parametrize("scale", [0.1, 5.0, 300.0])
def test_scores_equal_brute_force(step: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "_STEP", step)
    random = rng("scores-T9-V13")
    a = (random.standard_normal((9, 13)) * scale).astype(np.float32)
    b = a + random.standard_normal((9, 13)).astype(np.float32)
    ids = random.integers(0, 13, 9).tolist()
    found = score_window(a, b, ids)
    for t in range(8):
        p, q = log_softmax(a[t]), log_softmax(b[t])
        true = ids[t + 1]
        assert found.nll_reference[t] == pytest.approx(float(-p[true]), rel=1e-12, abs=1e-12)
        assert found.nll_model[t] == pytest.approx(float(-q[true]), rel=1e-12, abs=1e-12)
        kld = float((np.exp(p) * (p - q)).sum())
        assert found.kld[t] == pytest.approx(kld, rel=1e-9, abs=1e-12)
        assert found.same_top[t] == (a[t].argmax() == b[t].argmax())
        dp = float(np.exp(q[true]) - np.exp(p[true]))
        assert found.delta_p[t] == pytest.approx(dp, rel=1e-9, abs=1e-12)


def test_equal_logits_have_no_divergence() -> None:
    a = rng("equal").standard_normal((5, 100)).astype(np.float32)
    found = score_window(a, a.copy(), [1, 2, 3, 4, 5])
    assert found.kld.tolist() == [0] * 4 and found.same_top.all() and not found.delta_p.any()


def test_logits_that_are_not_finite() -> None:
    a = rng("nonfinite").standard_normal((4, 6)).astype(np.float32)
    b = a.copy()
    b[1, 3] = np.nan
    documents = Documents(((1, 2, 3, 4),), (0,), 4)
    found = compare(lambda ids: a, lambda ids: b, documents)
    assert (
        found.nonfinite == 1 and len(found.scores.kld) == 2 and np.isfinite(found.scores.kld).all()
    )
    check = gate.text_checks(summarise(found), gate.LIMITS["int8"])[0]
    assert (check.name, check.verdict) == ("nonfinite_logits", "fail")
    with pytest.raises(ModelError, match="reference model"):
        compare(lambda ids: b, lambda ids: a, documents)
    with pytest.raises(ModelError, match="damaged"):
        summarise(compare(lambda ids: a, lambda ids: a * np.nan, documents))
    with pytest.raises(ModelError, match="vocabulary"):
        score_window(a, a[:, :5], [1, 2, 3, 4])


# Documents


def test_windows_without_a_separator() -> None:
    text = "".join(chr(65 + i % 26) for i in range(47))
    found = cut(text, lambda t: [ord(c) for c in t], 5, windows_per_document=2)
    assert found.windows[0] == (65, 66, 67, 68, 69)
    assert found.owner == (0, 0, 1, 1, 2, 2, 3, 3, 4) and found.count == 5
    assert found.tokens == 9 * 4
    assert cut(text, lambda t: [1] * 4096, 256).owner == (0,) * 4 + (1,) * 4 + (2,) * 4 + (3,) * 4
    assert cut(text, lambda t: [1] * 4096, 2048).owner == (0, 1)
    assert cut(text, lambda t: [1] * 100, 5, windows_per_document=2, limit=3).count == 3


def test_windows_with_a_separator() -> None:
    def letters(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    found = cut("abcdefg##h####ij#kl", letters, 3, separator="##")
    assert found.windows == ((97, 98, 99), (100, 101, 102), (105, 106, 35), (107, 108))
    assert found.owner == (0, 0, 1, 1)
    assert cut("ab##cd##ef", letters, 3, separator="##", limit=2).count == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 100}, "longer text"),
        ({"window": 4, "separator": ""}, "empty"),
        ({"window": 4, "separator": " "}, "longer text"),
    ],
    ids=["short", "empty-separator", "all-parts-short"],
)
def test_texts_that_cannot_be_cut(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cut("a b c d", lambda t: [1] * len(t), **options)


def test_digest_depends_on_ids_and_documents() -> None:
    one = Documents(((1, 2), (3, 4)), (0, 0), 2)
    others = [
        Documents(((1, 2), (3, 4)), (0, 1), 2),
        Documents(((1, 2), (3, 5)), (0, 0), 2),
        Documents(((1, 2, 3), (4, 0)), (0, 0), 3),
    ]
    assert one.digest == Documents(((1, 2), (3, 4)), (0, 0), 2).digest
    assert len({one.digest, *(other.digest for other in others)}) == 4


# Intervals


def test_block_means_are_means_of_drawn_documents() -> None:
    random = rng("block-means")
    owner = np.array([0, 0, 0, 1, 2, 2, 5, 5, 5, 5])
    values = random.standard_normal((2, 10))
    found = block_means(values, owner, 500, seed=3)
    draws = np.random.default_rng(3).multinomial(4, [0.25] * 4, size=500)
    blocks = [np.flatnonzero(owner == d) for d in (0, 1, 2, 5)]
    for number in (0, 17, 499):
        tokens = np.concatenate(
            [np.tile(block, times) for block, times in zip(blocks, draws[number], strict=True)]
        ).astype(int)
        assert found[:, number] == pytest.approx(values[:, tokens].mean(axis=1))
    assert (found == block_means(values, owner, 500, seed=3)).all()
    assert (found != block_means(values, owner, 500, seed=4)).any()


def correlated(random: np.random.Generator, documents: int, length: int) -> np.ndarray:
    """Values of mean 0 by document [documents, length], alike within a document."""
    effect = random.standard_normal((documents, 1))
    return effect + random.standard_normal((documents, length))


@pytest.mark.parametrize("documents", [10, 60])
def test_coverage_on_correlated_documents(documents: int) -> None:
    random = rng(f"coverage-{documents}")
    length, trials = 20, 200
    owner = np.repeat(np.arange(documents), length)
    covered = covered_iid = 0
    for trial in range(trials):
        values = correlated(random, documents, length).reshape(1, -1)
        block = of_documents(0, block_means(values, owner, 400, trial)[0], documents)
        half = 1.96 * values.std() / np.sqrt(values.size)
        covered += block.low <= 0 <= block.high
        covered_iid += abs(values.mean()) <= half
    # 95 % of 200 is 190; a binomial of 200 draws is below 180 with probability 0.003.
    assert covered >= 180 and covered_iid < 130


def test_few_documents_have_no_interval() -> None:
    found = of_documents(1.0, np.linspace(0, 2, 100), 7)
    assert (found.low, found.high) == (-np.inf, np.inf)


@pytest.mark.parametrize(
    ("freedom", "known"), [(1, 12.7062), (6, 2.4469), (7, 2.3646), (15, 2.1314), (63, 1.9983)]
)
def test_student_quantile(freedom: int, known: float) -> None:
    assert student(freedom) == pytest.approx(known, rel=1e-3)


def comparison(
    name: str, documents: int, length: int, shift: float, spread: float = 0.05, flips: float = 0.02
) -> Comparison:
    """A model that is worse by `shift` nats per token, by more in some documents than in others."""
    random = rng(name)
    count = documents * length
    nll = random.exponential(2.0, count)
    difference = shift + spread * correlated(random, documents, length).ravel()
    kld = np.abs(difference) / 2
    scores = TokenScores(nll, nll + difference, kld, random.random(count) >= flips)
    return Comparison(scores, np.repeat(np.arange(documents), length), 0)


def test_summary_equals_its_definition() -> None:
    found = comparison("summary", 20, 30, 0.01)
    scores, summary = found.scores, summarise(found)
    assert summary.ppl_ratio.value == pytest.approx(
        summary.perplexity / summary.perplexity_reference
    )
    assert summary.perplexity == pytest.approx(np.exp(scores.nll_model.mean()))
    assert summary.kld.value == pytest.approx(scores.kld.mean())
    assert summary.rms_dp.value == pytest.approx(np.sqrt((scores.delta_p**2).mean()))
    for estimate in (summary.ppl_ratio, summary.kld, summary.same_top, summary.rms_dp):
        assert estimate.low < estimate.value < estimate.high
    assert summary == summarise(found)


def test_a_perplexity_beyond_all_bounds_is_a_number() -> None:
    found = comparison("huge", 10, 10, 5000.0)
    assert np.isfinite(summarise(found).ppl_ratio.high)


# Verdicts

EASY = gate.Limits(1.02, 1.0, 0.5, 1.0, min_tokens=0, min_documents=0)


def verdict_of(found: Comparison, limits: gate.Limits) -> gate.Check:
    checks = gate.text_checks(summarise(found), limits)
    return next(check for check in checks if check.name == "ppl_ratio")


def test_a_true_difference_is_found() -> None:
    assert verdict_of(comparison("worse", 100, 50, 0.05), EASY).verdict == "fail"


def test_no_difference_passes_with_text_and_is_undecided_without() -> None:
    assert verdict_of(comparison("same", 100, 50, 0.0), EASY).verdict == "pass"
    little = verdict_of(comparison("same", 10, 20, 0.0), replace(EASY, max_ppl_ratio=1.01))
    assert little.verdict == "undecided" and little.more_tokens


def test_more_tokens_is_about_right() -> None:
    """Adding as many tokens as a check asks for decides it, give or take the estimate's noise."""
    limits = replace(EASY, max_ppl_ratio=1.01)
    first = verdict_of(comparison("more", 12, 20, 0.0), limits)
    assert first.verdict == "undecided" and first.more_tokens is not None
    documents = 12 + 2 * -(-first.more_tokens // 20)
    assert verdict_of(comparison("more-2", documents, 20, 0.0), limits).verdict == "pass"


def test_at_its_limit_no_text_helps() -> None:
    check = verdict_of(comparison("at", 50, 20, 0.0), EASY)
    limits = replace(EASY, max_ppl_ratio=check.value * (1 + 1e-9))
    found = verdict_of(comparison("at", 50, 20, 0.0), limits)
    assert (found.verdict, found.more_tokens) == ("undecided", None)


def test_little_text_never_passes_but_can_fail() -> None:
    limits = replace(EASY, min_tokens=5000, min_documents=20)
    check = verdict_of(comparison("same", 10, 400, 0.0, 0.005), limits)
    assert (check.verdict, check.more_tokens) == ("undecided", 20 * 400 - 10 * 400)
    check = verdict_of(comparison("same", 100, 40, 0.0, 0.005), limits)
    assert (check.verdict, check.more_tokens) == ("undecided", 1000)
    assert verdict_of(comparison("worse", 10, 400, 0.5), limits).verdict == "fail"
    check = verdict_of(comparison("same", 1, 40, 0.0, 0.005), limits)  # a piece of a document
    assert check.more_tokens == 20 * DOCUMENT_TOKENS - 40


def test_a_lower_limit_is_judged_the_other_way_round() -> None:
    def top(flips: float, limit: float) -> gate.Verdict:
        found = summarise(comparison(f"flips-{flips}", 50, 100, 0.0, flips=flips))
        checks = gate.text_checks(found, replace(EASY, min_same_top=limit))
        return next(check.verdict for check in checks if check.name == "same_top")

    assert [top(0.02, 0.97), top(0.1, 0.97), top(0.03, 0.97)] == ["pass", "fail", "undecided"]


def test_verdicts_together() -> None:
    assert gate.worst(["pass", "undecided", "fail"]) == "fail"
    assert gate.worst(["pass", "undecided"]) == "undecided"
    assert gate.worst([]) == "pass"
    assert [gate.verdict_code(v).value for v in ("pass", "fail", "undecided")] == [0, 8, 9]


def test_json_of_a_result_is_json() -> None:
    summary = Summary(
        *(10, 2, 0, 5.0, 5.1),
        Estimate(1.02, -np.inf, np.inf),
        Estimate(0.1, 0.05, 0.2),
        Estimate(0.9, 0.8, 1.0),
        Estimate(0.1, 0.0, 0.2),
    )
    checks = tuple(gate.text_checks(summary, gate.LIMITS["int4"]))
    assert ", no 95 % interval (documents: 2 of 8); add" in str(checks[1])
    found = json.loads(
        json.dumps(gate.GateResult("int4", gate.LIMITS["int4"], checks).to_json(), allow_nan=False)
    )
    ratio = found["gates"][1]
    assert ratio["ci95"] == [None, None] and ratio["verdict"] == "undecided"
    assert ratio["pass"] is False and ratio["n_docs"] == 2 and found["class"] == "int4"


def test_limits_by_format_and_by_flag() -> None:
    formats = [parse_format(name) for name in ("int8_row_f32", "int4_sym_g64_f16", "bf16")]
    assert gate.choose_limits(formats)[0] == "int4"
    assert gate.choose_limits(formats[:1])[0] == "int8"
    assert gate.choose_limits([])[0] == "float"
    assert gate.choose_limits([], ["kv"])[0] == "kv"
    assert gate.choose_limits(formats, name="int8")[0] == "int8"
    assert gate.choose_limits([parse_format("ternary_f16")])[0] == "int4"
    three, four = parse_format("tcq3"), parse_format("tcq4")
    assert gate.choose_limits([three, three, four])[0] == "int3"
    assert gate.choose_limits([three, four])[0] == "int4"
    with pytest.raises(UsageError, match="--limits"):
        gate.choose_limits([parse_format("bsr_16x32_f32")])
    with pytest.raises(UsageError, match="known"):
        gate.choose_limits([], name="int2")
    found = gate.override(gate.LIMITS["int8"], max_kld=0.5, min_tokens=None)
    assert (found.max_kld, found.min_tokens) == (0.5, gate.MIN_TOKENS)
    with pytest.raises(UsageError, match="--max-kld"):
        gate.override(found, max_kld=float("nan"))


# Tensors


@pytest.mark.parametrize(
    ("name", "columns", "known"),
    [
        ("int8_row_f32", 4096, 0.0201),
        ("int8_g32_f16", 4096, 0.0068),
        ("fp8_e4m3_row_f32", 4096, 0.0263),
        ("int4_sym_g128_f16", 4096, 0.1513),
        ("int4_sym_g32_f16", 4096, 0.1078),
        ("int4_asym_g128_f16", 4096, 0.1335),
        ("int4_asym_g32_f16", 4096, 0.0929),
        ("mxfp4", 4096, 0.1225),
        ("ternary_f16", 4096, 0.604),
        ("ternary_f16", 1 << 20, 0.604),
    ],
)
def test_expected_error_of_heavy_tailed_weights(name: str, columns: int, known: float) -> None:
    assert expected_rms(name, (4096, columns)) == pytest.approx(known, rel=0.03)


@pytest.mark.parametrize("kind", TRIED_KINDS)
def test_expected_error_of_types_of_ggml_is_that_of_rounding(kind: str) -> None:
    values = np.random.default_rng(0).standard_t(5, (64, 1024)).astype(np.float32)
    error = encode_ggml(values, Ggml(kind)).decode() - values
    found = float(np.sqrt(np.square(error).mean() / np.square(values).mean()))
    assert expected_rms(kind, values.shape) == pytest.approx(found, rel=0.05)


def test_no_error_is_expected_of_types_that_nothing_encodes() -> None:
    assert expected_rms("iq2_xs", (64, 1024)) is None


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [
        ("int4_sym_g32_f16", (64, 96)),
        ("int4_asym_g64_f16", (3, 20, 128)),
        ("int8_tensor_f32", (33, 50)),
        ("fp8_e4m3_b128_f32", (130, 140)),
        ("bf16", (77,)),
    ],
)
@pytest.mark.parametrize("step", [64, 1 << 22], ids=["cut", "whole"])
def test_error_of_a_tensor_equals_its_definition(
    fmt: str, shape: tuple[int, ...], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clocher_runtime.quality.tensor_error._STEP", step)
    values = rng(f"{fmt}-{shape}").standard_normal(shape).astype(np.float32)
    tensor = encode(values, parse_format(fmt))
    found = measure("w", encode(values, parse_format("f32")), tensor)
    decoded = tensor.decode().astype(np.float64)
    error = decoded - values
    assert found.rms_rel == pytest.approx(np.sqrt((error**2).sum() / (values**2).sum()), rel=1e-5)
    norm = np.linalg.norm(decoded) * np.linalg.norm(values.astype(np.float64))
    assert found.cosine == pytest.approx((decoded * values).sum() / norm, abs=1e-7)
    assert found.max_abs == pytest.approx(np.abs(error).max(), rel=1e-6)
    assert (found.clipped_frac is None) == fmt.startswith(("fp8", "bf16"))
    checks = gate.tensor_checks([found])
    assert all(check.verdict == "pass" for check in checks), checks


def clipped_tensor(share: float) -> tuple[np.ndarray, QuantTensor]:
    """A matrix encoded for values up to 1, then with a share of its elements twice as large."""
    random = rng(f"clipped-{share}")
    values = random.uniform(-1, 1, (64, 128)).astype(np.float32)
    tensor = encode(values, parse_format("int8_row_f32"))
    wide = random.random(values.shape) < share
    return np.where(wide, np.sign(values) * 2, values).astype(np.float32), tensor


def test_clipping_is_counted() -> None:
    values, tensor = clipped_tensor(0.1)
    found = measure("w", values, tensor)
    assert found.clipped_frac == pytest.approx(0.1, abs=0.02)
    checks = {check.name: check for check in gate.tensor_checks([found])}
    assert checks["clipped_frac"].verdict == "fail"
    assert measure("w", values, tensor, "gptq").clipped_frac is None


def test_limits_of_a_tensor_depend_on_format_and_method() -> None:
    random = rng("methods")
    values = random.standard_t(5, (64, 128)).astype(np.float32)
    noisy = values + 0.18 * random.standard_normal(values.shape).astype(np.float32)
    tensor = encode(noisy, parse_format("int4_sym_g128_f16"))

    def verdicts(error: Any, least: float | None = None) -> dict[str, str]:
        return {check.name: check.verdict for check in gate.tensor_checks([error], least)}

    rounded = measure("w", values, tensor)
    checks = {check.name: check for check in gate.tensor_checks([rounded])}
    limit = checks["rms_rel"].limit
    (loose,) = [
        check.limit
        for check in gate.tensor_checks([replace(rounded, method="gptq")])
        if check.name == "rms_rel"
    ]
    assert loose == pytest.approx(limit * 2 / 1.3)
    assert verdicts(replace(rounded, rms_rel=limit * 1.2))["rms_rel"] == "fail"
    assert verdicts(replace(rounded, rms_rel=limit * 1.2, method="gptq"))["rms_rel"] == "pass"
    assert verdicts(replace(rounded, cosine=0.99))["cosine"] == "pass"
    assert verdicts(replace(rounded, cosine=0.99), 0.995)["cosine"] == "fail"
    assert verdicts(replace(rounded, format="int8_row_f32", cosine=0.99))["cosine"] == "fail"
    assert "out_nmse" not in verdicts(rounded)
    worse = replace(rounded, out_nmse=0.011, out_nmse_rtn=0.01)
    assert verdicts(worse)["out_nmse"] == "fail"
    assert verdicts(replace(worse, out_nmse=0.01))["out_nmse"] == "pass"


def test_the_tensor_nearest_its_limit_is_named() -> None:
    values = rng("named").standard_t(5, (32, 64)).astype(np.float32)
    good = measure("good", values, encode(values, parse_format("int8_row_f32")))
    bad = replace(good, name="bad", rms_rel=1.0, cosine=0.1)
    for errors in ([good, bad], [bad, good]):
        checks = {check.name: check for check in gate.tensor_checks(errors)}
        assert checks["rms_rel"].where == checks["cosine"].where == "bad"
    assert [check.name for check in gate.tensor_checks([])] == ["nonfinite_tensors"]


def test_a_tensor_that_is_not_finite_fails() -> None:
    values = rng("nan").standard_normal((8, 8)).astype(np.float32)
    broken = values.copy()
    broken[3, 3] = np.nan
    tensor = QuantTensor((8, 8), parse_format("f32"), {"data": broken})
    checks = gate.tensor_checks([measure("w", values, tensor)])
    assert (checks[0].verdict, checks[0].where) == ("fail", "w")


def test_zero_tensors() -> None:
    zero, one = np.zeros((4, 4), np.float32), np.ones((4, 4), np.float32)
    assert measure("w", zero, zero).rms_rel == 0 and measure("w", zero, zero).cosine == 1
    assert measure("w", zero, one).rms_rel > 1e9 and measure("w", zero, one).cosine == 0


def test_tensors_that_are_stored_alike() -> None:
    values = rng("same").standard_normal((8, 16)).astype(np.float32)
    one, two = (encode(values, parse_format("int8_row_f32")) for _ in range(2))
    assert same(one, two) and same(values, values.copy())
    assert not same(one, encode(values, parse_format("bf16")))
    assert not same(one, encode(values * 2, parse_format("int8_row_f32")))
    assert not same(values, values * 2) and not same(values, one)


# Models


def documents_of_llama(chars: int, window: int = 64) -> Documents:
    checkpoint = open_checkpoint(LLAMA)
    tokenizer = Tokenizer(checkpoint.tokenizer_json, checkpoint.tokenizer_config)
    text = TEXT.read_text(encoding="utf-8")[:chars]
    return cut(text, tokenizer.encode, window, windows_per_document=1)


def test_evaluate_an_int8_kv_cache() -> None:
    model = load_model(open_checkpoint(LLAMA))
    seen = []
    config = replace(WEIGHTS_ALONE, threads=2, kv_dtype="i8")
    found = evaluate(
        model,
        model,
        documents_of_llama(5000),
        config=config,
        given={"min_tokens": 0, "min_documents": 0},
        progress=lambda *step: seen.append(step),
    )
    assert {step[0] for step in seen} == {"weights", "windows"}
    assert found.gate.limits_class == "kv" and found.errors == ()
    assert 0 < found.summary.kld.value < 0.005
    assert found.size.bpw == pytest.approx(16, rel=0.01)


def test_decoding_is_timed() -> None:
    model = load_model(open_checkpoint(LLAMA))
    assert decode_speed(model, [1, 2, 3], replace(WEIGHTS_ALONE, threads=1)) > 0


def test_what_a_manifest_says_of_a_tensor_is_checked() -> None:
    model = load_model(open_checkpoint(LLAMA))
    other = load_model(open_checkpoint(LLAMA), "int4w")
    name = "model.layers.0.mlp.down_proj.weight"
    errors = weight_errors(model, other, {name: Record("gptq", 0.02, 0.01)})
    found = next(error for error in errors if error.name == name)
    assert (found.method, found.clipped_frac, len(errors)) == ("gptq", None, 42)
    checks = {check.name: check for check in gate.tensor_checks(errors)}
    assert (checks["out_nmse"].verdict, checks["out_nmse"].where) == ("fail", name)
    assert checks["rms_rel"].verdict == checks["cosine"].verdict == "pass"


def test_records_are_what_a_manifest_says(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    rule = {"pattern": ".*_proj.weight", "dtype": "int4w", "group": 32}
    path.write_text(json.dumps({"version": 1, "rules": [rule]}))
    assert records_of(load_q4_map(path)) == {}
    errors = {"out_nmse": 0.1, "out_nmse_rtn": 0.2}
    path.write_text(json.dumps(manifest_of(w=errors, x={})))
    found = records_of(load_q4_map(path))
    assert found == {"w": Record("rtn", 0.1, 0.2), "x": Record()}


def manifest_of(**errors: dict[str, float]) -> dict[str, Any]:
    """Return an expanded manifest of matrices with these records."""
    fmt = parse_format("int8_row_f32")
    entry = {"shape": [2, 8], "format": fmt.name, "method": "rtn", "rule": 0, "bpw": 12.0}
    entry |= {"nbytes": fmt.nbytes((2, 8)), "sha256": dict.fromkeys(("codes", "scales"), "0" * 64)}
    return {
        "version": 1,
        "rules": [{"pattern": ".*", "dtype": "int8"}],
        "tensors": [{"name": name, **entry, "err": err} for name, err in errors.items()],
    }


def test_the_manifest_beside_a_model_is_its_own_by_hash(tmp_path: Path) -> None:
    manifest = tmp_path / "q4_manifest.json"
    manifest.write_text(json.dumps(manifest_of(w={"out_nmse": 0.5})))
    digest = sha256(manifest.read_bytes()).hexdigest()
    assert records_beside(tmp_path) == records_beside(LLAMA) == {}
    (tmp_path / "model.ie.json").write_text(json.dumps({"source": {"q4_map": {"sha256": digest}}}))
    assert records_beside(tmp_path) == {"w": Record("rtn", 0.5)}
    manifest.write_text(json.dumps(manifest_of()))  # of another conversion
    assert records_beside(tmp_path) == {}
    manifest.unlink()
    assert records_beside(tmp_path) == {}


def test_a_gptq_checkpoint_names_its_method_itself() -> None:
    plain = open_checkpoint(LLAMA)
    packed = plain.tensor("model.layers.0.mlp.down_proj.weight")
    tensors = dict(plain.tensors) | {
        "packed": encode(packed.decode(), parse_format("int8_row_f32"))
    }
    methods = ({"quant_method": "gptq"}, {"quant_method": "awq"}, "gptq", None)
    said = [
        records_of_gptq(
            replace(plain, tensors=tensors, config={**plain.config, "quantization_config": method})
        )
        for method in methods
    ]
    assert said == [{"packed": Record("gptq")}, {}, {}, {}]


def test_models_of_another_shape_are_refused() -> None:
    one = load_model(open_checkpoint(LLAMA))
    two = load_model(open_checkpoint(DATA / "clocher-tiny-bitnet"))
    with pytest.raises(ModelError, match="not the same model"):
        check_alike(one, two)


# The script


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Script = Callable[..., Done]


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> Script:
    """Return the command, which runs in this process: its libraries are loaded already."""

    def run(*args: object) -> Done:
        fixed = ["--no-speed", "--reference", LLAMA, "--text", TEXT, "--window", 64]
        code = command.gate.run(list(map(str, [*fixed, "--document-windows", 1, *args])))
        return Done(code, *capsys.readouterr())

    return run


def test_a_text_that_is_not_utf_8_is_refused_in_a_line(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "latin-1.txt"
    text.write_bytes(b"caf\xe9")
    done = script("--model", LLAMA, "--text", text)
    assert (done.returncode, command.perplexity.run(["--text", str(text)])) == (2, 2)
    for err in (done.stderr, capsys.readouterr().err):
        assert f"error: {text}: not UTF-8: " in err and err.count("\n") == 1


def test_script_passes_int8(script: Script, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    few = ["--chars", 8000, "--min-tokens", 1500, "--min-documents", 24]
    done = script("--model", LLAMA, "--precision", "int8w", *few, "--json", found)
    assert done.returncode == 0, done.stderr
    document = json.loads(found.read_text())
    result = document["models"]["clocher-tiny-llama"]
    assert result["verdict"] == "pass" and result["class"] == "int8"
    assert {entry["name"] for entry in result["gates"]} == {
        *("nonfinite_tensors", "rms_rel", "cosine", "clipped_frac", "nonfinite_logits"),
        *("ppl_ratio", "kld", "same_top", "rms_dp"),
    }
    assert len(result["tensors"]) == 42 and document["text"]["tokens"] >= 1500
    assert "| clocher-tiny-llama |" in done.stdout and "pass" in done.stdout


def test_script_rejects_a_wrecked_model(script: Script, tmp_path: Path) -> None:
    source = open_checkpoint(LLAMA)
    wrecked = "mlp.down_proj.weight"
    with IebinWriter(tmp_path) as writer:
        for name in source.names:
            tensor = source.tensor(name)
            if name.endswith(wrecked):
                values = tensor.decode()
                tensor = encode(rng("wrecked").permutation(values), parse_format("bf16"))
            writer.add(name, tensor)
        vocab = source.tokenizer_json.read_bytes()
        writer.commit(source.config, source.generation_config, source.tokenizer_config, vocab, {})
    few = ["--chars", 3000, "--limits", "int4"]
    done = script("--model", tmp_path, "--model", LLAMA, *few)
    assert done.returncode == 8, done.stderr
    assert f"{tmp_path.name}: fail (int4 limits)" in done.stdout
    assert "clocher-tiny-llama: undecided" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("  fail")]
    assert any("kld" in line for line in lines) and any(wrecked in line for line in lines)


def test_script_is_undecided_on_a_tiny_text(script: Script) -> None:
    done = script("--model", LLAMA, "--precision", "int4w", "--chars", 4000)
    assert done.returncode == 9, done.stderr
    assert "undecided" in done.stdout and "add about" in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--model", LLAMA, "--chars", 10], 2, "longer text"),
        (["--model", DATA / "clocher-tiny-bitnet", "--chars", 2000], 3, "not the same model"),
        (["--model", DATA, "--chars", 2000], 3, "no model, but 3 below it"),
        (["--model", LLAMA, "--chars", 2000, "--max-kld", "nan"], 2, "--max-kld"),
    ],
    ids=["short-text", "other-model", "no-model", "nan-limit"],
)
def test_script_errors(script: Script, args: list[object], code: int, message: str) -> None:
    done = script(*args)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert message in done.stderr


# The table

ROWS = [
    Row("reference", 16.0, 13 << 20, 39.93),
    *(
        Row(
            f"model-{kind}",
            bpw,
            int(bpw * 1e6),
            40.0,
            Estimate(1.002, 1.0015, 1.0027),
            Estimate(kld, kld * 0.9, kld * 1.1),
            Estimate(0.95, 0.94, 0.96),
            Estimate(0.01, 0.009, 0.011),
            500.0,
            verdict,
        )
        for kind, bpw, kld, verdict in (
            ("int8", 8.5, 2e-5, "pass"),
            ("int4", 4.5, 2.7e-3, "fail"),
            ("int4-imx", 4.5, 2.6e-3, "undecided"),
            ("exact", 16.0, 0.0, "pass"),
        )
    ),
]


def test_table_is_aligned_and_rounded_to_its_intervals() -> None:
    lines = table(ROWS).splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines) == 7
    assert "1.00200 ±0.00060" in lines[3] and "95.0 ±1.0" in lines[3] and " 500 |" in lines[3]
    assert "1 ±?" in table([replace(ROWS[1], ppl_ratio=Estimate(1, -np.inf, np.inf))])

"""Published files beside llama.cpp: the sums are llama-perplexity's, and a run goes on."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import quantise, real
from bench.experiment import NotMeasured
from bench.llama_programs import answered, completed, divergence
from bench.quantise import WEIGHED, over_theirs
from clocher_runtime.quality.compare import score_window
from clocher_runtime.quality.likelihood import Question
from clocher_runtime.quality.tasks import Asked, Prompted

TEXT = Path(__file__).parent / "data/valid.txt"
V = 300
WINDOWS = [[1, *((7 * i + j) % V for i in range(real.WINDOW - 1))] for j in range(2)]
SAID = """\
Mean PPL(Q)                   :  12.500000 ±   0.100000
Mean    KLD:   0.002500 ±   0.000100
Same top p: 96.500 ± 0.100 %
"""


def logits(ids, noise: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(sum(ids))
    found = 3 * rng.standard_normal((len(ids), V), dtype=np.float32)
    return found + np.float32(noise) * rng.standard_normal((len(ids), V), dtype=np.float32)


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        made = {"content": asked["prompt"].upper()[: asked["n_predict"]] + asked["stop"][0]}
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(made).encode())
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_base_has_what_llama_perplexity_compares(tmp_path: Path) -> None:
    base = tmp_path / "a.base"
    exact = real.write_base(base, WINDOWS, logits)
    assert base.stat().st_size == 20 + 2 * 4 * real.WINDOW + 2 * 2 * real.SCORED * (V + 4)
    own = real.compared(base, WINDOWS, logits)
    assert own == exact and own["tokens"] == own["same"] == 2 * real.SCORED
    assert abs(own["kld"] / own["tokens"]) < 1e-6
    rough = real.compared(base, WINDOWS, lambda ids: logits(ids, 0.1))
    at = slice(real.FIRST, real.WINDOW)
    scores = [score_window(logits(ids)[at], logits(ids, 0.1)[at], ids[at]) for ids in WINDOWS]
    kld = np.concatenate([each.kld for each in scores])
    row = real.summary(rough, exact)
    assert row["kld"] == pytest.approx(kld.mean(), rel=1e-3)
    assert row["kld_error"] == pytest.approx(kld.std() / np.sqrt(len(kld) - 1), rel=1e-2)
    assert row["same_top"] == np.concatenate([each.same_top for each in scores]).mean() < 1
    nll = np.concatenate([each.nll_model - each.nll_reference for each in scores]).mean()
    assert row["ppl_ratio"] == pytest.approx(np.exp(nll), rel=1e-4)


def program(path: Path, said: str, code: int = 0) -> Path:
    path.mkdir()
    tool = path / "llama-perplexity"
    tool.write_text(f"#!{sys.executable}\nprint({said!r})\nraise SystemExit({code})\n")
    tool.chmod(0o755)
    return path


def test_what_llama_perplexity_prints_is_read(tmp_path: Path) -> None:
    sums = divergence(program(tmp_path / "a", SAID), Path("m"), Path("b"), 1000, 1)
    row = real.summary(sums, {"tokens": 10, "nll": 10 * np.log(12.5)})
    assert row["kld"] == pytest.approx(0.0025) and row["kld_error"] == pytest.approx(1e-4)
    assert row["same_top"] == pytest.approx(0.965) and row["ppl_ratio"] == pytest.approx(1)
    asked = [("Q?", ("A", "B"), 1)] * 4
    found = answered(
        program(tmp_path / "c", "1\t0\n2\t50.0\n3\t66.7\n4\t75.0"), Path("m"), asked, 1
    )
    assert found == {"items": 4, "right": 3}
    for said, code in (("", 0), (SAID, 1)):
        with pytest.raises(NotMeasured):
            divergence(program(tmp_path / f"{code}", said, code), Path("m"), Path("b"), 1000, 1)


def test_parts_are_measured_once(tmp_path: Path) -> None:
    parts = real.Parts(tmp_path / "parts", None)
    for _ in range(2):
        parts.do("m text Clocher 0", lambda: {"tokens": 2.0})
    real.Parts(tmp_path / "parts", None).do("m text Clocher 0", pytest.fail)
    parts.do("m text Clocher 1", lambda: {"tokens": 3.0})
    again = real.Parts(tmp_path / "parts", None)
    assert again.sums("m", "text", "Clocher")["tokens"] == 5
    assert again.sums("m", "text", "Clocher", runs=1)["tokens"] == 2


def test_completions_come_from_llama_server(tmp_path: Path) -> None:
    tool = tmp_path / "llama-server"
    tool.write_text(f"#!{sys.executable}\n{SERVER}")
    tool.chmod(0o755)
    items = [Asked(text, ("!",), 3, "", lambda said, answer: {}) for text in ("abcd", "xy")]
    assert completed(tmp_path, Path("m"), items, 1) == ["ABC!", "XY!"]
    with pytest.raises(NotMeasured, match="llama-server: "):  # it breaks off an answer
        completed(tmp_path, Path("m"), [Asked("a", (), 3, "", lambda said, answer: {})], 1)
    tool.write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    with pytest.raises(NotMeasured, match="exit code 3"):
        completed(tmp_path, Path("m"), items, 1)


def test_our_own_answers_are_counted(tmp_path: Path) -> None:
    model = Path(__file__).parent / "data/clocher-tiny-llama"
    asks = Prompted([Question("The", (" end", " end", " zq"), i) for i in (0, 1, 2)], {})
    asked = SimpleNamespace(threads=1, llama=None, keep=tmp_path / "parts")
    for engine in (real.EXACT, real.DEFAULT):
        found = real._accuracy(asks, model, engine, asked)
        assert found["items"] == 3 and found["right"] in (1, 2)  # the first of equal choices


def test_divergences_are_compared_at_equal_bytes() -> None:
    theirs = [{"method": WEIGHED, "mib": mib, "kld": kld} for mib, kld in ((90, 0.04), (110, 0.01))]
    own = {"method": "gptq", "mib": 100, "kld": 0.01}
    assert over_theirs(own, [*theirs, own], "kld") == pytest.approx(0.5)
    worse = {"method": WEIGHED, "mib": 99, "kld": 0.05}
    assert over_theirs(own, [*theirs, worse], "kld") == pytest.approx(0.5)
    assert over_theirs({**own, "mib": 111}, [*theirs, own], "kld") is None


def test_a_real_shape_is_quantised_and_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(__file__).parent / "data/clocher-tiny-llama"
    out = tmp_path / "rows.json"
    words = ["--model-dir", model, "--calib-text", TEXT, "--text", TEXT, "--tokens", 255]
    words += ["--only", "(int4 g32|int8) rtn", "--keep", tmp_path / "parts", "--json", out]
    other = tmp_path / "other.txt"
    other.write_text(TEXT.read_text()[1:])
    # Where the next one goes on; with another text in a place of its own.
    for count, more in enumerate(([], ["--calib-text", other]), 1):
        with monkeypatch.context() as ended, pytest.raises(SystemExit, match="1"):
            ended.setattr(quantise, "sizes", lambda made: 1 / 0)
            quantise.main.main([*map(str, [*words, *more]), "--threads", "1"])
        begun = [*tmp_path.glob("parts.*/*-int4-g32-rtn")]
        assert len(begun) == count and all((each / "out").is_dir() for each in begun)
    with pytest.raises(SystemExit, match="0"):
        quantise.main.main([*map(str, words), "--threads", "1"])
    small, large = json.loads(out.read_text())
    assert (small["format"], large["format"]) == ("int4 g32", "int8")
    assert small["bits"] == pytest.approx(4.75) and small["mib"] < large["mib"]
    assert 0 < large["kld_text"] < small["kld_text"] and small["tokens_text"] == 255
    assert len([*tmp_path.glob("parts.*/*-rtn")]) == 1  # that of the other text


def test_the_memory_of_a_process_is_its_own() -> None:
    large = np.ones(1 << 26)  # 512 MiB of this one
    found = real._cost([sys.executable, "-S", "-c", "bytearray(64 << 20)"])
    assert 64 < found["memory_mib"] < 256 < large.nbytes >> 20 and found["start_s"] > 0
    with pytest.raises(NotMeasured, match="exit code 3"):
        real._cost([sys.executable, "-S", "-c", "raise SystemExit(3)"])

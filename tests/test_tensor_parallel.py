"""A model divided among ranks: the logits of one, the same bits on all of them."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_models import BITNET, FAMILIES, MORE_FAMILIES, make, make_bitnet, make_mxfp4, prompt_of
from rank_threads import on_ranks

from clocher_kernels.errors import DeviceError, ModelChanged, ModelNotFound, NonFinite, UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.ops.collectives import part
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.binding import Bound, bind
from clocher_runtime.engine.footprint import sizes_of
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.models.division import Division

TINY = Path(__file__).parent / "data" / "clocher-tiny-blocks"
EMBEDDED = Path(__file__).parents[1] / "clocher_runtime" / "assets" / "clocher-tiny-gptoss"
LIMIT = 1e-5
"""Of the largest difference of logits, over their RMS."""
PROMPT, STEPS = 17, 3


def bound(model: Model, backend: str, act_prec: str | None, ranks: Any = None) -> Bound:
    sizes = sizes_of(model.spec, backend, context=128, kv_dtype="f32", chunk=23, all_logits=True)
    return bind(
        model,
        sizes,
        backend=backend,
        threads=1,
        act_prec=act_prec,
        tuning=None,
        pretranspose=None,
        prefix_cache=False,
        progress=None,
        packing=None,
        ranks=ranks,
    )


def stepped(of: Bound, ids: list[int]) -> tuple[np.ndarray, list[int]]:
    """Return the logits of a prompt, and the tokens that the device then makes by itself."""
    executor, count = of.executor, len(ids)
    with closing(executor):
        for name, buffer in executor.plan.buffers.items():
            if name.endswith("pages"):
                executor.array(name)[...] = np.arange(np.prod(buffer.shape)).reshape(buffer.shape)
        executor.array("ids")[:count] = ids
        executor.array("positions")[:count] = np.arange(count)
        executor.array("ends")[:count] = np.arange(count) + 1
        executor.array("rows")[:count] = np.arange(count)
        executor.upload()
        executor.step(count, count)
        logits = executor.fetch("logits", count).copy()
        made = []
        executor.array("ids")[0] = executor.fetch("sampled", count)[-1]
        executor.array("positions")[0], executor.array("ends")[0] = count, count + 1
        for _ in range(STEPS):
            executor.upload()
            executor.step(1, 1)
            made.append(int(executor.fetch("sampled", 1)[0]))
    return logits, made


def differ(
    model: Model, count: int, backend: str = "cpu", act_prec: str | None = "fp32"
) -> tuple[float, list[str]]:
    """Compare ranks with one; return the largest difference, and the ops of the first's Plan."""
    ids = prompt_of("ranks", model.spec.vocab_size, PROMPT)
    expected, made = stepped(bound(model, backend, act_prec), ids)

    def work(ranks: Any) -> tuple[np.ndarray, list[int], list[str]]:
        own = bound(model, backend, act_prec, ranks)
        return *stepped(own, ids), [call.op for call in own.executor.plan.calls]

    found = on_ranks(count, work)
    for logits, tokens, _ in found:
        assert np.array_equal(logits.view(np.uint32), found[0][0].view(np.uint32))
        assert tokens == made
    scale = np.sqrt(np.mean(expected.astype(np.float64) ** 2))
    return float(np.abs(found[0][0] - expected).max() / scale), found[0][2]


def made_model(family: str, seed: int, folder: Path) -> Model:
    if family == "mxfp4":
        make_mxfp4(seed, folder)
    elif family == "bitnet":
        make_bitnet(BITNET[seed % len(BITNET)], seed, folder, use_rms_norm=seed % 2 == 0)
    else:
        make(family, seed, folder)
    return load_model(open_checkpoint(folder))


def can_be_divided(model: Model, count: int) -> bool:
    """Return whether the rule in the docs says so."""
    heads, kv = model.spec.num_heads, model.spec.num_kv_heads
    return kv >= count or (count % kv == 0 and heads >= count)


def compare(family: str, seed: int, folder: Path, count: int, backend: str = "cpu") -> bool:
    model = made_model(family, seed, folder)
    if not can_be_divided(model, count):
        with pytest.raises(UsageError, match="cannot be divided among them"):
            Division(model.spec, model.formats, 0, count)
        return False
    difference, _ = differ(model, count, backend)
    assert difference <= LIMIT
    return True


EVERY = (*FAMILIES, *MORE_FAMILIES, "mxfp4", "bitnet")


@pytest.mark.parametrize("family", EVERY)
def test_two_ranks_equal_one(family: str, tmp_path: Path) -> None:
    assert any(compare(family, seed, tmp_path / str(seed), 2) for seed in (2, 3, 4, 5))


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY)
def test_ranks_equal_one(family: str, tmp_path: Path) -> None:
    checked = {
        (count, backend): sum(
            compare(family, seed, tmp_path / f"{seed}-{count}-{backend}", count, backend)
            for seed in range(20)
        )
        for count in (2, 3, 4)
        for backend in ("cpu", "reference")
    }
    assert checked[2, "cpu"] >= 5


@pytest.mark.parametrize("precision", ["int4w", "int8w", "bf16", "fp8_b128w", "mxfp4w", "ternaryw"])
def test_stored_formats(precision: str) -> None:
    model = load_model(open_checkpoint(TINY), precision)
    assert differ(model, 2)[0] <= LIMIT


@pytest.mark.parametrize("act_prec", ["int8", "fp8"])
def test_quantised_activations_give_the_bits_of_one_rank(act_prec: str) -> None:
    difference, ops = differ(load_model(open_checkpoint(TINY), "int4w"), 3, act_prec=act_prec)
    assert difference == 0
    assert "all_reduce" not in ops


def test_quantised_activations_of_experts_give_the_bits_of_one_rank() -> None:
    assert differ(load_model(open_checkpoint(EMBEDDED)), 2, act_prec=None)[0] == 0


def test_groups_that_cannot_be_divided_give_each_rank_some_experts(tmp_path: Path) -> None:
    model = made_model("mxfp4", 0, tmp_path / "model")
    assert model.spec.moe is not None and model.spec.moe.inner == 32, "one group"
    difference, ops = differ(model, 2)
    assert difference <= LIMIT
    assert ops.count("own_experts") == model.spec.num_layers


def test_what_is_exchanged() -> None:
    """Two sums a layer, and the logits; more only where sums would not be those of one rank."""
    _, ops = differ(load_model(open_checkpoint(EMBEDDED)), 2, act_prec="fp32")
    layers = load_model(open_checkpoint(EMBEDDED)).spec.num_layers
    assert (ops.count("all_reduce"), ops.count("all_gather")) == (2 * layers, 1)


def test_ternary_weights_give_the_bits_of_one_rank(tmp_path: Path) -> None:
    assert differ(made_model("bitnet", 0, tmp_path / "model"), 2)[0] == 0


@pytest.mark.parametrize(
    ("total", "unit", "count"), [(10, 1, 3), (2880, 128, 4), (201088, 4, 7), (90, 32, 2)]
)
def test_parts_are_whole_units_and_everything(total: int, unit: int, count: int) -> None:
    runs = [part(total, unit, rank, count) for rank in range(count)]
    assert runs[0][0] == 0 and runs[-1][1] == total
    assert all(one[1] == other[0] for one, other in pairwise(runs))
    assert all(start % unit == 0 for start, _ in runs)
    sizes = [-(-(last - first) // unit) for first, last in runs]
    assert max(sizes) - min(sizes) <= 1


FORMATS = (
    ("f32", 37, 24),
    ("bf16", 64, 24),
    ("int8_row_f32", 50, 24),
    ("int8_tensor_f32", 50, 24),
    ("int8_g32_f16", 100, 24),
    ("int4_sym_g64_f16", 160, 24),
    ("int4_asym_row_bf16", 51, 24),
    ("fp8_e4m3_row_f32", 50, 24),
    ("fp8_e4m3_b128_f32", 300, 300),
    ("ternary_f16", 50, 24),
    ("mxfp4", 128, 24),
    ("q4_k", 512, 24),
    ("iq4_nl", 96, 24),
)


@pytest.mark.parametrize(("name", "columns", "rows"), FORMATS)
def test_a_part_decodes_to_that_part(name: str, columns: int, rows: int) -> None:
    fmt = parse_format(name)
    values = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    tensor = encode(values, fmt)
    decoded = tensor.decode()
    for axis, total in ((-2, rows), (-1, columns)):
        ends = [*range(0, total, fmt.unit[axis]), total]
        for start, stop in pairwise(ends):
            index = (slice(start, stop),) if axis == -2 else (slice(None), slice(start, stop))
            for last in (stop, total):
                index = tuple(slice(start, last) if s.stop else s for s in index)
                assert np.array_equal(tensor.cut(axis, start, last).decode(), decoded[index])


def ids_of(model: Model, count: int, **options: Any) -> list[int]:
    with closing(
        Session(model, threads=2, context=256, tensor_parallel=count, **options)
    ) as session:
        session.warm()
        prompts = [prompt_of(str(n), model.spec.vocab_size, 30 + 9 * n) for n in range(2)]
        how = Sampling(temperature=0.8, top_p=0.9, seed=4)
        return [t.id for t in session.generate(prompts, 24, how, stop_ids=frozenset())]


def test_processes_make_the_tokens_of_one() -> None:
    model = load_model(open_checkpoint(EMBEDDED))
    options: dict[str, Any] = {"batch": 2, "speculate": "auto", "prefix_cache": True}
    assert ids_of(model, 2, **options) == ids_of(model, 1, **options)


def followers(session: Session) -> list[int]:
    """Return the ids of the processes that follow."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    found = []
    for child in children:
        line = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"clocher_runtime.engine.rank_process" in line:
            found.append(int(child))
    return found


def test_a_follower_that_is_killed_ends_the_session_with_an_error() -> None:
    model = load_model(open_checkpoint(EMBEDDED))
    with closing(Session(model, threads=2, context=256, tensor_parallel=2)) as session:
        tokens = session.generate([[1, 2, 3]], 200, stop_ids=frozenset())
        next(tokens)
        (pid,) = followers(session)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match="load the model again"):
            list(tokens)
    assert not followers(session)


def test_a_model_that_is_gone_before_a_follower_loads_it(tmp_path: Path) -> None:
    model = made_model("qwen2", 3, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="rank 1: "):
        Session(model, threads=2, context=64, tensor_parallel=2)


def test_a_model_that_is_another_one_for_a_follower(tmp_path: Path) -> None:
    model = made_model("qwen2", 3, tmp_path / "model")
    made_model("qwen2", 5, tmp_path / "model")
    with pytest.raises(ModelChanged, match="rank 1: "):
        Session(model, threads=2, context=64, tensor_parallel=2)


def test_what_is_not_finite_is_found_on_two_ranks(tmp_path: Path) -> None:
    model = made_model("qwen2", 3, tmp_path / "model")
    name = "model.layers.1.mlp.down_proj.weight"
    weight = model.weights[name]
    assert isinstance(weight, QuantTensor)
    path = tmp_path / "model" / "model.safetensors"
    poison(path, name)
    broken = load_model(open_checkpoint(tmp_path / "model"))
    with (
        closing(Session(broken, threads=2, context=64, tensor_parallel=2)) as session,
        pytest.raises(NonFinite, match="down_proj"),
    ):
        list(session.generate([[1, 2, 3]], 4))


def poison(path: Path, name: str) -> None:
    """Make the first value of a tensor of a safetensors file infinite."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start = json.loads(data[8 : 8 + size])[name]["data_offsets"][0] + 8 + size
    data[start : start + 4] = np.float32(np.inf).tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"tensor_parallel": 2, "backend": "stub"}, "back end of 2 ranks"),
        ({"tensor_parallel": 2, "act_sparsity": "0.25"}, "act_sparsity with tensor_parallel"),
        ({"tensor_parallel": 64}, "cannot be divided among them; use fewer ranks"),
    ],
)
def test_what_cannot_be_divided(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Session(load_model(open_checkpoint(EMBEDDED)), context=64, **options)


def test_a_run_tells_of_its_ranks_and_leaves_no_process() -> None:
    command = [sys.executable, "-m", "clocher_runtime", "run", "--tensor-parallel", "2"]
    command += ["--prompt", "import", "--max-new", "5", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    line = json.loads(done.stdout)
    assert line["tensor_parallel"] == 2 and line["tokens_generated"] == 5


def test_followers_end_with_a_leader_that_is_killed() -> None:
    command = [sys.executable, "-m", "clocher_runtime", "run", "--tensor-parallel", "2"]
    command += ["--prompt", "import", "--max-new", "3000", "--ignore-eos", "--device", "cpu"]
    leader = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{leader.pid}/task/{leader.pid}/children")
    until = time.monotonic() + 60
    while not (found := children.read_text().split()) and time.monotonic() < until:
        time.sleep(0.05)
    leader.kill()
    leader.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in found) and time.monotonic() < until:
        time.sleep(0.05)
    assert found and not any(Path(f"/proc/{pid}").exists() for pid in found)

"""Single ops as others call them: NumPy, torch ops and their schemas, the layer, transformers."""

import gc
import os
import subprocess
import sys
import tomllib
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from op_cases import OpRun, error

import clocher_kernels
from clocher_kernels import linear, quantize
from clocher_kernels.cuda.launch import INTERPRETER
from clocher_kernels.cuda.prepack import as_torch
from clocher_kernels.errors import FormatError, ShapeError, UnsupportedOp, UsageError
from clocher_kernels.library.host import LIBRARY, untold
from clocher_kernels.ops import OPS as CONTRACTS
from clocher_kernels.ops import ReferenceExecutor
from clocher_kernels.ops.contract import Case, OpSpec
from clocher_kernels.quant_tensor import QuantTensor
from clocher_kernels.torch import OPS, QuantLinear, stored
from clocher_kernels.torch.gpu import on_gpu

LLAMA = Path(__file__).parent / "data" / "clocher-tiny-llama"
WANTED = {
    "linear": ("int4_sym_g128", "mxfp4-odd", "q4_k", "fp8_e4m3_b128", "bf16-ragg"),
    "bsr_linear": ("16x32-tails", "20x24-int4"),
    "route": ("m5-e33", "bias"),
    "moe_gate_up": ("mxfp4-m5", "silu"),
    "moe_down": ("mxfp4-m1", "int8_row_f32-m5"),
    "attention": ("decode-i8", "decode-bf16", "tree-bf16"),
    "kv_append": ("append-f16", "append-i8"),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def few() -> list[tuple[OpSpec, Case]]:
    found = []
    for name, starts in WANTED.items():
        spec = CONTRACTS[name]
        for start in starts:
            found.append((spec, next(c for c in spec.cases if c.id.startswith(start))))
    return found


def torch_call(run: OpRun, spec: OpSpec) -> dict[str, Any]:
    """Return the arguments of a case as the torch op takes them, by name."""
    case, made = run.case, {}
    for p in spec.given:
        value = run.values.get(p.name)
        if isinstance(value, QuantTensor):
            planes = value.format.planes(value.shape)
            made[p.name] = [as_torch(value.planes[n].copy(), planes[n].dtype) for n in planes]
            made |= {f"{p.name}_format": value.format.name, f"{p.name}_shape": [*value.shape]}
        elif value is not None:
            buffer = run.plan.buffers.get(p.name)
            made[p.name] = as_torch(value.copy(), buffer.dtype if buffer else "f32")
    made |= {letter: case.sizes[letter] for letter in untold(spec)}
    return made | dict(case.attrs)


def results(spec: OpSpec, made: dict[str, Any], outs: Any) -> dict[str, torch.Tensor]:
    outs = outs if isinstance(outs, tuple | list) else [outs]
    returned = dict(zip([p.name for p in spec.outputs], outs, strict=False))
    return returned | {
        p.name: made[p.name] for p in spec.params if p.kind == "inout" and p.name in made
    }


@pytest.mark.parametrize(
    "spec,case", few(), ids=lambda each: getattr(each, "id", None) or each.name
)
def test_ops_are_the_references_on_both_back_ends(spec: OpSpec, case: Case) -> None:
    run = OpRun(spec, case)
    expected = run.run(ReferenceExecutor)
    for where in ("cpu", "interpreter"):
        if where == "interpreter" and "cuda" in case.missing:
            continue
        made = torch_call(run, spec)
        if any("i8" in p.dtypes for p in spec.params if p.kind == "in"):
            made["act_prec"] = "fp32"
        outs = OPS[spec.name](**made) if where == "cpu" else on_gpu(spec, made, INTERPRETER)
        allowed = spec.allowed(case, "cpu" if where == "cpu" else "cuda")
        for name, got in results(spec, made, outs).items():
            dtype = run.plan.buffers[name].dtype
            rms, most = error(stored.as_numpy(got, dtype), expected[name])
            assert rms <= allowed.rms and most <= allowed.max, (where, name, rms, most)


def some_layer(fmt: str = "int4_g128", n: int = 48, k: int = 256) -> QuantLinear:
    torch.manual_seed(0)
    return QuantLinear.from_linear(torch.nn.Linear(k, n), fmt)


def as_op(layer: QuantLinear, x: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    shape = [layer.out_features, layer.in_features]
    return (x, layer.planes), {"w_format": layer.format.name, "w_shape": shape}


def test_torch_checks_the_ops() -> None:
    layer = some_layer()
    arguments, named = as_op(layer, torch.randn(3, 256))
    torch.library.opcheck(torch.ops.clocher.linear.default, arguments, named)
    spec = CONTRACTS["kv_append"]
    case = next(c for c in spec.cases if c.id.startswith("append-f16"))
    made = torch_call(OpRun(spec, case), spec)
    torch.library.opcheck(torch.ops.clocher.kv_append.default, (), made)


@torch._dynamo.config.patch(disable=False)  # which other tests switch on
def test_compiled_whole_it_is_the_same() -> None:
    layer = some_layer()
    model = torch.nn.Sequential(layer, torch.nn.SiLU(), some_layer("int8", 8, 48))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (1, 3, 20):
        x = torch.randn(tokens, 256)
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("fmt", ["int4_g128", "int8", "mxfp4", "ternary", "bsr_16x32_f32"])
def test_a_layer_comes_back_from_its_state(fmt: str, tmp_path: Path) -> None:
    layer = some_layer(fmt)
    x = torch.randn(2, 5, 256).to(torch.bfloat16)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    state = torch.load(tmp_path / "layer.pt", weights_only=True)
    for name, plane in layer.state_dict().items():
        assert torch.equal(state[name].view(torch.uint8), plane.view(torch.uint8))
    other = QuantLinear(256, 48, layer.format, True, device="meta")
    other.load_state_dict(state, assign=True)
    y = other(x)
    assert torch.equal(y, layer(x)) and y.dtype == torch.bfloat16
    assert other.half().codes.dtype == layer.codes.dtype if "int" in fmt else True


def test_a_layer_sees_what_is_loaded_into_it() -> None:
    layer, other = some_layer(), QuantLinear.from_linear(torch.nn.Linear(256, 48), "int4_g128")
    x = torch.randn(2, 256)
    before = other(x)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and not torch.equal(before, other(x))


def test_a_call_is_not_repeated_with_what_has_changed() -> None:
    """Whatever a prepared call depends on may be changed between two calls."""
    torch.manual_seed(1)  # some_layer takes 0, and is to be another
    layer, x = QuantLinear.from_linear(torch.nn.Linear(256, 48), "int4_g128"), torch.randn(2, 256)
    given = torch.nn.Linear(256, 48)
    changes = {
        "loaded": lambda: layer.load_state_dict(some_layer().state_dict()),
        "written": lambda: layer.codes.bitwise_xor_(torch.full_like(layer.codes, 17)),
        "other memory": lambda: setattr(
            layer.codes, "data", QuantLinear.from_linear(given, "int4_g128").codes
        ),
        "other tensor": lambda: setattr(layer, "scales", layer.scales * 2),
        "bias": lambda: layer.bias.add_(1),
        "bias's memory": lambda: setattr(layer.bias, "data", torch.ones(48)),
        "no bias": lambda: setattr(layer, "bias", None),
        "setting": lambda: setattr(layer, "act_prec", "fp32"),
        "threads": lambda: torch.set_num_threads(2),
    }
    for name, change in changes.items():
        before = layer(x)
        assert torch.equal(layer(x), before)
        change()
        fresh = QuantLinear(256, 48, "int4_g128", layer.bias is not None, act_prec=layer.act_prec)
        fresh.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x), fresh(x)), name
        assert torch.equal(layer(x), before) == (name in ("threads",)), name
    for other in (x.to(torch.bfloat16), x[:, ::1].t().contiguous().t(), x.repeat(20, 1), x[:0]):
        assert torch.equal(layer(other), fresh(other))
    with pytest.raises(UnsupportedOp, match="no gradient"):
        layer(x.clone().requires_grad_()).sum().backward()


def test_threads_call_and_a_fork_does() -> None:
    torch.set_num_threads(2)
    layer, inputs = some_layer(), torch.randn(40, 1, 256)
    expected = [layer(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for got, y in zip(pool.map(layer, list(inputs) * 5), expected * 5, strict=True):
            assert torch.equal(got, y)
    child = os.fork() if hasattr(os, "fork") else None
    if child == 0:
        os._exit(0 if torch.equal(layer(inputs[0]), expected[0]) else 1)
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_was_bound_goes_with_its_weight() -> None:
    layer = some_layer()
    layer(torch.randn(1, 256))
    held = weakref.ref(next(iter(stored._kept[layer.planes[0]].values())).value)
    assert held() is not None
    del layer
    gc.collect()
    assert held() is None
    w = quantize(np.ones((8, 64), np.float32), "int8")
    linear(np.ones((1, 64), np.float32), w)
    gone = weakref.ref(w.planes["codes"])
    del w
    gc.collect()
    assert gone() is None


def test_numpy_needs_no_torch() -> None:
    code = """
import sys, numpy as np
from clocher_kernels import linear, quantize
rng = np.random.default_rng(0)
x = rng.standard_normal((300, 256), np.float32)
w = quantize(rng.standard_normal((40, 256), np.float32), "int4_g64")
y, exact = linear(x, w, threads=1), x @ w.decode().T
assert np.abs(y - exact).max() < 0.05 * exact.std()
assert np.abs(linear(x, w, act_prec="fp32", threads=1) - exact).max() < 1e-5 * exact.std()
assert np.array_equal(linear(x[:3], w, threads=1), y[:3])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_mistakes_are_told() -> None:
    layer = some_layer()
    (x, planes), named = as_op(layer, torch.randn(2, 256))
    with pytest.raises(ShapeError, match=r"expected \[..., 256\]"):
        layer(torch.randn(2, 255))
    with pytest.raises(ShapeError, match=r"torch\.float64"):
        layer(x.double())
    with pytest.raises(ShapeError, match="not contiguous"):
        OPS["linear"](x, [planes[0].t().contiguous().t(), *planes[1:]], **named)
    with pytest.raises(ShapeError, match="planes; expected"):
        OPS["linear"](x, planes[:1], **named)
    with pytest.raises(UsageError, match="act_prec"):
        QuantLinear(256, 48, "int4_g128", act_prec="int3")
    with pytest.raises(FormatError, match="unknown format"):
        QuantLinear(256, 48, "int5_g128")
    with pytest.raises(ShapeError, match="mxfp4"):
        QuantLinear(100, 48, "mxfp4")
    assert torch.equal(layer(x[:, ::1].t().contiguous().t()), layer(x))


@pytest.mark.slow
def test_transformers_generates_what_the_runtime_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from clocher_runtime import load
    from clocher_runtime.adapters.transformers_quantizer import ClocherConfig

    config = ClocherConfig("int4_g64")
    model = AutoModelForCausalLM.from_pretrained(
        LLAMA, quantization_config=config, dtype=torch.float32
    )
    own = load(
        LLAMA, precision="int4w", kv_dtype="f32", act_prec="int8", threads=1, all_logits=True
    )
    with own, torch.no_grad():
        prompt = own.tokenizer.encode_prompt("def read(path):\n")
        expected = list(own.complete(prompt, max_new=64).ids)
        made = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
        assert made[0, len(prompt) :].tolist() == expected and len(expected) == 64
        text = prompt + expected
        mine = torch.tensor(own.session.logits(text[:-1]))
        theirs = model(torch.tensor([text])).logits[0, :-1]
        targets = torch.tensor(text[1:])
        losses = [
            float(torch.nn.functional.cross_entropy(each, targets)) for each in (mine, theirs)
        ]
        assert np.exp(losses[0]) == pytest.approx(np.exp(losses[1]), rel=1e-3)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(made).logits, model(made).logits)


def test_short_names_and_what_works_are_told() -> None:
    w = np.ones((8, 64), np.float32)
    tensor = quantize(w, "int4")
    assert repr(tensor) == "QuantTensor([8, 64], int4_sym_g64_f16, 272 bytes)"
    with pytest.raises(FormatError, match="for short, int4, int4_g<G>, int8, int8_g<G>, fp8"):
        quantize(w, "int5")
    with pytest.raises(UsageError, match="got int32, expected an array of float16, float32"):
        quantize(w.astype(np.int32), "int4")
    with pytest.raises(ShapeError, match=r"got int32\[1, 64\], expected float16, float32"):
        linear(np.ones((1, 64), np.int32), tensor)
    declared = tomllib.loads(
        (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert clocher_kernels.__version__ == declared["project"]["version"]


def test_torch_ops_are_documented() -> None:
    for name in LIBRARY:
        packet = getattr(torch.ops.clocher, name)
        first = (CONTRACTS[name].reference.__doc__ or "").splitlines()[0]
        assert first in packet.__doc__ and "Args:" in packet.default.__doc__


def test_the_adapter_of_lm_eval_says_what_it_needs() -> None:
    without = (
        "import runpy, sys; sys.modules['lm_eval'] = None; "
        "runpy.run_module('clocher_runtime.adapters.lm_eval_model', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("this adapter needs lm_eval")
    assert done.stderr.endswith("not installed; pip install lm_eval\n")

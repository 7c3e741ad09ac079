"""The profile of a step: stamps, rows, flame graph."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from sessions import make_session

from bench import profile
from bench.profile import (
    Frame,
    Profiler,
    flame,
    median_step,
    named,
    rows_of,
    svg,
)
from clocher_kernels.plan import Call
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.engine.load import load_model

STEPS = 3


@pytest.fixture(scope="module")
def model():
    return load_model(open_checkpoint(embedded_model()))


@pytest.fixture(scope="module", params=[1, 2])
def profiler(request, model):
    profiler = Profiler(model, threads=request.param, context=64)
    yield profiler
    profiler.session.close()


@pytest.fixture(scope="module")
def steps(profiler):
    return profiler.decode(STEPS, depth=5)


def test_a_stamped_session_makes_the_same_tokens(model, profiler):
    plain = make_session(model, threads=1, context=64)
    made = [
        [token.id for token in session.generate([[7, 8, 9]], 12, stop_ids=frozenset())]
        for session in (plain, profiler.session)
    ]
    plain.close()
    assert made[0] == made[1]


def test_every_thread_has_times_in_order(profiler, steps):
    assert len(steps) == STEPS
    assert (np.diff(profiler._stamps.times, axis=1) >= 0).all()


def test_the_parts_of_a_step_add_up_to_its_compiled_call(steps):
    for step in steps:
        parts = sum(call.ns + call.waiting_ns for call in step.calls) + step.late_ns
        stamps = 2 * len(step.calls) * 10_000  # between two stamps lies little more than a clock
        assert step.compiled_ns - stamps <= parts <= step.compiled_ns + 1
        assert step.compiled_ns <= step.ns


def test_bytes_are_those_of_the_weights(model, steps):
    for kind in ("linear lm_head", "linear self_attn.q_proj"):
        found = [call for call in steps[0].calls if call.name == kind]
        name = "lm_head.weight" if "lm_head" in kind else "model.layers.0.self_attn.q_proj.weight"
        least = model.weights[name].nbytes
        assert all(least <= call.nbytes <= least + 100_000 for call in found)


def test_calls_belong_to_their_layers(model, steps):
    layers = [call.layer for call in steps[0].calls]
    assert layers[0] is None and layers[-1] is None
    inner = [layer for layer in layers if layer is not None]
    assert inner == sorted(inner) and set(inner) == set(range(model.spec.num_layers))
    assert layers[: layers.index(0)] == [None] * layers.index(0)


def test_rows_hold_every_call_once(steps):
    rows = rows_of(steps, read_gbps=10.0)
    counted = sum(row.get("calls", 0) for row in rows)
    assert counted == len(steps[0].calls)
    assert [row["name"] for row in rows[-3:]] == ["waiting", "outside", "step"]
    times = [row["us"] for row in rows[:-3]]
    assert times == sorted(times, reverse=True)
    for row in rows[:-3]:
        assert row["pct_of_limit"] == pytest.approx(100 * row["gbps"] / 10.0)


def test_a_prefill_is_profiled_with_all_its_tokens(profiler):
    step = profiler.prefill(20, times=1)[0]
    append = [call for call in step.calls if call.name == "kv_append"]
    one = profiler.decode(1, depth=5)[0]
    few = [call for call in one.calls if call.name == "kv_append"]
    assert append[0].nbytes == 20 * few[0].nbytes


def test_the_flame_graph_is_as_wide_as_the_step(steps):
    step = median_step(steps)
    frames = flame(step, "a step <&>")
    assert frames[0].ns == step.ns
    for level in range(1, 5):  # the frames of a level lie side by side, within the step
        own = [(frame.start, frame.ns) for frame in frames if frame.level == level]
        ends = [start + ns for start, ns in own]
        assert ends[-1] <= step.ns + 1
        assert [start for start, _ in own] == pytest.approx([0, *ends[:-1]])
    picture = ElementTree.fromstring(svg(frames, "title <&>"))
    boxes = [e for e in picture.iter() if e.tag.endswith("rect")]
    widths = [float(e.get("width")) for e in boxes]
    assert widths[1] == max(widths[1:])
    titles = [e.text for e in picture.iter() if e.tag.endswith("title")]
    assert any("layer 0" in text for text in titles)
    assert any("GB/s" in text for text in titles)


def test_narrow_frames_are_left_out():
    picture = svg(
        [Frame(0, 0, 1e6, "all"), Frame(1, 0, 1.0, "speck"), Frame(1, 1, 9e5, "rest")], "t"
    )
    assert "speck" not in picture and "rest" in picture


def test_a_label_names_the_weight_without_its_layer():
    call = Call("linear", {"x": "h", "w": "model.layers.12.mlp.up_proj.weight", "y": "u"})
    assert named(call) == ("linear mlp.up_proj", 12)
    assert named(Call("rope", {"x": "q"})) == ("rope", None)


def test_the_model_comes_from_the_environment(tmp_path: Path) -> None:
    done = CliRunner().invoke(profile.main, [], env={"MODEL_DIR": str(tmp_path / "nowhere")})
    assert done.exit_code != 0
    assert "nowhere" in done.output

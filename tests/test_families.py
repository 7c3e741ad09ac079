"""config.json to ModelSpec: both spellings, published defaults, refusals that list the known."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import make_session
from transformers import (
    BitNetConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from weight_files import LLAMA, copy_model

from clocher_kernels.errors import FormatError, ModelError, UnsupportedModel
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine.load import load_model
from clocher_runtime.models.build import inverse_frequencies, rope_tables
from clocher_runtime.models.families import FAMILIES, spec_from_config
from clocher_runtime.models.inventory import inventory
from clocher_runtime.models.spec import RopeSpec

CONFIGS = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "GptOssForCausalLM": GptOssConfig,
    "BitNetForCausalLM": BitNetConfig,
    "SmolLM3ForCausalLM": SmolLM3Config,
    "Llama4ForCausalLM": Llama4TextConfig,
    "Ministral3ForCausalLM": Ministral3Config,
    "MixtralForCausalLM": MixtralConfig,
    "Qwen2MoeForCausalLM": Qwen2MoeConfig,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
    "GemmaForCausalLM": GemmaConfig,
    "Gemma2ForCausalLM": Gemma2Config,
    "Gemma3ForCausalLM": Gemma3TextConfig,
    "Phi3ForCausalLM": Phi3Config,
    "Olmo2ForCausalLM": Olmo2Config,
    "Olmo3ForCausalLM": Olmo3Config,
    "GraniteForCausalLM": GraniteConfig,
    "DeepseekV2ForCausalLM": DeepseekV2Config,
    "DeepseekV3ForCausalLM": DeepseekV3Config,
}
ASKED = {"DeepseekV2ForCausalLM": {"num_experts_per_tok": 6}}
"""What a family has no default for."""
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def spec_of(**changes: Any):
    return spec_from_config({**TINY, **changes})


@pytest.mark.parametrize("name", CONFIGS)
def test_fields_left_out_get_the_published_default(name: str) -> None:
    asked = ASKED.get(name, {})
    written = CONFIGS[name](**asked).to_json_string(use_diff=False)
    full = json.loads(written) | {"architectures": [name]}
    bare = spec_from_config({"architectures": [name], **asked})
    assert replace(bare, eos_ids=()) == replace(spec_from_config(full), eos_ids=())


def test_model_type_names_the_architecture_when_none_is_listed() -> None:
    config = {k: v for k, v in TINY.items() if k != "architectures"} | {"model_type": "llama"}
    assert spec_from_config(config) == spec_of()


ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 256},
    "yarn-untruncated": {
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    "yarn-factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    },
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_rope_equals_transformers(name: str, head_dim: int) -> None:
    kind = name.split("-")[0]
    rope = {"rope_type": kind, "rope_theta": 150000.0, **ROPES[name]}
    spec = spec_of(rope_parameters=rope, head_dim=head_dim).rope
    got = inverse_frequencies(spec, head_dim)
    if kind == "default":
        expected = 1.0 / (150000.0 ** (np.arange(0, head_dim, 2) / head_dim))
        factor = 1.0
    else:
        config = LlamaConfig(
            **{k: v for k, v in TINY.items() if k != "architectures"},
            head_dim=head_dim,
            rope_parameters=dict(rope),
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        expected = frequencies.numpy()
    np.testing.assert_allclose(got, expected, rtol=2e-6)
    assert spec.attention_factor == pytest.approx(factor)
    cos, sin = rope_tables(spec, head_dim, 50)
    np.testing.assert_allclose(cos[7], np.cos(7 * got) * factor, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cos**2 + sin**2, factor**2, rtol=1e-5)


def test_published_yarn_of_gpt_oss() -> None:
    spec = spec_from_config({"architectures": ["GptOssForCausalLM"]}).rope
    assert spec.attention_factor == pytest.approx(1.34657, abs=1e-5)
    assert (spec.theta, spec.factor, spec.truncate) == (150000.0, 32.0, False)


@pytest.mark.parametrize(
    "old",
    [
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **ROPES["llama3"]}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **ROPES["yarn-untruncated"]}},
    ],
    ids=["none", "type-linear", "llama3", "yarn"],
)
def test_old_and_new_spelling_mean_the_same(old: dict) -> None:
    scaling = dict(old["rope_scaling"] or {})
    kind = scaling.pop("type", scaling.pop("rope_type", "default"))
    new = {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **scaling}}
    assert spec_of(**old) == spec_of(**new)


def test_windows() -> None:
    def windows(name: str, **fields: Any) -> tuple[int, ...]:
        return spec_of(architectures=[name], head_dim=8, num_key_value_heads=2, **fields).windows

    assert windows("MistralForCausalLM") == (4096, 4096)
    assert windows("MistralForCausalLM", sliding_window=None) == (0, 0)
    assert windows("Qwen2ForCausalLM", sliding_window=9) == (0, 0)
    sliding = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    assert windows("Qwen2ForCausalLM", **sliding) == (0, 9)
    assert windows("GptOssForCausalLM") == (128, 0)
    kinds = ["full_attention", "sliding_attention"]
    assert windows("GptOssForCausalLM", layer_types=kinds) == (0, 128)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"architectures": ["FooForCausalLM"]},
            UnsupportedModel,
            "lists: .*Llama, ",
        ),
        ({"architectures": ["A", "B"]}, FormatError, "list of one name"),
        (
            {"architectures": None, "model_type": "foo"},
            UnsupportedModel,
            "'foo' is not known",
        ),
        ({"hidden_act": "tanh"}, UnsupportedModel, "known: silu"),
        (
            {"rope_parameters": {"rope_type": "polar"}},
            UnsupportedModel,
            "default, linear, dynamic, llama3, yarn, longrope",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            FormatError,
            "rope_parameters: field 'factor' is missing",
        ),
        ({"rope_scaling": 3}, FormatError, "expected an object"),
        ({"partial_rotary_factor": 0.1}, FormatError, "0 of 8 values of a head are rotated"),
        ({"partial_rotary_factor": 1.5}, FormatError, "partial_rotary_factor is 1.5"),
        ({"architectures": ["Qwen4ForCausalLM"]}, UnsupportedModel, "nearest that is is Qwen"),
        ({"text_config": 3}, FormatError, "expected an object"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, FormatError, "do not divide"),
        ({"head_dim": 7}, FormatError, "even"),
        ({"hidden_size": "32"}, FormatError, "hidden_size is '32'"),
        ({"hidden_size": True}, FormatError, "hidden_size is True"),
        ({"hidden_size": 0}, FormatError, "hidden_size is 0; expected an integer >= 1"),
        ({"num_hidden_layers": 10**30}, FormatError, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, FormatError, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, FormatError, "true or false"),
        ({"eos_token_id": ["x"]}, FormatError, r"eos_token_id\[0\] is 'x'; expected an integer"),
        (
            {"architectures": ["GptOssForCausalLM"], "layer_types": ["full_attention", "x"]},
            UnsupportedModel,
            "sliding_attention, full_attention",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], "layer_types": ["full_attention"]},
            FormatError,
            "expected 2 names",
        ),
    ],
)
def test_refusals_name_the_field_and_what_is_known(
    changes: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec_of(**changes)


@pytest.mark.parametrize("field", ["architectures", "hidden_act", "hidden_size", "rms_norm_eps"])
@pytest.mark.parametrize("value", ["x" * 100_000, ["x" * 100_000], {"x" * 100_000: 1}])
def test_a_refusal_quotes_only_the_start_of_a_long_value(field: str, value: object) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(**{field: value})
    assert field.rstrip("s") in str(caught.value)
    assert len(str(caught.value)) < 600


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = sorted(
    {
        name
        for kind in CONFIGS.values()
        for name in json.loads(kind().to_json_string(use_diff=False))
    }
    | {"rope_scaling", "rope_theta", "quantization_config", "num_experts"}
)


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, min_size=1, max_size=3),
)
def test_any_field_value_gives_a_spec_or_a_typed_error(name: str, changes: dict) -> None:
    try:
        spec = spec_from_config({**TINY, "architectures": [name], **changes})
    except ModelError:
        return
    assert len(inventory(spec)) > 0
    assert isinstance(spec.rope, RopeSpec)


# Hostile numbers: every key of every family and every kind of rope.

HOSTILE: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 1 << 24, 1 << 31, 1 << 63, 10**30, -(10**30), 10**5000),
    *(0.0, -0.0, 0.5, 1.0, 1.0000000000000002, 1.001, 1e-320, 1e-12, 1e-3, 100.0, 1e3, 1e6, 1e12),
    *(1e38, 1e308, -1e308, float("nan"), float("inf"), -float("inf")),
    *(True, False, None, "", "1", "nan", [], [1], {}, {"a": 1}),
)
ROPE_KINDS: tuple[dict[str, Any], ...] = (
    {"rope_theta": 1e4},
    *(
        {spelling: {"rope_type": kind.split("-")[0], "rope_theta": 1e4, **scaling}}
        for kind, scaling in ROPES.items()
        for spelling in ("rope_scaling", "rope_parameters")
    ),
)
NUMBERS = {
    "GptOssForCausalLM": {
        **dict.fromkeys(("num_local_experts", "num_experts_per_tok", "sliding_window"), 2),
        **dict.fromkeys(("num_experts", "experts_per_token"), 2),
        **dict.fromkeys(("swiglu_limit", "swiglu_alpha"), 2.0),
    },
    "MistralForCausalLM": {"sliding_window": 4},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma3ForCausalLM": {
        **dict.fromkeys(("query_pre_attn_scalar", "sliding_window", "sliding_window_pattern"), 2),
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 2.0),
    },
    "GraniteForCausalLM": dict.fromkeys(
        ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"),
        2.0,
    ),
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 8,
    },
    "Llama4ForCausalLM": {
        **dict.fromkeys(("attention_chunk_size", "floor_scale", "num_local_experts"), 4),
        **{"no_rope_layers": [1, 0], "attn_scale": 0.1},
    },
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "kv_lora_rank": 8, "v_head_dim": 8},
    "DeepseekV3ForCausalLM": {
        **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
        **{"num_experts_per_tok": 1, "qk_rope_head_dim": 8, "q_lora_rank": 8},
    },
    "SDARForCausalLM": {"block_size": 4, "mask_token_id": 3},
    "Fast_dLLM_QwenForCausalLM": {"bd_size": 8, "small_block_size": 4, "mask_token_id": 3},
    "LLaDA2MoeModelLM": {
        **{"block_size": 4, "mask_token_id": 3, "moe_intermediate_size": 8, "num_experts": 8},
        **{"n_group": 4, "topk_group": 2, "num_experts_per_tok": 1},
    },
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "BitNetForCausalLM": {
        "quantization_config": {
            "quant_method": "bitnet",
            "use_rms_norm": True,
            "rms_norm_eps": 1e-6,
        }
    },
}


def replaced(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield copies with one value, at any depth, replaced by a hostile one."""
    for key, value in node.items():
        for hostile in HOSTILE:
            yield {**node, key: hostile}
        if isinstance(value, dict):
            for inner in replaced(value):
                yield {**node, key: inner}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_hostile_numbers_are_refused_or_give_finite_tables(name: str) -> None:
    base = {**TINY, **NUMBERS.get(name, {}), "architectures": [name]}
    base |= {"head_dim": 8, "num_key_value_heads": 2, "original_max_position_embeddings": 16}
    accepted = refused = 0
    for rope in ROPE_KINDS:
        # Both spellings of a rope become one: its own numbers are replaced in each.
        again = "rope_scaling" in rope
        for config in (base | own for own in replaced(rope)) if again else replaced(base | rope):
            try:
                spec = spec_from_config(config)
                assert inventory(spec)
            except ModelError as error:
                assert len(str(error)) < 600
                refused += 1
                continue
            accepted += 1
            for table in rope_tables(spec.rope, spec.head_dim, 40):
                assert np.isfinite(table).all(), config
            for number in (spec.norm_eps, spec.input_norm_eps):
                assert 0 <= number <= 1
    assert accepted > 500 and refused > 3000


def test_a_base_frequency_of_one_is_refused_for_every_kind_of_rope() -> None:
    for kind, scaling in ROPES.items():
        rope = {"rope_type": kind.split("-")[0], "rope_theta": 1.0, **scaling}
        with pytest.raises(FormatError, match=r"rope_theta is 1\.0"):
            spec_of(rope_parameters=rope)


EDGE_ROPES = [
    {"rope_type": kind, "factor": factor, "rope_theta": theta, **more}
    for theta in (1.001, 1e12)
    for factor in (1e-3, 1e6)
    for kind, more in (
        ("default", {}),
        ("linear", {}),
        ("llama3", {"low_freq_factor": 1e-3, "high_freq_factor": 1e6}),
        ("yarn", {"beta_fast": 1e6, "beta_slow": 1e-3, "attention_factor": 1e-3}),
        ("yarn", {"beta_fast": 1e-3, "beta_slow": 1e6, "mscale": 100.0, "mscale_all_dim": 1e-3}),
    )
]


def test_a_model_runs_with_every_number_at_its_edge(tmp_path: Path) -> None:
    folder = copy_model(LLAMA, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_theta", None)
    edges = [{"rope_parameters": rope} for rope in EDGE_ROPES]
    edges += [{"rms_norm_eps": 1e-12}, {"rms_norm_eps": 1.0}, {"max_position_embeddings": 1 << 24}]
    for changes in edges:
        (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": None} | changes))
        model = load_model(open_checkpoint(folder))
        session = make_session(model, backend="reference", context=6, all_logits=True, chunk=4)
        assert np.isfinite(session.logits([1, 2, 3, 4, 5])).all(), changes
        session.close()

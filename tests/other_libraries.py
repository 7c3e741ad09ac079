"""Write tiny random models with the libraries that people quantise with, for test_compatibility.py.

    python -m venv libraries
    libraries/bin/python -m pip install llmcompressor auto-round gptqmodel
    libraries/bin/python tests/other_libraries.py OUT_DIR
    CLOCHER_TEST_MADE_BY_LIBRARIES=OUT_DIR python -m pytest tests/test_compatibility.py -m slow

Run by hand: the libraries are large, and want other versions of each other. Beside each model lie
`made.json`, that says what wrote it, and `expected.npy`: logits of `IDS` by transformers' float
model with the weights as the library itself decodes them. What a library cannot write is printed.
"""

import json
import shutil
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

TOKENIZER = Path(__file__).parent / "data" / "clocher-tiny-llama"
IDS = np.random.default_rng(7).integers(3, 4000, 40).tolist()
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, **EXPERTS, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, **EXPERTS, num_experts=4, moe_intermediate_size=128, norm_topk_prob=True
    ),
}


def float_model(family: str) -> PreTrainedModel:
    """Make a model with random weights, fp32."""
    torch.manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(MODELS[family](), dtype=torch.float32)
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:
                value.normal_(0, value.shape[-1] ** -0.5)
    return model.eval()


def llm_compressor(source: Path, family: str, out: Path, scheme: str) -> PreTrainedModel:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers.utils.quantization_config import CompressedTensorsConfig

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    ignore = ["lm_head", r"re:.*mlp\.gate$", r"re:.*block_sparse_moe\.gate$"]
    oneshot(
        model=model, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=ignore)
    )
    model.save_pretrained(out, save_compressed=True)
    plain = CompressedTensorsConfig(run_compressed=False)
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=plain)


def auto_round(source: Path, family: str, out: Path, form: str) -> PreTrainedModel:
    from auto_round import AutoRound

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    options = {"bits": 4, "group_size": 32, "sym": True, "iters": 0, "device_map": "cpu"}
    AutoRound(model, tokenizer, **options).quantize_and_save(str(out), format=form)
    found = next(path.parent for path in sorted(out.rglob("config.json")))
    for path in found.iterdir() if found != out else ():
        path.rename(out / path.name)
    if form != "auto_round":
        return by_gptq_model(out)
    # The words are those of GPTQ; only the settings have another name.
    copy = out.with_name(f"{out.name}-as-gptq")
    shutil.copytree(out, copy)
    config = json.loads((copy / "config.json").read_text())
    settings = config["quantization_config"]
    config["quantization_config"] = {
        key: settings[key] for key in ("bits", "group_size", "sym")
    } | {"quant_method": "gptq", "desc_act": False}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "quantization_config.json").unlink(missing_ok=True)
    return by_gptq_model(copy)


def by_gptq_model(folder: Path) -> PreTrainedModel:
    from gptqmodel import BACKEND, GPTQModel

    return GPTQModel.load(str(folder), device="cpu", backend=BACKEND.TORCH).model


def gptq_model(source: Path, family: str, out: Path, form: str) -> PreTrainedModel:
    from gptqmodel import GPTQModel, QuantizeConfig

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, source)
    options = {"bits": 4, "group_size": 32, "desc_act": form == "desc_act", "device": "cpu"}
    model = GPTQModel.load(str(source), QuantizeConfig(**options))
    rng = np.random.default_rng(1)
    ones = torch.ones(1, 64, dtype=torch.long)
    texts = [
        {"input_ids": torch.tensor(ids[None]), "attention_mask": ones}
        for ids in rng.integers(3, 4000, (16, 64))
    ]
    model.quantize(texts, batch_size=1)
    model.save(str(out))
    return by_gptq_model(out)


JOBS: dict[str, tuple[str, Callable[..., PreTrainedModel], tuple[str, ...]]] = {
    "llm-compressor": ("llmcompressor", llm_compressor, ("W4A16", "FP8_DYNAMIC", "W8A8")),
    "AutoRound": ("auto-round", auto_round, ("auto_gptq", "auto_awq", "auto_round")),
    "GPTQModel": ("gptqmodel", gptq_model, ("plain", "desc_act")),
}


# What a library does to the values that it decodes: 2^-9 of each, 5e-3 of the logits.
ROUNDS = {"llm-compressor": " to bf16"}
GATE_UP = ("gate_proj", "up_proj")


def decoded(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a quantised model's weights in fp32, as its own library decodes them."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "dequantize_weight"):
            found[f"{name}.weight"] = module.dequantize_weight().T.float()
        elif isinstance(getattr(module, "weight", None), torch.Tensor):
            found[f"{name}.weight"] = module.weight.float()
    return found


def expected(family: str, model: PreTrainedModel) -> np.ndarray:
    """Return logits of the float model with a quantised model's weights."""
    plain, values = float_model(family), decoded(model)
    for name, value in plain.named_parameters():
        if name in values:
            value.data = values[name].reshape(value.shape)
        elif name.endswith("experts.gate_up_proj"):
            each = [
                torch.cat([values[f"{base(name, e)}.{part}.weight"] for part in GATE_UP])
                for e in range(value.shape[0])
            ]
            value.data = torch.stack(each)
        elif name.endswith("experts.down_proj"):
            each = [values[f"{base(name, e)}.down_proj.weight"] for e in range(value.shape[0])]
            value.data = torch.stack(each)
        else:
            raise KeyError(name)
    with torch.no_grad():
        return plain(torch.tensor([IDS])).logits[0].float().numpy()


def base(name: str, expert: int) -> str:
    return f"{name.rpartition('.')[0]}.{expert}"


def main(out: Path) -> None:
    for library, (package, write, forms) in JOBS.items():
        for family in MODELS:
            source = out / "floats" / family
            if not source.exists():
                float_model(family).to(torch.bfloat16).save_pretrained(source)
            for form in forms:
                target = out / f"{library}-{family}-{form}"
                if (target / "made.json").exists():
                    continue
                try:
                    logits = expected(family, write(source, family, target, form))
                except Exception as error:
                    traceback.print_exc()
                    print(f"NOT MADE {target.name}: {type(error).__name__}: {error}", flush=True)
                    shutil.rmtree(target, ignore_errors=True)
                    continue
                np.save(target / "expected.npy", logits)
                made = {
                    "writer": f"{library} {version(package)}",
                    "format": form,
                    "reference": f"transformers {transformers.__version__}, weights decoded by "
                    f"{library}{ROUNDS.get(library, '')}",
                }
                (target / "made.json").write_text(json.dumps(made))
                print(f"MADE {target.name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Check a trace of clocher-run against Hugging Face transformers, step by step."""

from typing import Any

from clocher_runtime.command.script_run import EXIT_CODES, Report, script
from clocher_runtime.command.verify_hf import OPTIONS, check
from clocher_runtime.exit_codes import ExitCode


@script(
    "verify",
    *OPTIONS,
    examples=(
        ("A trace", "clocher-run --model-dir DIR --trace-ids trace.jsonl --trace-topk 5"),
        (
            "Compare it",
            "python scripts/verify_hf_generation_ids.py --trace-jsonl trace.jsonl --hf-dir DIR",
        ),
        (
            "Compare the tokens of the prompts alone",
            "python scripts/verify_hf_generation_ids.py --trace-jsonl trace.jsonl --hf-dir DIR \\\n"
            "    --tokenizer-only --check-prompt --out verify.json",
        ),
    ),
    exit_codes=(
        (ExitCode.OK, "no difference (near ties are counted, not differences)"),
        (ExitCode.USAGE, "a flag or the trace cannot be used, or transformers is not installed"),
        (ExitCode.MODEL, "the model is missing, or transformers cannot load it"),
        (ExitCode.DEVICE, "the device is not there, or the report cannot be written"),
        *EXIT_CODES[4:],
        (ExitCode.MISMATCH, "a difference was found"),
    ),
)
def main(report: Report, **options: Any) -> int:
    """Compare every generated id of a trace with the next id that transformers chooses.

    The Hugging Face model is fed the traced prompt ids and the engine's own ids, so each step is
    judged on its own.
    """
    return check(report, **options)


if __name__ == "__main__":
    main()

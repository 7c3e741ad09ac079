"""Check a trace of clocher-run against Hugging Face transformers, step by step."""

from typing import Any

from clocher_runtime.command.script_run import Report, script
from clocher_runtime.command.verify_hf import OPTIONS, check

EPILOG = """\b
Examples:
  clocher-run --model-dir DIR --trace-ids trace.jsonl --trace-topk 5
  python scripts/verify_hf_generation_ids.py --trace-jsonl trace.jsonl --hf-dir DIR
  python scripts/verify_hf_generation_ids.py --trace-jsonl trace.jsonl --hf-dir DIR \\
      --tokenizer-only --check-prompt --out verify.json

\b
Exit codes:
  0  no difference (near ties are counted, not differences)
  2  a flag or the trace cannot be used, or transformers is not installed
  3  the model is missing, or transformers cannot load it
  5  the device is not there, or the report cannot be written
  6  out of memory
  7  a difference was found"""


@script("verify", EPILOG, *OPTIONS)
def main(report: Report, **options: Any) -> int:
    """Compare every generated id of a trace with the next id that transformers chooses.

    The Hugging Face model is fed the traced prompt ids and the engine's own ids, so each step is
    judged on its own.
    """
    return check(report, **options)


if __name__ == "__main__":
    main()

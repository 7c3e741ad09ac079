"""Judge quantised models against the float model they were made from, on held-out text.

A MODEL is a directory, or a quantisation manifest, which is applied to the reference.
"""

from typing import Any

from clocher_runtime.command.quality_gate import OPTIONS, judge
from clocher_runtime.command.script_run import Report, script

EPILOG = """\b
Examples:
  python scripts/quality_gate.py --reference models/llama --model models/llama-int4 \\
      --text held_out.txt
  python scripts/quality_gate.py --reference models/llama --model models/llama \\
      --precision int8w --text held_out.txt
  python scripts/quality_gate.py --reference models/llama --model models/llama-int8 \\
      --model models/llama-int4 --text held_out.txt --report results/llama

\b
Exit codes:
  0  every model passes
  2  a flag or the text cannot be used
  3  a model is missing, damaged or not the reference's architecture
  5  a file cannot be written
  6  out of memory
  8  a model fails
  9  none fails, but one needs more text for a decision"""


@script("quality_gate", EPILOG, *OPTIONS, help=__doc__)
def main(report: Report, **options: Any) -> int:
    """Judge the models and print the table."""
    return judge(report, options)


if __name__ == "__main__":
    main()

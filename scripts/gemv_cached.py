"""Measure matmuls with quantised weights: fused, and with weights decoded ahead.

The work, and --help, are those of `python -m bench linear --engines clocher,cached,torch`.
"""

from as_module import run

if __name__ == "__main__":
    run("bench", "linear", "--engines", "clocher,cached,torch")

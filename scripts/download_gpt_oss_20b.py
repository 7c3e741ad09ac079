"""Download gpt-oss-20b from the Hugging Face hub."""

from clocher_runtime.command import start

start(__file__)

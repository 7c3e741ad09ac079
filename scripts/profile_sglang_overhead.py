"""Measure what Python costs of a decode step; there is no SGLang in it."""

from clocher_runtime.command import start

start(__file__)

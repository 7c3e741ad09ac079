"""Comparisons, the gate, perplexity, traces and their verification."""

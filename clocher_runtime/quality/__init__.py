"""Is it still good: comparisons, the gate, perplexity, traces and their verification."""

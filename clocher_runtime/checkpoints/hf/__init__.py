"""Hugging Face checkpoints: safetensors and pickled shards, quantised layouts, the hub."""

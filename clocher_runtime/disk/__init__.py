"""Bounded file access: strict JSON, safetensors, mapped files, atomic writes."""

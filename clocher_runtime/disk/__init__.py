"""The only way to bytes: bounded reading, strict JSON, safetensors, whole files or none."""

"""Writing GGUF files for peers."""

"""GGUF files: a bounded reader, the names and layouts of llama.cpp, and a writer for peers."""

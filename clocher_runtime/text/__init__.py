"""Text to ids and back: tokenizer, chat templates, prompts and their pipeline, answers."""

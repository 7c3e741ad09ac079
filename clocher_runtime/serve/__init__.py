"""The server: OpenAI's HTTP API before an engine in a process of its own. ADR 36."""

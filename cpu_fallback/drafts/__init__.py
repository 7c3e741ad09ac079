"""Compiled host code of speculation: what guesses tokens, and what writes a step's inputs."""

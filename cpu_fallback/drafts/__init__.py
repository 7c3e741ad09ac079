"""Compiled host code of speculation: the suffix drafter, and what writes a step's inputs."""

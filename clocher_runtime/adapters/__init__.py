"""Clocher inside other people's programs."""

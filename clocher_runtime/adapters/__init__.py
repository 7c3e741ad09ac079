"""Clocher inside other programs."""

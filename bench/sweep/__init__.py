"""Configurations in fresh processes, in turns: what runs, its rows, what they say together."""

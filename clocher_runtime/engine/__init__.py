"""Ids in, ids out: loading, sessions, back ends, time and what a machine has."""

"""Draft tokens for sequences, and how many of them pay. It knows token ids and times only."""

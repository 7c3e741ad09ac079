"""Draft tokens, and how many of them pay. Knows token ids and times only."""

"""Guess tokens that a sequence may go on with, and how many guesses pay. It knows ids and times."""

"""Single ops for other people's programs: NumPy arrays in and out, no model and no Plan."""

"""Single ops on NumPy arrays, without a model or a Plan."""

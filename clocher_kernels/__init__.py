"""What every back end shares: errors, formats, the op table with its NumPy references, the Plan."""

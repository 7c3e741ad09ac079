"""Settings: declared once; read from flags, variables, a file or keywords."""

"""Writing deduplicated weights, and reporting on them."""

"""What the benches of ops and models share: the skeleton of a bench, its products and its ops."""

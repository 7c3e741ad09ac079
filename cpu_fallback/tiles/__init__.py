"""Integer weights in tiles of 16 rows: the layout, packing, products, memory."""

"""Training runs whose tables are in the documents: the byte-level model, drills."""

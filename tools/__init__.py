"""Maintenance of documents and tables; not part of the product, and not installed with it."""

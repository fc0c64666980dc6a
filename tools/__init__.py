"""What maintains documents and tables; no part of the product, and not installed with it."""

"""Low-precision matrix products: how accurate they are, and what each format would cost."""

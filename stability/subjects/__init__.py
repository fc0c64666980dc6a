"""Architectures besides Megalodon, held to the same instruments: each is a port like any other."""

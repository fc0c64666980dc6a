"""Catalogue of planted bugs, one file per part of the model; `parity.faults` reads the files."""

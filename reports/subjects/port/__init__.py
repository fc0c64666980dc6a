"""Megalodon and megalodon-hf, compared as any user compares two programs: its suite."""

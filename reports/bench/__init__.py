"""Bench: speed and peak memory of JAX compared with megalodon-hf.

This module imports nothing: `workloads` runs as a process whose memory is measured.
"""

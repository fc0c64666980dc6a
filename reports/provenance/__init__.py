"""Provenance of a run: machine, versions, code, reference.

This module imports nothing: a bench measures peak memory in a process that needs only `device`.
"""

"""Provenance of a run: machine, versions, code, reference.

This module imports nothing, so `code` and `host` can be used without JAX, which `environment`
imports.
"""

"""Megalodon as a subject: cases, float64 oracle, runner of the JAX model, references, noise floors.

`Suite` compares every case on every edge of the triangle. `intermediates` names the intermediates
that all sides have.
"""

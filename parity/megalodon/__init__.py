"""Megalodon as a subject: cases, the float64 oracle, the JAX model as a runner, references, floors.

`suite` puts every case on every edge of the triangle; `intermediates` names what all sides have on
the way.
"""

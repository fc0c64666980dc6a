"""Small sharded programs that bugs are planted in: healthy, the same numbers on every mesh.

Each is a class whose methods are the exchanges between devices, one for each thing to get wrong.
"""

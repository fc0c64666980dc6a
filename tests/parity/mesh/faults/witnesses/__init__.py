"""Small sharded programs in which bugs are planted; unpatched, they are equal on every mesh.

The methods of each class are the exchanges between devices, one for each possible bug.
"""

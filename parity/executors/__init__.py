"""What fans out: work items as plain data, on processes of this machine or on a Ray cluster.

Knows no model and no night. `sweep.run` yields an `item.Answer` for every `item.Item`. Nothing is
imported here: a worker needs `item` alone, and starts in a tenth of the time.
"""

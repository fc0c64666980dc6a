"""Speed and peak memory, side by side with megalodon-hf: what is timed, and how.

Nothing is imported here: `workloads` runs as a process whose memory is measured.
"""

"""Where a run was made and of what: machine, versions, code, reference, the run document.

Nothing is imported here: a bench measures peak memory in a process that needs `device` alone.
"""

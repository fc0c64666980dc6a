"""Where a run was made and of what: machine, versions, code, reference, the run document."""

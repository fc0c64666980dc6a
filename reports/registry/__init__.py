"""Many stored runs: which there are, what became of a gate over them, which one is pinned and
which may go.
"""

from reports.registry.lookback import Lookback, look_back
from reports.registry.lookup import JudgedRun, find_run, judge, judge_stored, summarise_runs
from reports.registry.outcome import Outcome, store
from reports.registry.pin import PinDiff, pin_run
from reports.registry.retention import Plan, delete, plan

__all__ = [
    "JudgedRun",
    "Lookback",
    "Outcome",
    "PinDiff",
    "Plan",
    "delete",
    "find_run",
    "judge",
    "judge_stored",
    "look_back",
    "pin_run",
    "plan",
    "store",
    "summarise_runs",
]

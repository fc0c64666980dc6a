"""Verdict of a run, from changes since the baseline, histories, and drift of error levels.

An error level is the geometric mean and the largest error of a group of gates (measurements with a
tolerance).
"""

from reports.verdict.changes import Change, Counts, What
from reports.verdict.decide import Decision, ExitCode, Word, decide
from reports.verdict.drift import Drift, PinComparison, compare_with_pins
from reports.verdict.history import History, Past, load_history
from reports.verdict.levels import Level
from reports.verdict.pins import Pin, Pins, pin_of

__all__ = [
    "Change",
    "Counts",
    "Decision",
    "Drift",
    "ExitCode",
    "History",
    "Level",
    "Past",
    "Pin",
    "PinComparison",
    "Pins",
    "What",
    "Word",
    "compare_with_pins",
    "decide",
    "load_history",
    "pin_of",
]

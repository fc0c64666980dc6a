"""A stored run in the formats of other tools: JUnit XML, OpenMetrics, Arrow.

Source: docs/commands.md "For other tools".
"""

from reports.exports.arrow import arrow_file
from reports.exports.junit import junit
from reports.exports.openmetrics import openmetrics

__all__ = ["arrow_file", "junit", "openmetrics"]

"""Claims of run names on shared storage: a name belongs to at most one writer, for ever.

A claim is a folder of objects that are never changed or deleted, so no lost, late or repeated
request can undo one:

- `writer` is created on the condition that it does not exist. One writer wins.
- Storage may ignore the condition, so the winner also writes an object named by its token and lists
  the folder. Of two writers the later one sees the token of the earlier one. A writer that sees
  another token gives up, so at most one keeps the name; sometimes none does, and both take another.
- `retired` takes the name from its writer. Whoever deletes data writes `retired` first and then
  looks for run.json; the writer writes run.json first and then looks for `retired`. At least one
  of them sees the other, however slow either is.

Source: docs/many-machines.md "Shared storage".
"""

from __future__ import annotations

import random
import time
import uuid

from reports.store.objects import Objects

CLAIMS = ".claims"
"""Folder beside the runs with a folder for each name."""
WRITER, RETIRED = "writer", "retired"
COLLISION = 0.05
"""Seconds: the longest pause after two writers took a name from each other."""


def claim(objects: Objects, name: str) -> str | None:
    """Return the token of a new claim, or None if the name is taken."""
    folder, token = f"{CLAIMS}/{name}", uuid.uuid4().hex
    # Runs of earlier versions have no claim.
    if objects.inside(name) or not objects.create(f"{folder}/{WRITER}", token.encode()):
        return None
    objects.create(f"{folder}/{token}", b"")
    if objects.inside(folder).keys() == {WRITER, token}:
        return token
    # Otherwise those who met here would meet at every further name.
    time.sleep(random.uniform(0, COLLISION))
    return None


def held(objects: Objects, name: str, token: str) -> bool:
    """Return whether a claim is still that of its writer."""
    inside = objects.inside(f"{CLAIMS}/{name}")
    return token in inside and RETIRED not in inside


def retire(objects: Objects, name: str) -> None:
    """Take a name from its writer; nobody can claim it again."""
    objects.create(f"{CLAIMS}/{name}/{RETIRED}", b"")

"""Claims of run names on shared storage: at most one writer ever owns a name.

A claim is a folder of objects that are never changed or deleted. Therefore lost, late or repeated
requests cannot undo it:

- `writer` is created with the condition that it does not exist, so one writer wins.
- Storage may ignore the condition. The winner therefore also writes an object named after its token
  and lists the folder. The later of two writers sees the earlier one's token. A writer that sees
  another token gives up, so at most one keeps the name; if both give up, each takes another name.
- `retired` takes the name from its writer. A deletion writes `retired` first and then looks for
  run.json; the writer writes run.json first and then looks for `retired`. At least one of them sees
  the other, however slow either is.

Source: docs/many-machines.md "Shared storage".
"""

from __future__ import annotations

import random
import time
import uuid

from reports.store.objects import Objects

CLAIMS = ".claims"
"""Folder beside the runs, with one subfolder per claimed name."""
WRITER, RETIRED = "writer", "retired"
COLLISION = 0.05
"""Longest random pause, in seconds, after two writers blocked each other."""


def claim(objects: Objects, name: str) -> str | None:
    """Claim the name of a run on shared storage and return the claim's token.

    None if another writer has the name or claims it now.
    """
    folder, token = f"{CLAIMS}/{name}", uuid.uuid4().hex
    # Runs of earlier versions have no claim, so look for their objects.
    if objects.inside(name) or not objects.create(f"{folder}/{WRITER}", token.encode()):
        return None
    objects.create(f"{folder}/{token}", b"")
    if objects.inside(folder).keys() == {WRITER, token}:
        return token
    # Without a random pause both writers would collide again at the next name.
    time.sleep(random.uniform(0, COLLISION))
    return None


def held(objects: Objects, name: str, token: str) -> bool:
    """Return whether the claim of a name is still owned by the holder of `token`."""
    inside = objects.inside(f"{CLAIMS}/{name}")
    return token in inside and RETIRED not in inside


def retire(objects: Objects, name: str) -> None:
    """Take the name of a run from its writer; it can never be claimed again."""
    objects.create(f"{CLAIMS}/{name}/{RETIRED}", b"")

"""The subjects of this project, which nights measure; importing this module registers them."""

from __future__ import annotations

from reports.subject import register
from reports.subjects.megalodon.record import MEGALODON
from reports.subjects.meshes.record import MESHES
from reports.subjects.mla_moe.record import MLA_MOE
from reports.subjects.port.record import PORT

# The order of the suites in a night and on its page.
for _subject in (MEGALODON, MLA_MOE, PORT, MESHES):
    register(_subject)

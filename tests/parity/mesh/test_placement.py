"""Blocks of devices by their place in the whole, and the collectives of a compiled program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parity.mesh import collectives
from parity.mesh.collectives import CompiledProgram, axes_of, between
from parity.mesh.placement import assembled, placements
from parity.mesh.step import parse_mesh

MESH = {"data": 2, "tensor": 4}


def blocks_of(whole: np.ndarray, placement) -> np.ndarray:
    """What every device of `MESH` holds, (8, *block)."""
    stack = []
    for device in np.ndindex(*MESH.values()):
        at = dict(zip(MESH, device, strict=True))
        index = []
        for size, axes in zip(whole.shape, placement, strict=True):
            parts, part = 1, 0
            for axis in axes:
                part, parts = part * MESH[axis] + at[axis], parts * MESH[axis]
            index.append(slice(part * size // parts, (part + 1) * size // parts))
        stack.append(whole[tuple(index)])
    return np.stack(stack)


@pytest.mark.parametrize(
    "placement",
    [
        (("data",), ("tensor",)),
        (("tensor",), ("data",)),
        (("data", "tensor"), ()),
        ((), ("tensor",)),
        ((), ()),
    ],
)
def test_blocks_go_back_where_they_came_from(placement):
    whole = np.arange(16.0 * 24).reshape(16, 24)
    stack = blocks_of(whole, placement)
    ways = list(placements(whole.shape, stack.shape[1:], MESH))
    assert placement in ways
    again, differing = assembled(stack, placement, MESH)
    assert differing == 0
    np.testing.assert_array_equal(again, whole)


def test_a_replica_that_differs_in_one_bit_is_counted():
    whole = np.linspace(0.5, 2.0, 24).reshape(6, 4)
    stack = blocks_of(whole, ((), ("tensor",)))
    stack[5, 0, 0] = np.nextafter(stack[5, 0, 0], 3.0)
    _, differing = assembled(stack, ((), ("tensor",)), MESH)
    assert differing == 1


def test_no_way_fits_a_block_that_does_not_divide():
    assert list(placements((6, 4), (4, 4), MESH)) == []
    assert list(placements((6, 4), (2, 4), MESH)) == []
    assert list(placements((8,), (1, 8), MESH)) == []
    # Blocks that are known to differ along both axes are cut along both.
    first = next(placements((8, 8), (4, 2), MESH, frozenset(MESH)))
    assert first == (("data",), ("tensor",))


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 4), (1, 5), (2, 6), (3, 7)), ("data",)),
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("tensor",)),
        ((tuple(range(8)),), ("data", "tensor")),
        ((), ("data", "tensor")),
        (((0, 1), (2, 3), (4, 5), (6, 7)), ()),
    ],
)
def test_groups_of_devices_lie_along_axes(groups, axes):
    assert axes_of(groups, MESH) == axes


TEXT = """HloModule step

FileNames
1 "/somewhere/my_step.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=3 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[4,2], y: f32[3]) -> (f32[4,2], f32[3], f32[8,2]) {
  %x = f32[4,2]{1,0} parameter(0)
  %y = bf16[3]{0} parameter(1)
  %both = (f32[4,2]{1,0}, bf16[3]{0}) all-reduce(%x, %y), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add, metadata={op_name="jit(step)/psum" stack_frame_id=1}
  %one = f32[4,2]{1,0} get-tuple-element(%both), index=0
  %two = bf16[3]{0} get-tuple-element(%both), index=1
  %moved = f32[4,2]{1,0} collective-permute(%one), source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}
  ROOT %out = (f32[4,2]{1,0}, bf16[3]{0}, f32[4,2]{1,0}) tuple(%x, %two, %moved)
}
"""  # noqa: E501


def test_a_compiled_program_is_read():
    program = CompiledProgram(TEXT, MESH)
    both, moved = program.collectives()
    assert (both.operation, both.axes, both.bytes) == ("all-reduce", ("data",), 4 * 2 * 4 + 3 * 2)
    assert both.source == "my_step.py:12" and both.asked_by == "jit(step)/psum"
    assert (moved.operation, moved.axes) == ("collective-permute", ("tensor",))
    assert program.reaching(0) == set()
    # What the compiler combined is followed operand by operand.
    assert program.reaching(1) == {("both", 1)}
    assert program.reaching(2) == {("moved", 0), ("both", 0)}
    names = ("x", "two", "moved")
    assert between(program, names, "moved", ["x", "two"]) == (both, moved)
    assert between(program, names, "two", ["x"]) == (both,)
    assert between(program, names, "x", []) == ()
    assert between(program, ("x", "two"), "two", []) == ()


STARTS = """ENTRY %main () -> f32[] {
  %sum = f32[8]{0} all-reduce-start(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %sums = (f32[8]{0}, f32[2]{0}) all-reduce-start(%a, %b), replica_groups={}, to_apply=%add
  %all = ((f32[2]{0}, s32[1]{0}), (f32[8]{0}, s32[4]{0})) all-gather-start(%a, %b), dimensions={0}
  %moved = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={}
}
"""


COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("mesh['data'=2,'tensor'=4] {'data'}", COLUMNS),
        ("mesh['data'=2,'tensor'=4] {'tensor'}", ROWS),
        ("mesh['data'=2,'tensor'=4] {'data','tensor'}", (tuple(range(8)),)),
        ("mesh['data'=2,'tensor'=4] {'tensor','data'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        # An order of its own, here tensor before data, and an axis of one device.
        ("mesh['x'=4,'y'=2,'z'=1], device_ids=([2,4]T(1,0)) {'x'}", ROWS),
        ("mesh['x'=4,'y'=2,'z'=1], device_ids=([2,4]T(1,0)) {'y','z'}", COLUMNS),
        ("mesh['x'=8], device_ids=([2,4]) {'x'}", (tuple(range(8)),)),
        # Parts of an axis: the slowest 2 of 8, the quickest 4, and those between.
        ("mesh['a'=8] {'a':(1)2}", COLUMNS),
        ("mesh['a'=8] {'a':(2)4}", ROWS),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", ROWS),
    ],
)
def test_groups_that_are_written_as_axes_are_read(text: str, groups: Any):
    line = f"  %sum = f32[8]{{0}} all-reduce(%a), replica_groups={text}, to_apply=%add"
    program = CompiledProgram("ENTRY %main () -> f32[] {\n" + line + "\n}\n", MESH)
    [found] = program.collectives()
    assert found.axes == axes_of(groups, MESH)
    assert collectives._groups(line) == groups


def test_a_started_exchange_has_the_bytes_of_its_results():
    found = {c.name: c.bytes for c in CompiledProgram(STARTS, MESH).collectives()}
    assert found == {"sum": 32, "sums": 40, "all": 48, "moved": 8}


def test_a_mesh_is_read_from_text():
    assert parse_mesh("data=2, tensor=4") == MESH
    for text in ("data", "data=", "data=2,data=4", "2", "data=-1"):
        with pytest.raises(ValueError, match="expected a mesh such as data=2,tensor=4"):
            parse_mesh(text)

"""Which ranks talk to which."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpcore.layout.mesh import Mesh

AXES = st.dictionaries(st.sampled_from(["pp", "dp", "cp", "ep", "tp"]), st.integers(1, 4), min_size=1)


def test_tp_ranks_are_contiguous_and_dp_strided() -> None:
    mesh = Mesh({"pp": 2, "dp": 2, "tp": 2})
    assert mesh.group("tp").partition == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.group("dp").partition == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.group("pp").partition == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.group("dp", "tp").as_list() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.world().partition == (tuple(range(8)),)
    assert mesh.coords(5) == {"pp": 1, "dp": 0, "tp": 1}


@given(AXES, st.data())
def test_every_group_partitions_the_world(axes: dict[str, int], data: st.DataObject) -> None:
    mesh = Mesh(axes)
    names = data.draw(st.lists(st.sampled_from(list(axes)), unique=True, min_size=1))
    group = mesh.group(*names)
    assert sorted(r for ranks in group.partition for r in ranks) == list(range(mesh.size))
    assert group.size == math.prod(axes[n] for n in names)
    for ranks in group.partition:
        assert len(ranks) == group.size
        fixed = [[mesh.coords(r)[n] for n in axes if n not in names] for r in ranks]
        assert all(f == fixed[0] for f in fixed)
        # position in the group is the coordinate along it, first named outermost
        moved = [tuple(mesh.coords(r)[n] for n in names) for r in ranks]
        assert moved == sorted(moved)
        assert all(group.members(r) == ranks for r in ranks)


def test_groups_inside_an_axis_are_runs_of_consecutive_ranks() -> None:
    """What key heads need that several ranks hold."""
    mesh = Mesh({"dp": 2, "tp": 4})
    assert mesh.group("tp", within=2).partition == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.group("tp", within=4) == mesh.group("tp")
    assert mesh.group("tp", within=1).size == 1
    assert mesh.group("dp", within=2).partition == mesh.group("dp").partition
    assert mesh.group("tp", "dp", within=4).partition == ((0, 4, 1, 5), (2, 6, 3, 7))
    for within in (0, 3, 8):
        with pytest.raises(ValueError, match=f"within={within} does not divide a group of 4 ranks over"):
            mesh.group("tp", within=within)


def test_the_order_of_axes_is_part_of_a_mesh() -> None:
    assert Mesh({"dp": 2, "tp": 2}) != Mesh({"tp": 2, "dp": 2})
    assert hash(Mesh({"dp": 2, "tp": 3})) == hash(Mesh({"dp": 2, "tp": 3}))


def test_mesh_is_a_value() -> None:
    axes = {"dp": 2, "tp": 2}
    mesh = Mesh(axes)
    axes["tp"] = 8
    assert mesh.size == 4
    assert mesh == Mesh({"dp": 2, "tp": 2}) != Mesh({"dp": 1, "tp": 2})
    with pytest.raises(TypeError):
        mesh.axes["tp"] = 4  # type: ignore[index]
    assert hash(mesh.group("tp")) == hash(Mesh({"dp": 2, "tp": 2}).group("tp"))


@pytest.mark.parametrize("axes", [{}, {"tp": 0}, {"dp": 2, "tp": -1}])
def test_sizes_below_one_are_refused(axes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="axes of size 1 or more"):
        Mesh(axes)


def test_what_is_not_there_is_named() -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    with pytest.raises(ValueError, match=r"this mesh has \['dp', 'tp'\], and Mesh\(\{'pp': 1, 'dp': 2, 'tp': 2\}"):
        mesh.group("pp")
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=rf"rank {rank} is outside a mesh of 4 ranks \{{'dp': 2, 'tp': 2\}}"):
            mesh.coords(rank)
    with pytest.raises(ValueError, match="rank 7 is in no"):
        mesh.group("tp").members(7)

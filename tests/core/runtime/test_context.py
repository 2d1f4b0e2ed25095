"""init and the context in force."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from helpers.worlds import Alike

import tpcore
from tpcore.errors import BackendError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.runtime.init import mesh_of
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.threads import ThreadWorld

pytestmark = pytest.mark.usefixtures("alone")


class Recorded(ThreadBackend):
    """One rank of a world, which notes what is asked of it."""

    def __init__(self, world: int = 1, rank: int = 0) -> None:
        super().__init__(rank, Alike(world))
        self.log: list[str] = []

    def start(self, timeout: float) -> tuple[int, int]:
        self.log.append(f"start {timeout:g}")
        return super().start(timeout)

    def mark_step(self) -> None:
        self.log.append("mark_step")

    def stop(self) -> None:
        self.log.append("stop")


# -- init --------------------------------------------------------------------------------------------------


def test_init_and_shutdown() -> None:
    backend = Recorded(world=8, rank=5)
    ctx = tpcore.init(backend, tp=2)
    assert tpcore.is_initialized()
    assert tpcore.current() is ctx
    assert dict(ctx.mesh.axes) == {"pp": 1, "dp": 4, "tp": 2}
    assert (ctx.coord("dp"), ctx.coord("tp"), ctx.world.size) == (2, 1, 8)
    assert repr(ctx).startswith("ParallelContext(Recorded, Mesh({'pp': 1, 'dp': 4, 'tp': 2}), rank 5")
    tpcore.shutdown()
    assert backend.log == ["start 120", "stop"]
    assert not tpcore.is_initialized()
    tpcore.init(Recorded())
    tpcore.shutdown()


def test_pp_is_the_outermost_axis() -> None:
    ctx = tpcore.init(Recorded(world=8, rank=5), tp=2, pp=2)
    assert dict(ctx.mesh.axes) == {"pp": 2, "dp": 2, "tp": 2}
    assert (ctx.coord("pp"), ctx.coord("dp"), ctx.coord("tp")) == (1, 0, 1)
    assert ctx.comm("pp", "tp").group.members(5) == (0, 1, 4, 5)
    twice = r"already initialized with mesh \{'pp': 2, 'dp': 2, 'tp': 2\}.*shutdown\(\) before init\(tp=4, pp=2\)"
    with pytest.raises(RuntimeError, match=twice):
        tpcore.init(Recorded(8), tp=4, pp=2)
    assert tpcore.current() is ctx
    tpcore.shutdown()


def test_a_world_of_one() -> None:
    ctx = tpcore.init(Recorded())
    layer = tpcore.ColumnParallelLinear(4, 8)
    opt = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(torch.ones(2, 4)).sum().backward()
    tpcore.optimizer_step(opt)
    assert isinstance(ctx.backend, Recorded)
    assert ctx.backend.log == ["start 120", "mark_step"]
    tpcore.shutdown()


@pytest.mark.parametrize(
    ("world", "tp", "said"),
    [
        (1, 2, r"tp=2 needs 2 processes.*\n    torchrun --nproc_per_node=2 .*\n.*tpcore.launch\(fn, nprocs=2\)"),
        (4, 3, "tp=3 does not divide the world of 4 processes"),
        (4, 8, "tp=8 is larger than the world of 4 processes"),
        (1, (2, 2), r"pp=2 times tp=2 needs 4 processes(.|\n)*nproc_per_node=4"),
        (8, (3, 2), r"pp=2 times tp=3 does not divide the world of 8 processes: dp would be 1\.33333"),
        (4, (4, 2), "pp=2 times tp=4 is larger than the world of 4 processes: start 8 or lower pp or tp"),
        (4, (2, 0), "pp must be a whole number of ranks, 1 or more, not 0"),
        (4, (2, 2.5), r"pp must be .* not 2\.5"),
        (4, 0, "tp must be a whole number of ranks, 1 or more, not 0"),
        (4, -2, "not -2"),
        (4, 2.0, r"not 2\.0"),
        (4, "2", "not '2'"),
    ],
)
def test_a_tp_that_does_not_fit_is_an_error_and_leaves_nothing_running(world: int, tp: object, said: str) -> None:
    backend = Recorded(world)
    tp, pp = tp if isinstance(tp, tuple) else (tp, 1)
    with pytest.raises(ValueError, match=said):
        tpcore.init(backend, tp=tp, pp=pp)  # type: ignore[arg-type]
    assert not tpcore.is_initialized()
    assert backend.log in ([], ["start 120", "stop"])


def test_under_a_launcher_the_error_is_about_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=r"tp=2 is larger than the world of 1 process"):
        tpcore.init(Recorded(), tp=2)


BEFORE_INIT: dict[str, Callable[[], object]] = {
    "current": tpcore.current,
    "column": lambda: tpcore.ColumnParallelLinear(4, 4),
    "row": lambda: tpcore.RowParallelLinear(4, 4),
    "embedding": lambda: tpcore.ParallelEmbedding(4, 4),
    "layer norm": lambda: tpcore.LayerNorm(4),
    "cross entropy": lambda: tpcore.parallel_cross_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)),
    "reduce_gradients": lambda: tpcore.reduce_gradients([]),
    "manual_seed": lambda: tpcore.random.manual_seed(0),
}


@pytest.mark.parametrize("name", BEFORE_INIT)
def test_use_before_init(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"no parallel context: call tpcore.init\(.*\) first"):
        BEFORE_INIT[name]()


@pytest.mark.parametrize("axis", ["sp", "etp"])
def test_an_axis_that_is_not_there_is_an_error_that_says_which_are(axis: str) -> None:
    with pytest.raises(TypeError, match=rf"not {axis}=2\. The axes of its mesh are pp, dp, ep, cp and tp"):
        tpcore.init(Recorded(), tp=1, **{axis: 2})


def test_shutdown_without_init() -> None:
    with pytest.raises(RuntimeError, match=r"without tpcore.init"):
        tpcore.shutdown()


def test_timeout_from_argument_environment_default(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for given, env in ((None, None), (None, "30"), (7.5, "30")):
        if env is not None:
            monkeypatch.setenv("TPCORE_TIMEOUT", env)
        backend = Recorded()
        tpcore.init(backend, timeout=given)
        tpcore.shutdown()
        seen.append(backend.log[0])
    assert seen == ["start 120", "start 30", "start 7.5"]


@pytest.mark.parametrize("seconds", [0, float("nan")])
def test_impossible_timeouts(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds, not"):
        tpcore.init(Recorded(), timeout=seconds)


def test_a_backend_that_cannot_make_its_groups_is_stopped() -> None:
    class NoGroups(Recorded):
        def connect(self, group: tpcore.layout.Group, rank: int) -> tpcore.comm.Transport:
            raise BackendError("no group today")

    backend = NoGroups()
    with pytest.raises(BackendError, match="no group today"):
        tpcore.init(backend)
    assert backend.log == ["start 120", "stop"]


# -- use ---------------------------------------------------------------------------------------------------


def context(rank: int = 0, **axes: int) -> ParallelContext:
    mesh = Mesh(axes or {"dp": 1, "tp": 1})
    return ParallelContext(ThreadBackend(rank, ThreadWorld(mesh.size)), mesh, rank)


def test_use_is_nested_and_over_init() -> None:
    outer, inner = context(dp=1, tp=2), context(dp=1, tp=4)
    started = tpcore.init(Recorded())
    with tpcore.use(outer) as got:
        assert got is tpcore.current() is outer
        assert tpcore.ColumnParallelLinear(8, 8, device="meta").weight.shape == (4, 8)
        with pytest.raises(KeyError), tpcore.use(inner):
            raise KeyError(tpcore.current().mesh.axes["tp"])
        assert tpcore.current() is outer
    assert tpcore.current() is started
    tpcore.shutdown()


def test_a_layer_keeps_the_context_it_was_made_in() -> None:
    with tpcore.use(context(rank=1, dp=2, tp=1)):
        layer = tpcore.ColumnParallelLinear(4, 8)
    assert not tpcore.is_initialized()
    assert layer(torch.ones(1, 4)).shape == (1, 8)


def test_the_users_own_threads_see_what_init_started_but_not_anothers_use() -> None:
    seen: list[object] = []

    def work() -> None:
        seen.append(tpcore.current())
        with tpcore.use(mine):
            seen.append(tpcore.current())

    mine, other = context(), context()
    started = tpcore.init(Recorded())
    with tpcore.use(other):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert tpcore.current() is other
    assert seen == [started, mine]
    tpcore.shutdown()


def test_ranks_do_not_see_each_others_context() -> None:
    def rank(ctx: ParallelContext) -> bool:
        mine = context(rank=1, dp=1, tp=2)
        with tpcore.use(mine):
            ctx.world.all_reduce(torch.ones(1))
            return tpcore.current() is mine

    assert run_ranks(Mesh({"tp": 4}), rank) == [True] * 4


def test_a_hundred_layers_make_one_group_inside_an_axis() -> None:
    asked: list[tpcore.layout.Group] = []

    class Counted(Recorded):
        def comm(self, group: tpcore.layout.Group, rank: int) -> tpcore.comm.Comm:
            asked.append(group)
            return super().comm(group, rank)

    ctx = tpcore.init(Counted(world=8, rank=5), tp=4)
    made = len(asked)
    comms = {ctx.comm("tp", within=2) for _ in range(100)}
    assert [g.members(5) for g in asked[made:]] == [(4, 5)]
    assert len(comms) == 1
    assert ctx.comm("tp", within=4) is ctx.comm("tp")
    tpcore.shutdown()


def test_groups_are_made_once_and_found_again() -> None:
    ctx = context(rank=3, pp=1, dp=2, tp=2)
    tp = ctx.comm("tp")
    assert ctx.comm("tp") is tp
    assert ctx.comm_for(None) is tp
    assert ctx.comm_for(ctx.comm("dp")) is ctx.comm("dp")
    assert ctx.comm_for(tp.process_group) is tp
    assert ctx.device == torch.device("cpu")
    with pytest.raises(BackendError, match="cannot use the group 'mine': pass a tpcore Comm"):
        ctx.comm_for("mine")


def test_the_axis_is_between_dp_and_tp_and_only_where_it_is_asked_for() -> None:
    assert list(mesh_of(2, 1, 1, 2, 8).axes.items()) == [("pp", 1), ("dp", 2), ("cp", 2), ("tp", 2)]
    assert list(mesh_of(1, 1, 2, 2, 8).axes.items()) == [("pp", 1), ("dp", 2), ("ep", 2), ("cp", 2), ("tp", 1)]
    assert not {"ep", "cp"} & set(mesh_of(2, 1, 1, 1, 8).axes)
    with pytest.raises(ValueError, match="cp=3 times tp=2 does not divide the world of 8 processes"):
        mesh_of(2, 1, 1, 3, 8)
    with pytest.raises(ValueError, match=r"cp=4 times tp=4 is larger than the world of 8.*lower cp or tp"):
        mesh_of(4, 1, 1, 4, 8)

"""Joining a job and leaving it."""

from __future__ import annotations

import sys
from typing import NoReturn

import torch

from .. import settings
from ..backend.interface import Backend
from ..backend.registry import backend_class, check_fits, load_backend, observer_of
from ..comm.observer import Observer
from ..comm.signature import ALL, checked_calls
from ..errors import BackendError, counted
from ..layout.mesh import DATA, Mesh
from ..log import inform
from .consensus import agree, gather
from .context import ParallelContext, current, enter_process, in_eager_mode, is_initialized, leave_process
from .gradients import summed_in_trees
from .guards import whole_tensors_only


def default_backend() -> tuple[str, str]:
    """The first of TPCORE_BACKEND, neuron or cuda if it can run here, cpu_gloo; and the reason for it."""
    if chosen := settings.BACKEND.get():
        return chosen, f"{settings.BACKEND.name} is set"
    usable = ((name, "it can run here") for name in ("neuron", "cuda") if backend_class(name).unavailable() is None)
    return next(usable, ("cpu_gloo", "no Neuron device and no GPU is present"))


def choose_backend(name: str | None) -> str:
    """``name``, or ``default_backend``, which rank 0 logs."""
    if name is None:
        name, why = default_backend()
        if settings.RANK.get() == 0:
            inform(f"backend {name} ({why})")
    return name


def mesh_of(tp: int, pp: int, ep: int, cp: int, world: int) -> Mesh:
    need = pp * ep * cp * tp
    inner = {axis: size for axis, size in (("ep", ep), ("cp", cp)) if size > 1}  # each axis is a group to make
    sizes = ({"pp": pp} if pp > 1 else {}) | inner | {"tp": tp}
    axes, degrees = list(sizes), " times ".join(f"{name}={size}" for name, size in sizes.items())
    if need > world == 1 and not settings.WORLD_SIZE.is_set:
        script = " ".join(sys.argv) if sys.argv and sys.argv[0].endswith(".py") else "your_script.py"
        raise ValueError(
            f"{degrees} needs {need} processes and this is one process alone. Start them with\n"
            f"    torchrun --nproc_per_node={need} {script}\n"
            f"or from Python with tpcore.launch(fn, nprocs={need})"
        )
    if need > world:
        raise ValueError(
            f"{degrees} is larger than the world of {counted(world, 'process')}: start {need} or "
            f"lower {' or '.join(axes)}"
        )
    if world % need:
        raise ValueError(f"{degrees} does not divide the world of {world} processes: dp would be {world / need:g}")
    return Mesh({"pp": pp, "dp": world // need, **inner, "tp": tp})


def _check_mesh(ctx: ParallelContext) -> None:
    """Raise ValueError on all ranks if their meshes differ: their groups would not match; or their order of sums."""
    if not ctx.world.eager:
        return  # each gather would compile a program; there the first group that differs ends the job
    agree(
        gather(
            {**ctx.mesh.axes, **({} if ctx.reproducible is None else {"reproducible": ctx.reproducible})}, ctx.world
        ),
        lambda rank, first, other: ValueError(
            f"rank 0 has the mesh {first} and rank {rank} has {other}: "
            "call tpcore.init with the same tp, pp, ep, cp and reproducible on every rank"
        ),
    )


def init(
    backend: str | Backend | None = None,
    tp: int = 1,
    pp: int = 1,
    *,
    ep: int = 1,
    cp: int = 1,
    timeout: float | None = None,
    reproducible: int | None = None,
    **others: NoReturn,
) -> ParallelContext:
    """Join the job that ``torchrun`` started and divide it into tp groups; dp is the rest of the world.

    The axes of the mesh, from the outermost: pp, dp, ep, cp, tp; ep and cp are in it above 1. No degree is clamped, and
    an error leaves nothing running.

    Args:
        backend: a plugin's name, an instance, or None to choose one (``TPCORE_BACKEND``, else neuron or cuda if such a
            device is present, else cpu_gloo).
        tp: ranks among which each layer is sharded.
        pp: pipeline stages; ``ctx.comm("pp", "tp")`` spans stages and tp.
        ep: ranks among which whole experts are divided; they have other examples, like those of dp.
        cp: ranks among which the tokens of each sequence are divided.
        timeout: seconds that a collective waits for a rank before every rank gets an error; default
            ``TPCORE_TIMEOUT`` or 120.
        reproducible: a power of two, the largest degree of tp up to which losses and weights have the same bits as at
            any other, and at any dp and pp: what ranks add is computed in so many blocks, at tp=1 too, and added in one
            tree (docs/reproducible.md). None: they are computed as is fastest.
        others: none; a TypeError for another axis says which there are.

    Raises:
        ValueError: pp times ep times cp times tp does not divide the world; or the job cannot be ``reproducible``, for
            ep, cp, a degree that is no power of two, or several threads on a CPU.
        RuntimeError: it is called twice.
        BackendError: the backend is missing or cannot run here.
    """
    if others:
        unknown: dict[str, object] = dict(others)
        wrong = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        raise TypeError(
            f"tpcore.init() takes backend, tp, pp, ep, cp, timeout and reproducible, not {wrong}. The axes of its mesh "
            "are pp, dp, ep, cp and tp, where dp is what the others leave of the world"
        )
    if is_initialized():
        mesh = dict(current().mesh.axes)
        raise RuntimeError(
            f"tpcore is already initialized with mesh {mesh}: call tpcore.shutdown() before init("
            f"tp={tp}{''.join(f', {axis}={n}' for axis, n in (('pp', pp), ('ep', ep), ('cp', cp)) if n != 1)})"
        )
    for name, size in (("tp", tp), ("pp", pp), ("ep", ep), ("cp", cp)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a whole number of ranks, 1 or more, not {size!r}")
    try:
        seconds = settings.TIMEOUT.get() if timeout is None else settings.seconds(str(timeout))
    except ValueError as e:
        raise e if timeout is None else ValueError(f"timeout must be {e}, not {timeout!r}") from None
    chosen = backend if isinstance(backend, Backend) else load_backend(choose_backend(backend))
    rank, world = chosen.start(seconds)
    try:
        divided = mesh_of(tp, pp, ep, cp, world)
        check_reproducible(reproducible, divided, chosen.device())
        ctx = _divided(chosen, divided, rank, _observer(ParallelContext(chosen, divided, rank)), reproducible)
    except BaseException:
        chosen.stop()
        raise
    if ctx.observer is not None:
        ctx.ended.enter_context(in_eager_mode())
    ctx.ended.enter_context(whole_tensors_only())
    if reproducible is not None:
        ctx.ended.enter_context(summed_in_trees())
    enter_process(ctx)
    return ctx


def _observer(ctx: ParallelContext) -> Observer | None:
    """Of a checked run."""
    return checking(ctx, f"{settings.CHECK.name}={settings.CHECK.get()}") if checked_calls() == ALL else None


def checking(ctx: ParallelContext, asked: str) -> Observer:
    """What looks on in the run that ``asked`` wants checked. BackendError if no extension has it."""
    observer = observer_of(ctx)
    if observer is None:
        raise BackendError(
            f"{asked} asks for a checked run, and no installed extension has an observer for it: install one that has, "
            "or leave it out"
        )
    return observer


def _divided(
    backend: Backend, mesh: Mesh, rank: int, observer: Observer | None, reproducible: int | None
) -> ParallelContext:
    """A context whose groups of single axes are made: here, on all ranks in the same order, as that is collective."""
    ctx = ParallelContext(backend, mesh, rank, observer, reproducible=reproducible)
    check_fits(backend, mesh)
    _check_mesh(ctx)  # over the world, the first group
    for axes in (*((axis,) for axis in mesh.axes), mesh.present(DATA)):
        ctx.comm(*axes)
    return ctx


def remesh(tp: int = 1, pp: int = 1, *, ep: int = 1, cp: int = 1) -> ParallelContext:
    """Divide the running job anew, before it has layers or optimizers. Collective. Raises ValueError as ``init``."""
    old = current()
    mesh = mesh_of(tp, pp, ep, cp, old.mesh.size)
    check_reproducible(old.reproducible, mesh, old.device)
    ctx = _divided(old.backend, mesh, old.rank, old.observer, old.reproducible)
    ctx.ended.enter_context(old.ended.pop_all())
    leave_process()
    enter_process(ctx)
    return ctx


def shutdown() -> None:
    """Leave the job; ``init`` may be called again. Raises RuntimeError if ``init`` was not called."""
    if is_initialized():
        current().refuse_forked()
    ctx = leave_process()
    if ctx is None:
        raise RuntimeError("tpcore.shutdown() without tpcore.init()")
    ctx.ended.close()
    ctx.backend.stop()


_UNLIKE = {
    "ep": "an expert's product is over the tokens of all ep ranks at once, and over those of one at ep=1",
    "cp": "attention adds what each of the cp ranks has of the keys, in parts of the sizes that these have",
}


def check_reproducible(most: int | None, mesh: Mesh, device: torch.device) -> None:
    """Raise ValueError, on all ranks, unless a job on ``mesh`` can be reproducible up to ``most`` ranks of tp."""
    if most is None:
        return
    if not isinstance(most, int) or most < 2 or most & (most - 1):
        raise ValueError(
            f"reproducible is the largest degree of tp at which the bits are the same, a power of two from 2 on, not "
            f"{most!r}"
        )
    axes = mesh.axes
    for axis, why in _UNLIKE.items():
        if axes.get(axis, 1) > 1:
            raise ValueError(f"reproducible={most} with {axis}={axes[axis]}: {why}: leave one of the two out")
    for axis, largest in (("tp", most), ("dp", 1 << 62)):
        size = axes.get(axis, 1)
        if size & (size - 1) or size > largest:
            up_to = f" up to {most}; pass a larger number, in each run" if size > largest else ""
            raise ValueError(
                f"reproducible={most} with {axis}={size}: what ranks add is a tree over a power of two of them{up_to}"
            )
    if device.type == "cpu" and (threads := torch.get_num_threads()) > 1:
        raise ValueError(
            f"reproducible={most} with {threads} threads: torch divides sums among them by the sizes of tensors, which "
            "differ between degrees: call torch.set_num_threads(1), or start with OMP_NUM_THREADS=1"
        )

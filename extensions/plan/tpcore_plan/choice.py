"""A mesh, what is chosen with it, and the program that a choice asks for: what to launch, and calls of tpcore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpcore.layout.mesh import Mesh

from .execution import Execution
from .reduced import Ways


@dataclass(frozen=True)
class Choice:
    """A mesh and what is chosen with it. ``microbatch``: examples of one; ``microbatches``: of a step, one after the
    other. ``recompute``: layers run again in backward, as they always do in stages. ``bucket_mb``: of Zero1.
    ``execution``: of another program than tpcore's, which then says what is recomputed."""

    ways: Ways = field(default_factory=Ways)
    pp: int = 1
    dp: int = 1
    microbatch: int = 1
    microbatches: int = 1
    recompute: bool = False
    zero1: bool = False
    bucket_mb: float = 4
    execution: Execution | None = None

    @property
    def mesh(self) -> Mesh:
        ways = self.ways
        return Mesh({"pp": self.pp, "dp": self.dp, "ep": ways.ep, "cp": ways.cp, "tp": ways.tp})

    @property
    def data(self) -> int:
        """Ranks whose gradients are summed."""
        return self.dp * self.ways.ep * self.ways.cp

    @property
    def batch(self) -> int:
        """Examples of a step, of all ranks."""
        return self.microbatch * self.microbatches * self.dp * self.ways.ep

    def __str__(self) -> str:
        axes = [f"{axis} {n}" for axis, n in self.mesh.axes.items() if n > 1] or ["1 device"]
        details = [f"{self.microbatches} x {self.microbatch}"]
        details += ["sequence parallel"] if self.ways.tp > 1 and self.ways.sequence_parallel else []
        details += ["whole experts"] if self.ways.tp > 1 and self.ways.expert_parallel else []
        details += [self.ways.context_parallel or "gather"] if self.ways.cp > 1 else []
        details += ["recompute"] if self.recompute and self.pp == 1 else []
        details += ["Zero1"] if self.zero1 else []
        details += [str(self.execution)] if self.execution is not None else []
        return f"{', '.join(axes)}; {', '.join(details)}"


def launch_line(devices: int, per_host: int) -> str:
    """The command that starts ``train.py`` on each host."""
    hosts = -(-devices // per_host)
    if hosts == 1:
        return f"torchrun --nproc-per-node {devices} train.py"
    address = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun --nnodes {hosts} --nproc-per-node {per_host} {address} train.py"


def setup_lines(choice: Choice, dtype: str) -> list[str]:
    """Python: from ``model``, of transformers, to what ``step_lines`` needs."""
    axes = {axis: n for axis, n in choice.mesh.axes.items() if axis != "dp" and n > 1}
    options = dict(choice.ways.options())
    if choice.pp > 1:
        options["num_microbatches"] = choice.microbatches
    lines = [
        f"tpcore.init({_arguments(axes)})  # dp={choice.dp}",
        f"tpcore.parallelize({', '.join(['model', *([_arguments(options)] if options else [])])})",
    ]
    if choice.pp > 1:
        lines.append(f"engine = tpcore.PipelineModel(model, num_microbatches={choice.microbatches})")
    elif choice.recompute:
        lines.append("model.gradient_checkpointing_enable()")
    if choice.zero1:
        bucket = {"bucket_mb": int(choice.bucket_mb)} if choice.bucket_mb != 4 else {}
        master = ["master_dtype=torch.float32"] if dtype in ("bfloat16", "float16") else []
        args = ["torch.optim.AdamW", "model.named_parameters()", *master, *([_arguments(bucket)] if bucket else [])]
        lines.append(f"optimizer = tpcore.Zero1({', '.join(args)}, lr=lr)")
    else:
        lines.append("optimizer = torch.optim.AdamW(model.parameters(), lr=lr)")
    return lines


def step_lines(choice: Choice) -> list[str]:
    """Python: a step on ``batch``, this rank's tensors by name, of ``rows`` examples."""
    rows = choice.microbatch * choice.microbatches
    lines = [f"# batch: {rows} examples a rank, other ones on each of the {choice.dp * choice.ways.ep} replicas"]
    if choice.pp > 1:
        lines.append("loss = engine.run_train(**batch)")
    elif choice.microbatches == 1:
        lines += ["loss = model(**batch).loss", "loss.backward()"]
    else:
        lines += [
            f"for some in zip(*(t.split({choice.microbatch}) for t in batch.values())):",
            f"    loss = model(**dict(zip(batch, some))).loss / {choice.microbatches}",
            "    loss.backward()",
        ]
    return [*lines, "tpcore.optimizer_step(optimizer, max_norm=1.0)", "optimizer.zero_grad()"]


def _arguments(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())

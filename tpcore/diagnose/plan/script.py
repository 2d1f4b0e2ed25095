"""The program that a plan asks for: what to launch, and the calls of tpcore in it."""

from __future__ import annotations

from collections.abc import Mapping

from .predict import Choice
from .search import MeshPlan


def launch_line(plan: MeshPlan, program: str = "train.py") -> str:
    """The command that starts ``program`` on each host."""
    per_host = plan.machine.per_host
    hosts = -(-plan.limits.devices // per_host)
    if hosts == 1:
        return f"torchrun --nproc-per-node {plan.limits.devices} {program}"
    address = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun --nnodes {hosts} --nproc-per-node {per_host} {address} {program}"


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
        more = {"bucket_mb": int(choice.bucket_mb)} if choice.bucket_mb != 4 else {}
        half = ["master_dtype=torch.float32"] if dtype in ("bfloat16", "float16") else []
        words = ["torch.optim.AdamW", "model.named_parameters()", *half, *([_arguments(more)] if more else [])]
        lines.append(f"optimizer = tpcore.Zero1({', '.join(words)}, lr=lr)")
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

"""A tiny Llama under Ray Train: sharded workers, checkpoints by ``ray.train.report``, resumed on any mesh.

    python examples/ray_train.py --storage /shared --workers 2 --tp 2 --steps 4
    python examples/ray_train.py --storage /shared --workers 2 --tp 1 --steps 8     # the same run goes on, at dp 2

``--storage`` is a file system that all hosts share: ranks write their parts of a checkpoint there, Ray copies nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64}
BATCH = 8


def train(config: dict[str, Any]) -> None:
    """In each worker. Ray has set ``RANK`` and the others, and made torch's process group, which ``init`` takes."""
    import torch
    import transformers

    import tpcore

    ctx = tpcore.init(tp=config["tp"])
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    tpcore.parallelize(model)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    first = 0
    if (last := ray.train.get_checkpoint()) is not None:
        first = tpcore.checkpoint.load(last.path, model, optimizer=optimizer)["step"]
    rows = BATCH // ctx.batch.size
    saved = False
    with tpcore.Preemption(told=lambda: told(config, ctx.rank)) as preemption:
        for step in range(first, config["steps"]):
            text = torch.Generator().manual_seed(step)
            ids = torch.randint(256, (BATCH, 32), generator=text).split(rows)[ctx.index(ctx.batch)].to(ctx.device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            tpcore.optimizer_step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
            mean = ctx.batch.all_reduce(loss.detach().reshape(1)) / ctx.batch.size
            metrics = {"step": step + 1, "loss": float(mean), "mesh": dict(ctx.mesh.axes)}
            now = preemption.requested() and not saved  # a host will go: save at once, then train as long as it lasts
            checkpoint = None
            if now or step + 1 == config["steps"]:
                saved |= now
                folder = Path(config["storage"], config["name"], f"step-{step + 1}")
                tpcore.checkpoint.save({"model": model.state_dict(), "optimizer": optimizer, "step": step + 1}, folder)
                checkpoint = Checkpoint.from_directory(folder) if ctx.rank == 0 else None
            ray.train.report(metrics, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
            if ctx.rank == 0:
                print(json.dumps(metrics), flush=True)
            if config.get("lost") == step + 1 and first == 0 and ctx.rank == 1:
                raise RuntimeError("as if this host were gone")
    tpcore.shutdown()


def told(config: dict[str, Any], rank: int) -> bool:
    """Whether Ray has announced the end of a host; ``--told N``: at the Nth question, to rank 1, as if it had."""
    config["asked"] = config.get("asked", 0) + 1
    if config.get("told"):
        return rank == 1 and config["asked"] >= config["told"]
    return ray.train.get_preemption_info() is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--name", default="run", help="a run of this name goes on")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--told", type=int, help="for trying: rank 1 is told at this step that its host will go")
    parser.add_argument("--lost", type=int, help="for trying: rank 1 fails after this step")
    options = parser.parse_args()
    config = {**vars(options), "storage": str(options.storage.absolute())}
    ray.init(include_dashboard=False, num_cpus=options.workers)
    run = RunConfig(name=options.name, storage_path=config["storage"], failure_config=FailureConfig(max_failures=1))
    scaling = ScalingConfig(num_workers=options.workers)
    result = TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    print(f"checkpoint: {result.checkpoint.path if result.checkpoint else None}")


if __name__ == "__main__":
    main()

"""The usual causes of a difference, each with its remedy."""

CAUSES = {
    "initial": (
        "initial values: ranks drew or loaded others than one process",
        "set one seed on all ranks before the model is made, and let each take its part of the whole's values",
    ),
    "batch": (
        "batch: what ranks were given is no part of what one process was given",
        "ranks of one tp group need the same examples, and all ranks together those of one process: divide one batch "
        "by ctx.index(ctx.batch) of ctx.batch.size",
    ),
    "dropout": (
        "dropout masks: ranks drop different entries of an activation that all of them have",
        "draw them from one seed on all ranks of a tp group (tpcore.random.manual_seed)",
    ),
    "sum": (
        "partial sums not reduced: each rank has what it adds, and ranks together have the whole",
        "add them over the tp ranks: RowParallelLinear does, or tpcore.comm.mappings.reduce",
    ),
    "sum backward": (
        "partial sums not reduced: each rank has what it adds to the gradient of the module's input",
        "add them over the tp ranks in backward: ColumnParallelLinear does, or tpcore.comm.mappings.copy before it",
    ),
    "replicated": (
        "gradient of a replicated parameter differs between ranks: of its own tokens, features or examples on each",
        "sum it: sequence_parallel=True on norms, tpcore.comm.mappings.copy(parameter, comm) in a layer of your own, "
        "tpcore.reduce_gradients over dp",
    ),
    "none": ("a rank has no gradient", "let every rank that holds a parameter compute with it"),
    "order": (
        "sums in another order: the difference is that of rounding, as where ranks add what one process adds at once",
        "tpcore.init(reproducible=8) adds alike at every degree; or --dtype own, which allows for rounding",
    ),
    "scaled": (
        "scale: a loss or gradient is divided by a number of ranks, or summed, once too often or not at all",
        "take the mean over as many as have other examples, once",
    ),
    "clipped": (
        "each rank scales its gradients by another number: a norm of the parts that it holds",
        "clip with tpcore.clip_grad_norm, or max_norm of tpcore.optimizer_step",
    ),
    "again": (
        "computed again in backward from something else than in forward, or in another type",
        "give checkpoint the inputs that forward used, unchanged, and the same autocast",
    ),
    "gradient": (
        "this parameter's gradient: a part of the sum is missing, as of a tied weight, or another part's was taken",
        "compute it from all uses of the parameter, and sum what ranks have",
    ),
    "still": ("the optimizer did not change it on some ranks", "give it the parameters that the model computes with"),
    "optimizer": (
        "the optimizer: gradients are right and the step is not: other state, options or clipping by a norm of parts",
        "clip with tpcore.clip_grad_norm or tpcore.optimizer_step, and let all ranks use the same options",
    ),
    "backward": (
        "backward of this module: a reduction is missing, or what it computes again is not what forward had",
        "compare its backward and what checkpointing saved with the unsharded module's",
    ),
    "hook": (
        "hook sees a part: a forward hook of this module gets or gives what one rank has",
        "gather before the hook (gather_output=True, or tpcore.comm.mappings.gather)",
    ),
    "part": (
        "reads only this rank's features or tokens: a reduction, norm, mask or position is of a part",
        "gather them first (gather_output=True, or tpcore.comm.mappings.gather), or reduce over the ranks",
    ),
    "forward": ("this module computes something else on ranks", "compare its forward with the unsharded module's"),
}

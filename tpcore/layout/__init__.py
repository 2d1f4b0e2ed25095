"""Which rank holds which slice: pure arithmetic, without torch.distributed."""

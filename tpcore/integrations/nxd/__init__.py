"""NeuronX Distributed's later API besides layers: trainer, optimizer and pipeline, over tpcore's own parts.

Scripts import it by the published paths: ``tpcore.trainer``, ``tpcore.optimizer``, ``tpcore.modules``,
``tpcore.pipeline``, ``tpcore.utils`` and ``tpcore.parallel_layers`` re-export these names.
"""

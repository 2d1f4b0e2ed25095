"""What NeuronX Distributed's later releases have beside layers, over tpcore's own parts.

Scripts import it by the published paths: ``tpcore.trainer``, ``tpcore.optimizer``, ``tpcore.modules``,
``tpcore.pipeline``, ``tpcore.utils`` and ``tpcore.parallel_layers`` are names for what is here.
"""

from tpcore.testing.kit.conformance import Conformance


class TestMPI(Conformance):
    backend = "mpi"

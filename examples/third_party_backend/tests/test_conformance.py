from tpcore.testing.conformance import Conformance


class TestMPI(Conformance):
    backend = "mpi"

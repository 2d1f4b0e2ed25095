from tpcore.testing.conformance import Conformance


class TestMPI(Conformance):
    backend = "mpi"
    starts = False  # mpirun starts ranks, and ends all when one is lost

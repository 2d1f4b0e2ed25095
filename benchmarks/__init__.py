"""What tpcore costs, against hand-written floors and other libraries. Run from a checkout: ``make bench``."""

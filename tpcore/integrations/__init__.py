"""What other libraries' users come in through: their own classes, over a mesh of tpcore."""

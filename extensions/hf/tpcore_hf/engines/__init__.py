"""What engines that serve take, and whether they take a folder."""

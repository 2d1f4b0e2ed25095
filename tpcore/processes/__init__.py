"""Starting the ranks of a job on this machine, and ending them."""

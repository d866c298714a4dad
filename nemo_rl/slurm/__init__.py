"""A run on the nodes of a Slurm job; `ray.sub` starts one process of it per node. Imports neither torch nor Ray."""

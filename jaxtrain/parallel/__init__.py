"""How devices share the work: the mesh and the shardings of state and batch."""

"""What state looks like: slabs, nodes, manifests. Nothing here knows attention, a model or a solver."""

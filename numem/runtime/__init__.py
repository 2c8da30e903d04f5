"""The resident plane: pages, routes, lanes, continuations, and the main job that runs on them."""

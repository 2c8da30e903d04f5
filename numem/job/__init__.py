"""The main job: a table of prompts in, completions out, every shared prefix prefilled once.

Each stage is a function of a memory, a model and a batch; what it did is recorded as facts of the batch, so that stages
may run in one process or in several, again or not at all.
"""

"""The code location: definitions, jobs, partitions, the instance beside a memory, and the `numem` command.

Dagster reads `dagster_project.definitions`. Nothing is imported here, so that the command starts fast.
"""

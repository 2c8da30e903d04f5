"""The commands of the command line, a module for each group; `numem.cli` mounts them. What takes long to import is
imported by the command that needs it."""

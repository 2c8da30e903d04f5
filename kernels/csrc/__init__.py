"""C sources of the CPU kernels; built into `numem.kernels._native`."""

"""The numeric policy of the CPU kernels: builds that compute other bits carry other names."""

from numem.kernels import native


def policy_name() -> str:
    """ "cpu-fma-v1": the extension, equal bits on all its instruction sets; "cpu-torch-v1": the torch references."""
    return "cpu-fma-v1" if native.active else "cpu-torch-v1"

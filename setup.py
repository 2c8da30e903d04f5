"""Build of the optional C kernels; everything else is in pyproject.toml.

Without a compiler the extension is left out and the torch kernels run under their own numeric policy.
"""

from setuptools import Extension, setup

# -ffp-contract=off with explicit fma: a product and a sum are fused only where the source says so, so that the
# instruction-set builds of one source produce the same bits.
FLAGS = ["-O3", "-fvisibility=hidden", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno"]

setup(
    ext_modules=[
        Extension(
            "numem.kernels._native",
            sources=[
                "kernels/csrc/module.c",
                "kernels/csrc/program.c",
                "kernels/csrc/moves.c",
                "kernels/csrc/pool.c",
                "kernels/csrc/portable.c",
                "kernels/csrc/quant.c",
                "kernels/csrc/quant_portable.c",
                "kernels/csrc/quant_avx2.c",
                "kernels/csrc/quant_avx512.c",
                "kernels/csrc/quant_avx512vnni.c",
                "kernels/csrc/avx2.c",
                "kernels/csrc/avx512.c",
                "kernels/csrc/avx512bf16.c",
            ],
            depends=[
                "kernels/csrc/kernels.inc.c",
                "kernels/csrc/common.inc.c",
                "kernels/csrc/linear.inc.c",
                "kernels/csrc/rowwise.inc.c",
                "kernels/csrc/tile.inc.c",
                "kernels/csrc/attention.inc.c",
                "kernels/csrc/vec.h",
                "kernels/csrc/vmath.h",
                "kernels/csrc/api.h",
                "kernels/csrc/moves.h",
                "kernels/csrc/quant.h",
                "kernels/csrc/quant.inc.c",
                "kernels/csrc/quant_vec.h",
                "kernels/csrc/quant_fit.inc.c",
                "kernels/csrc/module.h",
            ],
            extra_compile_args=FLAGS,
            libraries=["m", "pthread"],
            optional=True,
        )
    ]
)

"""Operations on keys and values, each with a naive twin that is its oracle.

Import it as `kvbench.kernels`. Hugging Face's package `kernels` has the same top-level name: when Python starts in
this repository's root, transformers finds this folder in its place and asks for its version. A version below the
one it wants makes it answer "not available", which is true; without one it raises InvalidVersion.
"""

__version__ = "0.0.0"

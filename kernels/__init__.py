"""Operations on keys and values, each with a naive reference implementation.

Import this package as `kvbench.kernels`. Hugging Face has a package named `kernels`: if Python starts in the root of
this repository, transformers finds this folder instead and reads its version. A version below the required one makes
transformers treat that package as not available, which is correct; without a version it raises InvalidVersion.
"""

__version__ = "0.0.0"

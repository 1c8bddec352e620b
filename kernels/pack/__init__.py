"""Rows as codes of 2, 3, 4 or 8 bits, packed, with a scale and a minimum per group."""

from kvbench.kernels.pack.torch import BITS, Codes, code_planes, dequantise, pack, packed_width, quantise, unpack

__all__ = ["BITS", "Codes", "code_planes", "dequantise", "pack", "packed_width", "quantise", "unpack"]

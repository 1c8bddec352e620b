"""Quantization to packed codes of 2, 3, 4 or 8 bits, with a scale and a minimum per group."""

from kvbench.kernels.choice import operation
from kvbench.kernels.pack import torch
from kvbench.kernels.pack.torch import BITS, PARAMETER_BYTES, Codes, code_planes, look_up, packed_width

__all__ = [
    "BITS", "PARAMETER_BYTES", "Codes", "code_planes", "dequantize", "look_up", "pack", "packed_width", "quantize",
    "unpack",
]

dequantize = operation(torch.dequantize)
pack = operation(torch.pack)
quantize = operation(torch.quantize)
unpack = operation(torch.unpack)

"""Selects pages for each query: bounds on the keys of every page, and the pages with the highest scores (Quest)."""

from kvbench.kernels.choice import operation
from kvbench.kernels.page_select import torch

__all__ = ["page_bounds", "page_scores", "select_pages"]

page_bounds = operation(torch.page_bounds)
page_scores = operation(torch.page_scores)
select_pages = operation(torch.select_pages)

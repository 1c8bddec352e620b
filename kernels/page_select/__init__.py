"""Which pages of keys each query should read: bounds of every page's keys, and the pages with the highest bounds."""

from kvbench.kernels.page_select.torch import page_bounds, page_scores, select_pages

__all__ = ["page_bounds", "page_scores", "select_pages"]

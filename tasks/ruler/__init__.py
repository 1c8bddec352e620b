"""RULER (NVIDIA, arXiv 2404.06654): synthetic tasks at exact lengths, regenerated here without its artifacts."""

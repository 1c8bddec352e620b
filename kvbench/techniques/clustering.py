"""k-means of the keys of every head, the same for every batch, and entries in the order of their clusters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def cluster(
    points: Tensor, count: int, iterations: int, *, spherical: bool = False, among: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from evenly spaced points. points: [..., n, D]

    Returns centers [..., count, D] and the center of each point [..., n]. A center that loses all its points stays
    where it is. The labels are those of the last centers but one, so that every center is the mean of its points.
    spherical: points and centers count by direction. among: the points that may be first centers; None: all.
    """
    x = points.float()
    x = F.normalize(x, dim=-1) if spherical else x
    among = torch.arange(x.shape[-2], device=x.device) if among is None else among
    centers = x.index_select(-2, among[torch.arange(count, device=x.device) * len(among) // count])
    labels = nearest(x, centers)
    for _ in range(iterations):
        centers = means(x, labels, centers)
        centers = F.normalize(centers, dim=-1) if spherical else centers
        found = nearest(x, centers)
        if found.equal(labels):
            break
        labels = found
    return means(points.float(), labels, centers), labels


def nearest(points: Tensor, centers: Tensor) -> Tensor:
    """The center with the least distance to each point. [..., n]"""
    distance = centers.square().sum(-1)[..., None, :] - 2 * points @ centers.mT
    return distance.argmin(-1)


def means(points: Tensor, labels: Tensor, empty: Tensor) -> Tensor:
    """The mean of the points of every label; `empty` where there are none. [..., count, D]"""
    sums, sizes = torch.zeros_like(empty), empty.new_zeros(empty.shape[:-1])
    sums.scatter_add_(-2, labels[..., None].expand_as(points), points)
    sizes.scatter_add_(-1, labels, torch.ones_like(labels, dtype=sizes.dtype))
    return torch.where(sizes[..., None] > 0, sums / sizes.clamp_min(1)[..., None], empty)


def sort_by_label(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Entries in the order of their labels, and where each label starts in it. [..., n], [..., count + 1] int32"""
    return labels.argsort(dim=-1, stable=True), label_offsets(labels, count)


def label_offsets(labels: Tensor, count: int) -> Tensor:
    """Where each label starts among entries in the order of their labels, and the end. [..., count + 1] int32"""
    sizes = torch.zeros((*labels.shape[:-1], count), dtype=torch.int64, device=labels.device)
    sizes.scatter_add_(-1, labels, torch.ones_like(labels))
    return F.pad(sizes.cumsum(-1), (1, 0)).to(torch.int32)


def count_clusters(entries: int, size: int, segment: int) -> int:
    """Clusters that `cluster_segments` makes of this many entries."""
    whole, rest = divmod(entries, segment)
    return whole * -(-segment // size) + -(-rest // size)


def cluster_segments(
    keys: Tensor, size: int, segment: int, iterations: int, *, spherical: bool = False
) -> tuple[Tensor, Tensor]:
    """Cluster consecutive segments of the entries apart. keys: [B, H, n, D]. Returns centers [B, H, U, D] and labels.

    size: mean entries per cluster. segment: most entries that are clustered together, which bounds time and memory.
    """
    centers, labels, before = [], [], 0
    for part in keys.split(segment, dim=2):
        found, own = cluster(part, -(-part.shape[2] // size), iterations, spherical=spherical)
        centers.append(found)
        labels.append(own + before)
        before += found.shape[2]
    return torch.cat(centers, dim=2), torch.cat(labels, dim=2)

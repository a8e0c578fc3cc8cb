"""Embeddings with sparse gradients, each of which DDP puts in its own bucket."""

from functools import partial

import torch
from torch import Tensor, nn

from ddpopt.cases.case import Call, Case
from ddpopt.cases.corpus.draws import normal, seeded, tokens


def sparse_table(entries: int, dim: int) -> nn.EmbeddingBag:
    """Build a table of small vectors whose gradient holds only the rows that were read."""
    table = nn.EmbeddingBag(entries, dim, mode="sum", sparse=True)
    nn.init.normal_(table.weight, std=0.1)
    return table


class Recommender(nn.Module):
    """Sums of sparse embeddings and a dense part, then their products and a tower of linear layers."""

    def __init__(self, tables: int, entries: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(sparse_table(entries, dim) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        pairs = (tables + 1) ** 2
        self.tower = nn.Sequential(
            nn.Linear(dim + pairs, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, features: Tensor, ids: Tensor) -> Tensor:
        """Map ``(batch, dim)`` and ``(tables, batch, bag)`` to a score for each row."""
        dense = self.dense(features)
        bags = [table(bag) for table, bag in zip(self.tables, ids, strict=True)]
        vectors = torch.stack([dense, *bags], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        score: Tensor = self.tower(torch.cat((dense, products), dim=1))
        return score.squeeze(1)


def features_and_ids(rank: int, step: int, *, tables: int, entries: int, batch: int, width: int) -> Call:
    """Draw dense features and three ids for each row and table."""
    return (normal(rank, step, batch, width), tokens(rank, step, entries, tables, batch, 3)), {}


CASES = (
    Case(
        name="recommender",
        model=partial(seeded, Recommender, tables=3, entries=1000, dim=64, hidden=768),
        inputs=partial(features_and_ids, tables=3, entries=1000, batch=64, width=64),
        about="sparse embedding gradients, which DDP reduces one by one, next to a dense tower",
    ),
)

"""Corpora, tokenizer, token shards and batches."""

from pellucid.data.batches import TokenBatches
from pellucid.data.corpora import documents
from pellucid.data.prepare import prepare
from pellucid.data.shards import Shard, build_shard
from pellucid.data.tokenizer import END_OF_TEXT, train_tokenizer

__all__ = [
    "END_OF_TEXT",
    "Shard",
    "TokenBatches",
    "build_shard",
    "documents",
    "prepare",
    "train_tokenizer",
]

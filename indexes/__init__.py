"""FAISS indexes over a corpus: built a shard at a time, stored with passages and raw vectors."""

from ttt_adapt.indexes.addition import add_to_index
from ttt_adapt.indexes.build import build_index
from ttt_adapt.indexes.factory import FactoryChoice, choose_factory
from ttt_adapt.indexes.index import Index
from ttt_adapt.indexes.info import IndexInfo
from ttt_adapt.indexes.progress import BuildProgress
from ttt_adapt.indexes.recall import RecallReport, measure_recall
from ttt_adapt.indexes.verify import verify_index

__all__ = [
    "BuildProgress",
    "FactoryChoice",
    "Index",
    "IndexInfo",
    "RecallReport",
    "add_to_index",
    "build_index",
    "choose_factory",
    "measure_recall",
    "verify_index",
]

"""Reading text: documents from files, trees and hub data sets; their passages; contamination."""

from ttt_adapt.corpus.chunking import chunk_documents
from ttt_adapt.corpus.contamination import NgramOverlap
from ttt_adapt.corpus.problems import Problem, ReadProblems
from ttt_adapt.corpus.reading import read_documents

__all__ = ["NgramOverlap", "Problem", "ReadProblems", "chunk_documents", "read_documents"]

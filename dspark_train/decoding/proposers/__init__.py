"""Proposers: the ways to guess tokens ahead. Adding one is one file that satisfies `Proposer`."""

from dspark_train.decoding.proposers.base import Proposal, Proposer
from dspark_train.decoding.proposers.block import BlockProposer
from dspark_train.decoding.proposers.branching import TreeProposer
from dspark_train.decoding.proposers.causal import CausalProposer
from dspark_train.decoding.proposers.lookup import LookupProposer
from dspark_train.decoding.proposers.plain import PlainProposer
from dspark_train.decoding.proposers.tree import Tree, TreeShape

__all__ = [
    "BlockProposer",
    "CausalProposer",
    "LookupProposer",
    "PlainProposer",
    "Proposal",
    "Proposer",
    "Tree",
    "TreeProposer",
    "TreeShape",
]

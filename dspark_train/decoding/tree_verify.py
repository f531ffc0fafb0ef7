"""The verdict on a tree: which path stands, and what the next token is drawn from.

Recursive rejection without replacement (Jeon et al. 2024, RSD; Miao et al. 2024, SpecInfer): the
children of a node are judged in order. Each is accepted as a single draft would be; a rejected one
leaves the residual of the target and is taken out of the distribution that the next one is a draw
from. Of certain children that residual is the target without their tokens. The first child that is
accepted is the next node; if none is, the token after the path comes from what is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dspark_train.decoding.logprobs import token_logprobs
from dspark_train.decoding.proposers import Proposal
from dspark_train.decoding.proposers.tree import Tree
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import draw_rows, most_likely, warp
from dspark_train.decoding.verdicts import Decision, decide, refuse_dead_end
from dspark_train.decoding.verify import accepts, residual


@dataclass(frozen=True)
class TreeVerdict:
    """The nodes in `path` stand; the token after them is drawn from `next_probs` `[V]`."""

    path: list[int]
    next_probs: torch.Tensor


@dataclass(frozen=True)
class TreeDecision(Decision):
    """A decision on a tree. Overlaps are not traced.

    Attributes:
        path: the nodes that stand, from depth 1 on.
        rejected: the last of them had children, all of which fell.
    """

    path: list[int] = field(default_factory=list)
    rejected: bool = False

    def judged(self, proposal: Proposal) -> int:
        return self.accepted + self.rejected


def verify_tree(
    tree: Tree,
    target_row: Callable[[list[int]], torch.Tensor],
    uniform: Callable[[int, int], float],
) -> TreeVerdict:
    """Judge the drafts of a tree from its anchor on.

    Args:
        tree: what was drafted.
        target_row: the target's distribution `[V]` of the token after a path, given as the nodes
            from depth 1 on.
        uniform: numbers in [0, 1) by depth of the node and place of the child among its siblings,
            independent of those that the drafts were drawn with.
    """
    path, node, children = [], 0, tree.children
    while True:
        left, draft = target_row(path), tree.draft_rows.get(node)
        for place, child in enumerate(children[node]):
            token = tree.tokens[child - 1]
            draft_prob = 1.0 if draft is None else float(draft[token])
            if accepts(uniform(len(path), place), draft_prob, float(left[token])):
                break
            left = residual(left, draft, token)
            draft = without(draft, token)
        else:
            return TreeVerdict(path, left)
        path.append(child)
        node = child


def without(draft_row: torch.Tensor | None, token: int) -> torch.Tensor | None:
    """What the next sibling is a draw from, `[V]`; None where nothing is drawn."""
    if draft_row is None:
        return None
    rest = draft_row.clone()
    rest[token] = 0
    return rest / rest.sum()


def decide_trees(
    requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[Proposal]
) -> list[Decision]:
    """What every request commits, see `verdicts.decide`.

    Args:
        requests: n of them, before anything of this round is committed.
        logits: `[N, V]`, of a request with L drafts L + 1 rows: for the token after each node.
        trees: what was drafted; in a round without drafts, empty proposals.
    """
    if not any(tree.tokens for tree in trees):
        return decide(requests, logits, trees)
    rows = logits.split([len(tree.tokens) + 1 for tree in trees])
    return [_decide(*each) for each in zip(requests, rows, trees, strict=True)]


def _decide(request: Request, logits: torch.Tensor, tree: Tree) -> TreeDecision:
    find = _sampled if request.settings.verdict == "rejection" else _matching
    find = _greedy if request.settings.greedy else find
    path, token, probs = find(request, logits, tree)
    tokens, logprobs = [*(tree.tokens[node - 1] for node in path), token], None
    if request.logprobs is not None:
        logprobs = token_logprobs(logits[[0, *path]], probs, tokens, request.logprobs)
    rejected = bool(tree.children[path[-1] if path else 0])
    return TreeDecision(len(path), tokens, logprobs, path=path, rejected=rejected)


Found = tuple[list[int], int, torch.Tensor | None]


def _greedy(request: Request, logits: torch.Tensor, tree: Tree) -> Found:
    """Follow the most likely tokens as far as there are nodes for them."""
    choices = None if request.processors else most_likely(logits).tolist()

    def choose(path: list[int]) -> int:
        if choices is None:
            return int(most_likely(_processed(request, logits, tree, path)))
        return choices[path[-1] if path else 0]

    return *_follow(tree, choose), None


def _matching(request: Request, logits: torch.Tensor, tree: Tree) -> Found:
    """Follow the target's own draws, see `verdicts.matching`; also the rows they come from."""
    first, uniform = len(request.tokens), request.randomness.uniform
    rows = []

    def choose(path: list[int]) -> int:
        rows.append(warp(_processed(request, logits, tree, path), request.settings))
        return int(draw_rows(rows[-1], [uniform(first + len(path), "target")]))

    return *_follow(tree, choose), torch.cat(rows)


def _follow(tree: Tree, choose: Callable[[list[int]], int]) -> tuple[list[int], int]:
    """The path of the tokens that the target chooses, and the first for which there is no node."""
    path, node, children = [], 0, tree.children
    while True:
        token = choose(path)
        same = [child for child in children[node] if tree.tokens[child - 1] == token]
        if not same:
            return path, token
        node = same[0]
        path.append(node)


def _sampled(request: Request, logits: torch.Tensor, tree: Tree) -> Found:
    """By rejection; also the rows `[n, V]` that the tokens come from."""
    first, uniform = len(request.tokens), request.randomness.uniform
    rows = []

    def target_row(path: list[int]) -> torch.Tensor:
        rows.append(warp(_processed(request, logits, tree, path), request.settings)[0])
        return rows[-1]

    verdict = verify_tree(
        tree, target_row, lambda depth, place: uniform(first + depth, "accept", place)
    )
    number = uniform(first + len(verdict.path), "resample")
    token = int(draw_rows(verdict.next_probs[None], [number])[0])
    return verdict.path, token, torch.stack(rows)


def _processed(
    request: Request, logits: torch.Tensor, tree: Tree, path: Sequence[int]
) -> torch.Tensor:
    """Logits `[1, V]` for the token after `path`, which the request's processors have seen.

    Raises:
        RequestError: they leave no token.
    """
    node = path[-1] if path else 0
    if not request.processors:
        return logits[node : node + 1]
    drafts = [tree.tokens[i - 1] for i in path]
    row = request.process(logits[node : node + 1], drafts, len(drafts))
    refuse_dead_end(request, row)
    return row

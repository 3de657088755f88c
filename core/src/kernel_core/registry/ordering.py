"""Declared constraints in, one order out, with the reason for every edge.

Inside a band the order is a stable topological sort: among plugins that nothing holds back, the one named first by the
user comes first. There are no priorities.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kernel_core.errors import ConflictError, OrderError
from kernel_core.hooks import HookConstraints
from kernel_core.naming import normalize

ROLE = "role:"


@dataclass(frozen=True)
class Node:
    """One active plugin, as far as order is concerned. ``position`` is its place in the user's list."""

    id: str
    name: str
    band: str
    position: int
    roles: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()

    @property
    def tie(self) -> tuple[int, str, str]:
        """What decides between two plugins that no constraint relates."""
        return (self.position, self.name, self.id)


@dataclass(frozen=True)
class Edge:
    """``first`` runs before ``second``, because ``asserted_by`` declared it."""

    first: str
    second: str
    asserted_by: str
    declaration: str

    def __str__(self) -> str:
        return f"{self.first} before {self.second}: {self.asserted_by} declares {self.declaration}"

    def reversed(self) -> Edge:
        """Return the edge for a hook that runs backwards."""
        return Edge(self.second, self.first, self.asserted_by, f"{self.declaration} (this hook runs in reverse)")


@dataclass(frozen=True)
class Ordering:
    """The plan order of every band, the edges that made it, and the constraints that met nobody."""

    nodes: tuple[Node, ...]
    order: Mapping[str, tuple[str, ...]]
    edges: tuple[Edge, ...]
    unmatched: tuple[str, ...]

    def path(self, first: str, second: str) -> list[Edge]:
        """Return edges that lead from ``first`` to ``second``, empty if no constraint relates them."""
        return path(self.edges, first, second)

    def related(self, one: str, other: str) -> bool:
        """Say whether any chain of constraints orders the two."""
        return bool(self.path(one, other) or self.path(other, one))


def order_plugins(nodes: Sequence[Node]) -> Ordering:
    """Put ``nodes`` in order, band by band.

    Raises:
        OrderError: constraints form a cycle or cross a band.
        ConflictError: two nodes exclude each other.
    """
    _refuse_conflicts(nodes)
    edges: list[Edge] = []
    unmatched: list[str] = []
    for node in sorted(nodes, key=lambda node: node.tie):
        for word, targets in (("before", node.before), ("after", node.after)):
            for target in sorted(targets):
                declaration = f"{word} {target}"
                found = _matches(target, node, nodes)
                if not found:
                    unmatched.append(f"{node.id} declares {declaration}: not active")
                for other in found:
                    edges.append(_edge(node, other, word, declaration))
    order: dict[str, tuple[str, ...]] = {}
    for band in dict.fromkeys(node.band for node in nodes):
        members = {node.id: node.tie for node in nodes if node.band == band}
        order[band] = _sort(members, [edge for edge in edges if edge.first in members])
    return Ordering(tuple(nodes), order, tuple(edges), tuple(unmatched))


@dataclass(frozen=True)
class HookOrder:
    """The order of one band on one hook."""

    ids: tuple[str, ...]
    edges: tuple[Edge, ...]
    unmatched: tuple[str, ...]


def order_hook(
    ordering: Ordering, ids: Sequence[str], reverse: bool, constraints: Mapping[str, HookConstraints], hook: str
) -> HookOrder:
    """Order the plugins of one band that answer ``hook``.

    Args:
        ordering: The plan order.
        ids: The answering plugins, all of one band.
        reverse: Whether the hook runs backwards.
        constraints: What an implementation declared on this hook alone; it applies as written and, between the same two
            plugins, wins over what they declared as a whole.
        hook: The name for messages.

    Raises:
        OrderError: the constraints of this hook make a cycle or cross a band.
    """
    nodes = {node.id: node for node in ordering.nodes}
    band = nodes[ids[0]].band
    base = list(reversed(ordering.order[band])) if reverse else list(ordering.order[band])
    edges = [edge.reversed() if reverse else edge for edge in ordering.edges if edge.first in base]
    own: list[Edge] = []
    unmatched: list[str] = []
    for node_id in sorted(ids):
        declared = constraints.get(node_id, HookConstraints())
        for word, targets in (("before", declared.before), ("after", declared.after)):
            for target in sorted(targets):
                found = _matches(target, nodes[node_id], ordering.nodes)
                if not found:
                    unmatched.append(f"{node_id} declares {word} {target} on {hook}: not active")
                own += [_edge(nodes[node_id], other, word, f"{word} {target} on {hook}") for other in found]
    if own:
        pairs = {frozenset((edge.first, edge.second)) for edge in own}
        edges = [edge for edge in edges if frozenset((edge.first, edge.second)) not in pairs] + own
        base = list(_sort({name: (index, name, name) for index, name in enumerate(base)}, edges))
    wanted = set(ids)
    return HookOrder(tuple(name for name in base if name in wanted), tuple(edges), tuple(unmatched))


def _matches(target: str, node: Node, nodes: Iterable[Node]) -> list[Node]:
    if target.startswith(ROLE):
        role = normalize(target.removeprefix(ROLE))
        return [other for other in nodes if other.id != node.id and role in other.roles]
    name = normalize(target.rpartition(":")[2])  # the distribution that provides it is no part of the order
    return [other for other in nodes if other.id != node.id and name in (other.name, normalize(other.id))]


def _edge(node: Node, other: Node, word: str, declaration: str) -> Edge:
    if node.band != other.band:
        raise OrderError(
            f"{node.id}: declares {declaration}, which is {other.id}, one of the {other.band}, while {node.id} is one of "
            f"the {node.band}. Constraints hold inside a band; {node.band} and {other.band} have a fixed order. "
            "Remove the constraint, or make both plugins of one kind."
        )
    first, second = (node, other) if word == "before" else (other, node)
    return Edge(first.id, second.id, node.id, declaration)


def _refuse_conflicts(nodes: Sequence[Node]) -> None:
    for node in sorted(nodes, key=lambda node: node.tie):
        for target in sorted(node.conflicts):
            for other in _matches(target, node, nodes):
                raise ConflictError(
                    f"{node.id}: cannot run together with {other.id}, because {node.id} declares conflicts {target}. "
                    "Leave one of them out."
                )


def _sort(members: Mapping[str, tuple[int, str, str]], edges: Sequence[Edge]) -> tuple[str, ...]:
    waiting = dict.fromkeys(members, 0)
    followers: dict[str, list[str]] = {name: [] for name in members}
    for first, second in {(edge.first, edge.second) for edge in edges}:
        waiting[second] += 1
        followers[first].append(second)
    ready = [(tie, name) for name, tie in members.items() if not waiting[name]]
    heapq.heapify(ready)
    done: list[str] = []
    while ready:
        _, name = heapq.heappop(ready)
        done.append(name)
        for follower in followers[name]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (members[follower], follower))
    if len(done) < len(members):
        stuck = set(members) - set(done)
        raise OrderError(_cycle_message([edge for edge in edges if edge.first in stuck and edge.second in stuck]))
    return tuple(done)


def _cycle_message(edges: Sequence[Edge]) -> str:
    for edge in edges:
        if back := path(edges, edge.second, edge.first):
            chain = [edge, *back]
            break
    names = " -> ".join([*(edge.first for edge in chain), chain[0].first])
    reasons = "\n".join(f"  {edge}" for edge in chain)
    return f"order: the plugins wait for each other: {names}\n{reasons}\nLeave one out, or drop one constraint."


def path(edges: Iterable[Edge], first: str, second: str) -> list[Edge]:
    """Return the shortest chain of ``edges`` from ``first`` to ``second``, empty if there is none."""
    outgoing: dict[str, list[Edge]] = {}
    for edge in edges:
        outgoing.setdefault(edge.first, []).append(edge)
    reached: dict[str, list[Edge]] = {first: []}
    queue = [first]
    for name in queue:
        for edge in outgoing.get(name, ()):
            if edge.second not in reached:
                reached[edge.second] = [*reached[name], edge]
                queue.append(edge.second)
    return reached.get(second, [])

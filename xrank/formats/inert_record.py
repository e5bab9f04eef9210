"""What a pickle asked for and did not get: a class or a call, kept as data that does nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from xrank.formats.regular_file import Origin, shown

__all__ = ["MAX_DEPTH", "InertRecord", "check_tree", "nested_class", "refuse_inert"]

MAX_DEPTH = 200
"""Containers inside each other that a state may have; callers may therefore walk it by plain recursion."""


@dataclass(eq=False, slots=True, repr=False)
class InertRecord:
    """A class or function named by a pickle, or an object it would have made; nothing was imported or called.

    It is mutable because a pickle fills an object after naming it. Equality is identity, so that it may be a key.
    """

    module: str
    name: str
    args: tuple[object, ...] | None = None
    """What it would have been called with; None: the class or function itself."""
    kwargs: dict[str, object] = field(default_factory=dict)
    state: object = None
    """What ``__setstate__`` or ``__dict__`` would have received."""
    items: list[object] = field(default_factory=list)
    """What would have been appended or added, or the (key, value) pairs that would have been set."""

    def __repr__(self) -> str:
        # Never the contents: they may be deep, or hold the record itself.
        return f"<inert {self.module}.{self.name}{'' if self.args is None else '(...)'}>"


def nested_class(args: tuple[object, ...]) -> object:
    """Return the record of a class within another one, from the arguments of a ``getattr``; or NotImplemented.

    Protocol 2 can name it in no other way (Lib/pickle.py: save_global). torch saves objects of one such class, and no
    other name is taken.
    """
    match args:
        case (InertRecord(module=module, name="ShardedTensor" as name, args=None), "ProcessGroupState" as inner) if (
            module == "torch.distributed._shard.sharded_tensor.api"
        ):
            return InertRecord(module, f"{name}.{inner}")
    return NotImplemented


def refuse_inert(value: object, path: str, rank: int | None = None) -> None:
    """Raise if a tree holds anything but plain values and tensors.

    Raises:
        UnsafeError: names the first class or function found, and the file.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, InertRecord):
            origin = Origin(path, rank)
            raise origin.unsafe(
                f"holds an object that only running code can make: {shown(f'{node.module}.{node.name}')}",
                got=shown(f"{node.module}.{node.name}"),
            )
        children = _children(node)
        if children is not None and id(node) not in seen:
            seen.add(id(node))
            waiting.extend(reversed(list(children)))


def check_tree(value: object, max_nodes: int, origin: Origin) -> None:
    """Raise if walking a tree would not end, end late, or go too deep.

    A pickle may hold a list that contains itself, or 60 lists each of which holds the one before it twice: small in
    memory, endless to walk. The contents of inert records are checked as trees of their own.

    Args:
        value: the tree.
        max_nodes: how many nodes a walk that meets shared nodes again each time may visit.
        origin: named by the errors.

    Raises:
        CorruptError: too deep, or too many nodes.
    """
    sizes: dict[int, int] = {}
    records: set[int] = set()
    roots = [value]
    while roots:
        root = roots.pop()
        path = [_Visit(root)]
        total = 0
        while path:
            visit = path[-1]
            for child in visit.children:
                if isinstance(child, InertRecord) and id(child) not in records:
                    records.add(id(child))
                    roots += [child.args, child.kwargs, child.state, child.items]
                known = sizes.get(id(child))
                if known is None and _children(child) is not None:
                    # A container inside itself ends here as well: its size is never known while it is open.
                    if len(path) >= MAX_DEPTH:
                        raise origin.corrupt(
                            "the pickled state is nested too deep, or holds itself", want=f"at most {MAX_DEPTH} levels"
                        )
                    path.append(_Visit(child))
                    break
                visit.size += 1 if known is None else known
            else:
                path.pop()
                total = visit.size
                if total > max_nodes:
                    raise origin.corrupt("the pickled state repeats itself without bound", want=f"{max_nodes} nodes")
                if path:
                    sizes[id(visit.node)] = total
                    path[-1].size += total


class _Visit:
    """A container whose children are being counted."""

    __slots__ = ("children", "node", "size")

    def __init__(self, node: object) -> None:
        self.node = node
        self.children = iter([node] if isinstance(node, InertRecord) else (_children(node) or ()))
        self.size = 1


def _children(node: object) -> Iterable[object] | None:
    """Return what a container holds, keys before values; None for a leaf."""
    if isinstance(node, dict):
        return [part for pair in node.items() for part in pair]
    if isinstance(node, (list, tuple, set, frozenset)):
        return node
    return None

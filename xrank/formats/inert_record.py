"""Inert records: the classes and calls of a pickle, kept as data and never imported or called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from xrank.formats.regular_file import Origin, quote

MAX_DEPTH = 200
"""Largest nesting depth of a state, so callers can walk it by plain recursion."""


@dataclass(eq=False, slots=True, repr=False)
class InertRecord:
    """A class or function that a pickle names, or an object that it would have made; nothing was imported or called.

    It is mutable because a pickle fills an object after naming it. Equality is identity, so it can be a key.
    """

    module: str
    name: str
    args: tuple[object, ...] | None = None
    """Arguments of the call; None for the class or function itself."""
    kwargs: dict[str, object] = field(default_factory=dict)
    state: object = None
    """The state for ``__setstate__`` or ``__dict__``."""
    items: list[object] = field(default_factory=list)
    """The appended or added items, or the (key, value) pairs to set."""

    def __repr__(self) -> str:
        # Without the contents, which may be deep or contain the record itself.
        return f"<inert {self.module}.{self.name}{'' if self.args is None else '(...)'}>"


def build_nested_class(args: tuple[object, ...]) -> object:
    """Return the record of a nested class from the arguments of a ``getattr``; or NotImplemented.

    Protocol 2 has no other way to name it (Lib/pickle.py: save_global). torch saves objects of one such class; other
    names are not accepted.
    """
    match args:
        case (InertRecord(module=module, name="ShardedTensor" as name, args=None), "ProcessGroupState" as inner) if (
            module == "torch.distributed._shard.sharded_tensor.api"
        ):
            return InertRecord(module, f"{name}.{inner}")
    return NotImplemented


def is_extra_state(name: object) -> bool:
    """Return whether a name in a state dict is the key of a module's extra state; tensors' names may end alike."""
    # torch/nn/modules/module.py: _EXTRA_STATE_KEY_SUFFIX, after the module's own name
    return str(name).rpartition(".")[2] == "_extra_state"


def refuse_inert(value: object, path: str, rank: int | None = None) -> None:
    """Raise an error unless a tree holds only plain values and tensors; modules' extra states may be any objects.

    Raises:
        UnsafeError: there is a class or function; the error names the first one and the file.
        UsageError: there is a quantized tensor of torchao, or a whole module of torch.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, InertRecord):
            origin = Origin(path, rank)
            refuse_tensor_class(node, origin)
            # torch/nn/modules/module.py: Module.__init__
            if isinstance(node.state, dict) and {"_parameters", "_modules"} <= node.state.keys():
                kind = quote(f"{node.module}.{node.name}")
                raise origin.usage(
                    f"holds a whole module, an object of {kind}, which only its own code can make",
                    got=kind,
                    want="the state dict of the module",
                    next_step="load it where its class is, then save its state_dict() with torch.save; gather that",
                )
            raise origin.unsafe(
                f"holds an object that only running code can make: {quote(f'{node.module}.{node.name}')}",
                got=quote(f"{node.module}.{node.name}"),
            )
        kept = {k: v for k, v in node.items() if not is_extra_state(k)} if isinstance(node, dict) else node
        children = _children(kept)
        if children is not None and id(node) not in seen:
            seen.add(id(node))
            waiting.extend(reversed(list(children)))


def refuse_tensor_class(record: InertRecord, origin: Origin) -> None:
    """Raise an error for an object that is a tensor of another class than torch's, such as torchao's quantized ones.

    Raises:
        UsageError: it is; torch writes all of them by one function (torch/_tensor.py: _rebuild_from_type_v2).
    """
    if (record.module, record.name) == ("torch._tensor", "_rebuild_from_type_v2"):
        kinds = [f"{a.module}.{a.name}" for a in record.args or () if isinstance(a, InertRecord) and a.args is None]
        own = next((quote(kind) for kind in kinds if not kind.startswith("torch.")), None)
        raise origin.usage(
            "holds a tensor with attributes of its own"
            if own is None
            else f"holds a tensor of {own}, whose layout xrank does not know",
            got=own,
            want="plain tensors",
            next_step="save the model with save_pretrained, as safetensors, or save what dequantize() of these tensors "
            "returns; then gather that",
        )


def check_tree(value: object, max_nodes: int, origin: Origin) -> None:
    """Raise an error if a walk of the tree would be endless, too long or too deep.

    A pickle may hold a list that contains itself, or 60 lists that each hold the previous one twice: small in memory,
    but endless to walk. The contents of inert records are checked as separate trees.

    Args:
        value: the tree.
        max_nodes: largest number of nodes of the walk, which visits shared nodes again each time.
        origin: the file, for errors.

    Raises:
        CorruptError: the tree is too deep or has too many nodes.
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
                    # A container inside itself also ends here: its size stays unknown while it is open.
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
    """A container whose nodes are being counted."""

    __slots__ = ("children", "node", "size")

    def __init__(self, node: object) -> None:
        self.node = node
        self.children = iter([node] if isinstance(node, InertRecord) else (_children(node) or ()))
        self.size = 1


def _children(node: object) -> Iterable[object] | None:
    """Return the items of a container, of a dict keys and values; None for a leaf."""
    if isinstance(node, dict):
        return [part for pair in node.items() for part in pair]
    if isinstance(node, (list, tuple, set, frozenset)):
        return node
    return None

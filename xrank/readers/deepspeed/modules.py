"""The tensors in the model states themselves: buffers, frozen parameters and ties; and the names of all tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from xrank.dtypes import dtype
from xrank.errors import ContradictionError
from xrank.formats.torch_archive import ArchivedTensor
from xrank.layout.stored_model import StoredShard
from xrank.readers.claims import HeldTensor, pieces_of, whole
from xrank.readers.deepspeed.files import Agreement, ModelState, Shape, Shapes, read_model_state
from xrank.readers.deepspeed.partitions import FlatRows, locate_interleaved, piece_numel
from xrank.readers.records import CopiedValues, Records
from xrank.storage.regular_file import Origin


class Modules(Struct, frozen=True):
    """The model states of all ranks, combined."""

    state: ModelState
    """State of rank 0, or the only one."""
    shards: Mapping[str, StoredShard]
    """Buffers, and parameters outside the partitions."""
    shared: Mapping[str, str]
    """Alias -> the name that holds the data."""
    notes: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    """Names of all tensors of the state dict, in its order."""

    @property
    def trained(self) -> Shapes:
        """Whole shapes of the parameters in the partitions."""
        return {name: shape for group in self.state.groups or () for name, shape in group.items()}


def read_whole_modules(path: str, records: Records, agreement: Agreement) -> Modules:
    """Return the tensors of one file of whole modules: stages 0 to 2."""
    state = read_model_state(path)
    agreement.add(state.facts, state.origin)
    index = records.add_archive(state.archive)
    trained = {name for group in state.groups or () for name in group}
    shared = _ties(state, is_cut=False)
    shards, untrained = {}, 0
    for name, tensor in {**state.fragments, **state.module}.items():
        # Empty tensors share their (absent) storage, so they would all look tied.
        if name in trained or (name in shared and 0 not in tensor.shape):
            _check_shape(name, tensor, state, shared)
            continue
        shards[name] = _shard_of(name, [_part_of(tensor, state.origin, index, 0)])
        untrained += name not in state.buffer_names and name not in state.frozen
    for name, shape in state.frozen.items():
        if name in shards and shards[name].shape != shape:
            raise _shape_error(name, shards[name].shape, shape, state.origin)
    notes = []
    if untrained and trained:
        notes.append(("not-trained", f"{untrained} parameters have no fp32 weights; they are taken as they are stored"))
    return Modules(state, shards, shared, (*notes, *_notes(state)), tuple(state.module))


def _ties(state: ModelState, *, is_cut: bool) -> dict[str, str]:
    """Return the ties among parameters: recorded ones, and names of the same memory.

    DeepSpeed records none in stage 0, and in no stage those of a module that its parent has under two names
    (engine.py: _get_shared_params).
    """
    held = {name for group in state.groups or () for name in group} | state.frozen.keys()
    names_of: dict[ArchivedTensor, list[str]] = {}
    for name, tensor in state.module.items():
        if name not in state.buffer_names and name not in state.shared and (is_cut or 0 not in tensor.shape):
            names_of.setdefault(tensor, []).append(name)
    found = dict(state.shared)
    for names in names_of.values():
        owners = [name for name in names if name in held]
        # With several owners of one memory it is open which of them the other names are tied to.
        if len(owners) == 1 or (not owners and not is_cut):
            owner = (owners or names)[0]
            found |= {name: owner for name in names if name != owner}
    return found


def _check_shape(name: str, tensor: ArchivedTensor, state: ModelState, shared: Mapping[str, str]) -> None:
    owner = shared.get(name, name)
    shapes = [group[owner] for group in state.groups or () if owner in group]
    if not shapes and owner in state.module:
        shapes = [state.module[owner].shape]
    if shapes and tensor.shape != shapes[0]:
        raise _shape_error(name, tensor.shape, shapes[0], state.origin)


def _shape_error(name: str, got: Shape, want: Shape, origin: Origin) -> ContradictionError:
    return origin.contradiction(
        f"records two shapes of {name}",
        str(list(got)),
        str(list(want)),
        "copy the file again from where it was saved",
        tensor=name,
    )


def _notes(state: ModelState) -> list[tuple[str, str]]:
    notes = []
    if state.num_others:
        notes.append(("no-tensors", f"{state.num_others} entries of the state dict are no tensors, and are left out"))
    absent = [name for name in state.buffer_names if name not in state.module]
    if absent:
        notes.append(("absent-buffers", f"{len(absent)} buffers are in no state dict, such as {absent[0]}"))
    return notes


def read_rank_modules(paths: Sequence[str], records: Records, agreement: Agreement) -> Modules:
    """Return the tensors of all ranks' files in stage 3: a piece of each frozen parameter, and all buffers."""
    first: ModelState | None = None
    copies = CopiedValues()
    buffers: dict[str, list[HeldTensor]] = {}
    wholes: dict[str, list[HeldTensor]] = {}
    names: list[str] = []
    known: set[str] = set()
    rows = FlatRows(names, len(paths))
    for rank, path in enumerate(paths):
        state = read_model_state(path, rank)
        agreement.add(state.facts, state.origin)
        index = records.add_archive(state.archive)
        # The first rank shows which frozen parameters are cut; `_check_alike` holds the other ranks to it.
        if first is None:
            first = state
            names = [name for name in state.frozen if not _is_whole(state, name, len(paths))]
            rows, known = FlatRows(names, len(paths)), set(names)
        _check_alike(first, state)
        for name in state.buffer_names:
            if name in state.module:
                buffer = state.module[name]
                buffers.setdefault(name, []).append(_part_of(buffer, state.origin, index, rank))
        for name, fragment in state.fragments.items():
            if name in state.frozen and name not in known:
                wholes.setdefault(name, []).append(_part_of(fragment, state.origin, index, rank))
        pieces = [_piece(state, name, len(paths)) for name in names]
        # The last ranks' pieces of a small tensor are padding alone, equal on these ranks without being copies.
        real = [piece for name, piece in zip(names, pieces, strict=True) if _numel_of(state, name, rank, len(paths))]
        count = sum(_numel_of(state, name, rank, len(paths)) for name in names)
        copies.add(state.archive, real, count, state.origin)
        rows.add(rank, pieces, index, state.origin)
    assert first is not None
    shards = {name: _shard_of(name, held) for name, held in {**wholes, **buffers}.items()}
    flats = rows.table()
    for column, name in enumerate(names):
        shards[name] = locate_interleaved(name, first.frozen[name], flats, [column])
    return Modules(first, shards, _ties(first, is_cut=True), tuple(_notes(first)), tuple(first.module))


def _numel_of(state: ModelState, name: str, rank: int, num_ranks: int) -> int:
    """Return the number of a frozen parameter's elements in a rank's piece, without padding."""
    numel = prod(state.frozen[name])
    size = piece_numel(numel, num_ranks)
    return max(0, min(numel - rank * size, size))


def _is_whole(state: ModelState, name: str, num_ranks: int) -> bool:
    """Return whether a frozen parameter lies whole on every rank, because stage 3 was kept from cutting it."""
    shape, fragment = state.frozen[name], state.fragments.get(name)
    return fragment is not None and fragment.shape == shape != (piece_numel(prod(shape), num_ranks),)


def _piece(state: ModelState, name: str, num_ranks: int) -> ArchivedTensor:
    origin, shape, fragment = state.origin, state.frozen[name], state.fragments.get(name)
    if fragment is None:
        step = "save again with a newer DeepSpeed and without exclude_frozen_parameters"
        problem = f"contains no piece of the frozen parameter {name}"
        raise origin.contradiction(problem, None, "its piece among frozen_param_fragments", step, tensor=name)
    want = piece_numel(prod(shape), num_ranks)
    if fragment.shape != (want,):
        raise origin.contradiction(
            f"contains a piece of {name} that does not fit {num_ranks} ranks",
            str(list(fragment.shape)),
            f"[{want}], of {list(shape)}",
            tensor=name,
        )
    # The placeholder has the type before quantisation.
    placeholder = state.module.get(name)
    if placeholder is not None and dtype(placeholder.dtype).is_float and not dtype(fragment.dtype).is_float:
        raise origin.usage(
            f"stores the frozen parameter {name} quantised",
            fragment.dtype,
            placeholder.dtype,
            "save again without zero_quantized_nontrainable_weights",
        )
    return fragment


def _check_alike(first: ModelState, state: ModelState) -> None:
    for what, got, want in (
        ("the shapes of trained parameters", state.groups, first.groups),
        ("the shapes of frozen parameters", state.frozen, first.frozen),
        ("buffers", state.buffer_names, first.buffer_names),
        ("names", list(state.module), list(first.module)),
        ("ties", state.shared or first.shared, first.shared),  # only rank 0 records them
    ):
        if got != want:
            raise state.origin.contradiction(
                f"differs from {first.origin.path} in {what}", ascii(got)[:200], ascii(want)[:200]
            )


def _part_of(tensor: ArchivedTensor, origin: Origin, index: Callable[[str], int], rank: int) -> HeldTensor:
    return HeldTensor.from_archive(tensor, rank=rank, file=origin.path, record=index(tensor.key))


def locate_whole(name: str, tensor: ArchivedTensor, origin: Origin, index: Callable[[str], int]) -> StoredShard:
    """Return a tensor that one file holds whole."""
    return _shard_of(name, [_part_of(tensor, origin, index, 0)])


def _shard_of(name: str, held: Sequence[HeldTensor]) -> StoredShard:
    first = held[0]
    for other in held:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            got, want = (f"{one.dtype} {list(one.shape)}" for one in (other, first))
            raise other.of(name).disagreement(first.rank, "type or shape", got, f"{want}, as in {first.file}")
    return pieces_of(name, held, first.shape, [whole(h.shape) for h in held])


def assemble(
    modules: Modules, trained: Mapping[str, StoredShard]
) -> tuple[tuple[StoredShard, ...], Mapping[str, str], tuple[str, ...]]:
    """Return all tensors of the model in the order of its state dict, the ties among them, and names without tensors.

    A trainer of adapters leaves frozen parameters out (``exclude_frozen_parameters``), but not the names of tensors
    that are tied to them: DeepSpeed goes by `named_parameters`, which lists one name of a tie.
    """
    state = modules.state
    found = {**modules.shards, **trained}
    aliases: dict[str, str] = {}
    for alias, owner in modules.shared.items():
        if alias not in found and owner in found:
            found[alias] = replace(found[owner], name=alias)
            aliases[alias] = owner
    known = {*found, *state.module, *state.frozen}
    absent = tuple(alias for alias, owner in state.shared.items() if owner not in known and alias not in found)
    for name in (*state.module, *state.frozen, *modules.shared):
        if name not in found and name not in absent:
            raise state.origin.contradiction(
                f"names {name}, but the checkpoint contains no weights of it",
                "an empty tensor" if name in state.module else "nothing",
                "trained weights in a partition, a frozen piece, or a tie to another parameter",
                "save again with a newer DeepSpeed, without exclude_frozen_parameters, and with each "
                "parameter frozen or given to the optimizer: stage 3 saves no others",
                tensor=name,
            )
    # The state dict determines the order; tensors that it lacks follow.
    order = dict.fromkeys((*modules.names, *found))
    return tuple(found[name] for name in order if name in found), aliases, absent

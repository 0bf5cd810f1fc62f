"""Which atoms are the batch: followed from the inputs through all ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from math import prod

from torch.fx import Node

from autopar.ir.keys import BATCH, DIMS
from autopar.ir.program import Input, Output, Program
from autopar.ir.sharding import atoms_of_dim
from autopar.ops.atom_classes import Atom, AtomClasses, atoms_of, read_by
from autopar.ops.strategies import factors_of, shared_atoms


def with_batch(program: Program) -> Program:
    """`program`, which is written into, with BATCH on every node, and with the batch dims of outputs, by its atoms; see `FindAtoms`."""
    constants = _constants(program)
    classes = AtomClasses.of(program.graph, apart=constants)
    of_inputs = set(_batch_atoms(program))
    roots = {classes.find(atom) for atom in of_inputs}
    others = {classes.find(atom) for atom in _input_atoms(program) if atom not in of_inputs}
    returned = _sample_atoms_of_outputs(program, classes, roots, others)
    roots |= {classes.find(atom) for atom in returned}
    of_constants: set[Atom] = set()

    def is_batch(atom: Atom) -> bool:
        return atom in of_constants if atom[0] in constants else classes.find(atom) in roots

    for node in reversed(program.graph.nodes):
        if node.op == "output":
            continue
        atoms = [[(node, result, i) for i in range(sum(map(len, dims)))] for result, dims in enumerate(DIMS[node])]
        if node in constants:
            of_constants.update(atom for each in atoms for atom in each if _is_used_as(is_batch, atom, atom in returned))
        BATCH[node] = tuple(tuple(i for i, atom in enumerate(each) if is_batch(atom)) for each in atoms)
    majors = {classes.find(atom) for atom in (*_major_atoms(program), *returned)}

    def is_major(atom: Atom) -> bool:
        return atom in returned or classes.find(atom) in majors

    outputs = tuple(_counted(item, node, program, is_major) for item, node in program.named_outputs())
    program = replace(program, signature=replace(program.signature, outputs=outputs))
    counting = {item.name: item for item in outputs if item.kind in ("output", "loss")}
    for item, node in program.named_inputs():
        if item.kind in ("batch", "tangent"):
            BATCH[node] = (shared_atoms(counting[item.name] if item.kind == "tangent" else item, node),)
    return program


def _constants(program: Program) -> set[Node]:
    """The calls that descend from no input. One of them may stand for several dims of one size: `arange(8)` for 8 samples and for
    8 positions alike."""
    found: set[Node] = set()
    for node in program.graph.nodes:
        if node.op == "call_function" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _is_used_as(is_batch: Callable[[Atom], bool], atom: Atom, is_returned: bool) -> bool:
    """Whether every use of a constant's atom is the batch, which one that `is_returned` as samples has, too."""
    uses = [True] * is_returned
    for user in atom[0].users:
        if user.op == "call_function":
            sources = read_by(user)
            together = [found for factor in factors_of(user) if atom in (found := atoms_of(user, factor, sources))]
            uses.append(any(is_batch(other) for found in together for other in found if other != atom))
    return bool(uses) and all(uses)


def _counted(item: Output, node: Node, program: Program, is_major: Callable[[Atom], bool]) -> Output:
    """With the dim that ranks get shares of, or whole.

    It is the one that counts samples where the first of its atoms that walks with the batch is the major one of these, by which inputs are
    dealt out: of pairs of samples, all first ones and then all second ones, no rank has a share. Where the dim is not known it is the
    first like that; where a batch size stands in the code (`x.view(8, -1)`), so that another was taken for it, one as long as the batch.
    """
    if item.kind != "output" or item.is_whole or not BATCH[node][0]:
        return item
    dims, sizes = DIMS[node][0], _batch_sizes(program)
    first = {dim: [atom for atom in atoms_of_dim(dims, dim) if atom in BATCH[node][0]][:1] for dim in range(len(dims))}
    found = [dim for dim, atoms in first.items() if any(is_major((node, 0, atom)) for atom in atoms)]
    as_long = [dim for dim in found if item.shape[dim] in sizes]
    if item.batch_dim in found:
        return item
    if item.batch_dim is None:
        found = as_long or found
    else:
        found = [] if first[item.batch_dim] or item.shape[item.batch_dim] in sizes else as_long
    return replace(item, batch_dim=found[0]) if found else replace(item, batch_dim=None, is_whole=True)


def _major_atoms(program: Program) -> Iterator[Atom]:
    for item, node in program.named_inputs():
        if item.kind == "batch" and item.batch_dim is not None:
            yield from ((node, 0, number) for number in atoms_of_dim(DIMS[node][0], item.batch_dim)[:1])


def _batch_atoms(program: Program) -> list[Atom]:
    """Of what is given: that of a tangent may be positions of samples, `h.reshape(-1)`."""
    inputs = [(item.batch_dim, node) for item, node in program.named_inputs() if item.kind == "batch"]
    return [(node, 0, number) for dim, node in inputs if dim is not None for number in atoms_of_dim(DIMS[node][0], dim)]


def _input_atoms(program: Program) -> list[Atom]:
    """Of what the program is given, but for tangents, which walk with outputs."""
    nodes = [node for item, node in program.named_inputs() if item.kind != "tangent"]
    return [(node, 0, number) for node in nodes for number in range(sum(map(len, DIMS[node][0])))]


def _batch_sizes(program: Program) -> set[int]:
    return {size for item, node in program.named_inputs() if item.kind == "batch" for size in _lengths(item, node)}


def _lengths(item: Input | Output, node: Node) -> set[int]:
    """Of the batch dim, with and without its padding."""
    return set() if item.batch_dim is None else {item.shape[item.batch_dim], prod(DIMS[node][0][item.batch_dim])}


def _sample_atoms_of_outputs(program: Program, classes: AtomClasses, known: Set[Atom], others: Set[Atom]) -> set[Atom]:
    """The major atom of each output's batch dim, and of its tangent's, where that is as long as the batch and its samples are not `known`
    by walking with an input's: behind an op that goes across samples, or of no input.

    A longer dim (samples of several views, positions of all samples) is left open: which of its atoms the samples are, nobody says. So
    is one that walks with an `others` dim of an input, as where a batch size stands in the code: that dim is no rank's share.
    """
    tangents = {item.name: node for item, node in program.named_inputs() if item.kind == "tangent"}
    sizes = _batch_sizes(program)
    found: set[Atom] = set()
    for item, node in program.named_outputs():
        if item.kind != "output" or item.batch_dim is None or sizes.isdisjoint(_lengths(item, node)):
            continue
        every = range(sum(map(len, DIMS[node][0])))
        if any(classes.find((node, 0, number)) in known for number in every):
            continue
        own = atoms_of_dim(DIMS[node][0], item.batch_dim)
        if own and not any(classes.find((node, 0, number)) in others for number in own):
            found |= {(each, 0, own.start) for each in (node, tangents.get(item.name)) if each is not None}
    return found

"""From a GLOBAL program with its reshards to `ModelWork`.

Which block a call belongs to follows from the path of its module: `h.3.attn` is of layer 3 of the list `h`. What no list holds belongs to
the segment between the layers that it depends on and the next one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from autopar.cost.model import CostModel, is_view
from autopar.foresight.work import Amount, Block, ModelWork, Part, Product, Transfer
from autopar.ir.collectives import reshard
from autopar.ir.keys import BATCH, DIMS, PHASE, SHARDING, SOURCE, STRATEGY
from autopar.ir.program import Program, operands, results_of
from autopar.ir.reshard import steps
from autopar.ops.atoms import operand_result
from autopar.ops.lookup import rule_of


def read_work(program: Program, cost: CostModel, layers: Sequence[str], counts: Mapping[str, int], num_samples: int) -> ModelWork:
    """`layers` are the paths of layers in order; `counts` says how many equal ones a path stands for. `num_samples` were captured.

    Reads: DIMS, BATCH, SHARDING, STRATEGY, PHASE, SOURCE.
    """
    return _Reader(program, cost, layers, counts, num_samples).work()


class _Reader:
    def __init__(self, program: Program, cost: CostModel, layers: Sequence[str], counts: Mapping[str, int], num_samples: int) -> None:
        self.program, self.cost, self.num_samples = program, cost, num_samples
        self.layers, self.counts = list(layers), counts
        self.calls: list[Node] = [node for node in program.graph.nodes if node.op == "call_function"]
        self.roots = _roots(self.calls)
        self.products: dict[Node, Product | None] = {}
        self.of_samples = self.of_samples_alone()
        # Position 2k + 1 is layer k, 2k the segment before it.
        self.place = self.places()
        # Positions are in order; blocks that nothing is computed in are left out at the end.
        self.blocks = [self.block(position) for position in range(2 * len(self.layers) + 1)]

    def block(self, position: int) -> Block:
        layer, is_layer = divmod(position, 2)
        if is_layer:
            return Block(self.layers[layer], self.counts.get(self.layers[layer], 1), is_layer=True)
        if layer == len(self.layers):
            return Block("after")
        # What stands before each of equal layers is equal, too.
        return Block("before" if position == 0 else f"between {layer}", self.counts.get(self.layers[layer], 1))

    def work(self) -> ModelWork:
        self.read_calls()
        self.read_saved()
        self.read_working()
        itemsize = self.read_parameters()
        return ModelWork(tuple(block for block in self.blocks if _is_used(block)), itemsize)

    def places(self) -> dict[Node, int]:
        numbers = {path: number for number, path in enumerate(self.layers)}
        last = 2 * len(self.layers)
        found: dict[Node, int] = {}
        rootless: list[Node] = []
        for node in self.calls:
            path = SOURCE[node].module if node in SOURCE else ""
            own = next((numbers[name] for name in _prefixes(path) if name in numbers), None)
            if own is not None:
                found[node] = 2 * own + 1
                continue
            sources = [operand for operand in node.all_input_nodes if operand in found]
            if not sources or node in self.of_samples:
                rootless.append(node)
            if _is_forward(node):
                # After the last layer that it reads.
                found[node] = max((found[each] + found[each] % 2 for each in sources), default=0)
            else:
                before = [found[each] - found[each] % 2 for each in sources if not _is_forward(each)]
                found[node] = min(before, default=last)
        kept: list[Node] = []
        for node in reversed(rootless):  # a view of a parameter: where it is read first; a table's rows, a mask, labels: before that layer
            readers = [found[user] for user in node.users if user in found and user not in kept and _is_forward(user) == _is_forward(node)]
            if readers:
                is_of_samples = _is_forward(node) and (node in self.of_samples or self.has_batch(node))
                found[node] = min(readers) - (min(readers) % 2 if is_of_samples else 0)
            else:
                kept.append(node)
        for node in reversed(kept):  # what only the backward reads is where it was made
            found[node] = max((found[each] for each in node.all_input_nodes if each in found), default=found[node])
        return found

    def of_samples_alone(self) -> set[Node]:
        """Forward calls that read what comes in with the samples, and nothing that a parameter has a part in: masks, positions, labels."""
        parameters = {node for item, node in self.program.named_inputs() if item.kind == "parameter"}
        found: set[Node] = set()
        for node in self.calls:
            if _is_forward(node) and all(
                each in found or (each.op != "call_function" and each not in parameters) for each in node.all_input_nodes
            ):
                found.add(node)
        return found

    # ---- amounts

    def amount(self, node: Node, result: int = 0) -> Amount:
        """Bytes of one rank's part of a result."""
        value = results_of(node)[result]
        if value is None:
            return Amount()
        size = self.cost.local_bytes(DIMS[node][result], value.dtype, SHARDING[node][result])
        return self.scaled(size, self.has_batch(node, result))

    def scaled(self, size: float, has_batch: bool) -> Amount:
        return Amount(0.0, size / self.num_samples) if has_batch else Amount(size, 0.0)

    def has_batch(self, node: Node, result: int = 0) -> bool:
        while node not in BATCH and node.all_input_nodes:
            node, result = node.all_input_nodes[0], 0  # a reshard
        return node in BATCH and result < len(BATCH[node]) and bool(BATCH[node][result])

    def read(self, node: Node, operand: Node) -> Amount:
        """Bytes that a call reads of an operand: no more than lie in memory, however often a view repeats them."""
        shown = self.amount(operand, operand_result(node, operand) if node.target is not reshard else 0)
        root = self.roots.get(operand, operand)
        stored = self.amount(root)
        return min(shown, stored, key=lambda each: each.of(self.num_samples)) if len(results_of(root)) == 1 else shown

    def written(self, node: Node) -> Amount:
        return sum((self.amount(node, result) for result in range(len(results_of(node)))), Amount())

    # ---- calls

    def read_calls(self) -> None:
        core = self.core()
        waits = self.reaching_earlier_blocks()
        groups = self.groups()
        for node in self.calls:
            block = self.blocks[self.place[node]]
            if node.target is reshard and not _is_forward(node) and node not in waits and not self.has_batch(node):
                block.gradient_sums.extend(self.transfers(node))
                continue
            for part in [self.part_of(node, waits)] + ([block.core] if node in core else []):
                self.add(node, part)
        for group in groups:
            reads, writes = self.group_traffic(group)
            parts = [self.part_of(group[0], waits)] + ([self.blocks[self.place[group[0]]].core] if group[0] in core else [])
            for part in parts:
                part.fused_bytes += reads + writes
                part.fused_kernels += 1

    def part_of(self, node: Node, waits: set[Node]) -> Part:
        block = self.blocks[self.place[node]]
        if _is_forward(node):
            return block.forward
        return block.input_gradient if node in waits else block.weight_gradient

    def add(self, node: Node, part: Part) -> None:
        if node.target is reshard:
            part.transfers.extend(self.transfers(node))
            return
        if is_view(node):
            return
        product = self.product(node)
        if product is not None:
            part.products.append(product)
            return
        traffic = self.written(node)
        for operand in dict.fromkeys(operands(node)):
            traffic += self.read(node, operand)
        part.eager_bytes += traffic
        part.eager_kernels += 1

    def product(self, node: Node) -> Product | None:
        if node not in self.products:
            self.products[node] = None if node.target is reshard or is_view(node) else self.product_of(node)
        return self.products[node]

    def product_of(self, node: Node) -> Product | None:
        rule = rule_of(node)
        if rule is None or not rule.flops:
            return None
        flops = rule.flops / STRATEGY[node].num_shards
        sources = list(dict.fromkeys(operands(node)))
        has_batch = any(self.has_batch(each, operand_result(node, each)) for each in sources)
        traffic = self.written(node)
        for operand in sources:
            traffic += self.read(node, operand)
        activations = [each for each in sources if self.roots.get(each, each).op != "placeholder" and len(results_of(each)) == 1]
        is_attention = len(activations) > 1 and all(self.has_batch(each) for each in (node, *activations[:2]))
        return Product(self.scaled(flops, has_batch), traffic, is_attention, is_attention and len(activations) > 2)

    def transfers(self, node: Node) -> list[Transfer]:
        source, value = operands(node)[0], results_of(node)[0]
        assert value is not None
        found: list[Transfer] = []
        for step in steps(DIMS[node][0], SHARDING[source][0], SHARDING[node][0], self.program.mesh):
            if step.collective != "slice":
                sizes = (self.scaled(count * value.dtype.itemsize, self.has_batch(source)) for count in (step.num_input, step.num_output))
                found.append(Transfer(step.collective, step.axes, *sizes))
        return found

    # ---- what runs again, what others wait for

    def core(self) -> set[Node]:
        """The forward from the first product of two activations of a block to its last."""
        starts = {node for node in self.calls if _is_forward(node) and self._is_attention(node)}
        after: set[Node] = set()
        for node in self.calls:
            if node in starts or any(each in after and self.place[each] == self.place[node] for each in node.all_input_nodes):
                after.add(node)
        before: set[Node] = set()
        for node in reversed(self.calls):
            if node in starts or any(user in before and self.place.get(user) == self.place[node] for user in node.users):
                before.add(node)
        return {node for node in after & before if _is_forward(node)}

    def _is_attention(self, node: Node) -> bool:
        product = self.product(node)
        return product is not None and product.is_attention

    def reaching_earlier_blocks(self) -> set[Node]:
        """The backward calls that another block's backward waits for: the rest is gradients of weights."""
        found: set[Node] = set()
        for node in reversed(self.calls):
            if not _is_forward(node) and any(
                user in found or (user.op == "call_function" and self.place[user] < self.place[node]) for user in node.users
            ):
                found.add(node)
        return found

    # ---- fusion

    def groups(self) -> list[list[Node]]:
        """Calls that one kernel could do: connected, in one part of a block, with no product and no collective between them."""
        level: dict[Node, int] = {}
        leader: dict[Node, Node] = {}

        def find(node: Node) -> Node:
            while leader[node] is not node:
                node = leader[node]
            return node

        for node in self.calls:
            level[node] = max((level.get(each, 0) for each in node.all_input_nodes), default=0)
            if node.target is reshard or self.product(node) is not None:
                level[node] += 1
            elif not is_view(node):
                leader[node] = node
                for operand in node.all_input_nodes:
                    root = self.roots.get(operand, operand)
                    if root in leader and level[root] == level[node] and self.key(root) == self.key(node):
                        leader[find(root)] = find(node)
        found: dict[Node, list[Node]] = defaultdict(list)
        for node in leader:
            found[find(node)].append(node)
        return list(found.values())

    def key(self, node: Node) -> tuple[int, bool]:
        return self.place[node], _is_forward(node)

    def group_traffic(self, group: list[Node]) -> tuple[Amount, Amount]:
        """What comes in from outside, and what others read."""
        members = set(group)
        reads: dict[Node, Amount] = {}
        for node in group:
            for operand in operands(node):
                root = self.roots.get(operand, operand)
                if root not in members and root not in reads:
                    reads[root] = self.read(node, operand)
        writes = [self.written(node) for node in group if not members.issuperset(self.readers(node))]
        return sum(reads.values(), Amount()), sum(writes, Amount())

    def readers(self, node: Node) -> list[Node]:
        found: list[Node] = []
        for user in node.users:
            found += self.readers(user) if user.op == "call_function" and is_view(user) and user.users else [user]
        return found

    # ---- bytes that are kept

    def read_saved(self) -> None:
        core = self.core()
        saved = self.saved_values()
        for root in saved:
            block, size = self.blocks[self.place[root]], self.written(root)
            block.saved += size
            block.gathered += self.gathered(root, saved)
            leaves = any(self.roots.get(user, user) not in core for user in self.readers(root) if self.is_forward(user))
            if root not in core or leaves:
                block.saved_outside_core += size
        for position, block in enumerate(self.blocks):
            block.inputs = sum((self.written(root) for root in self.incoming(position)), Amount())

    def gathered(self, root: Node, saved: Mapping[Node, None]) -> Amount:
        """What is left out where a gathered value is not kept, but the part that it was gathered of."""
        if root.target is not reshard or not self.has_batch(root):
            return Amount()
        part = self.root(root.all_input_nodes[0])
        less = self.written(root) - (Amount() if part in saved else self.amount(part))
        return less if less.per_sample > 0 else Amount()

    def saved_values(self) -> dict[Node, None]:
        """What the forward made that a backward call reads, each memory once. Whether a label is a class is asked again."""
        backward = (node for node in self.calls if not _is_forward(node) and not is_view(node))
        read = [self.root(operand) for node in backward for operand in node.all_input_nodes]
        return dict.fromkeys(root for root in read if self.is_forward(root) and not (root in self.of_samples and _is_bool(root)))

    def read_working(self) -> None:
        """Per block the most that values of samples take which a phase makes and drops: op by op, and where chains are one kernel."""
        held, groups = self.saved_values(), {node: number for number, group in enumerate(self.groups()) for node in group}
        inside = {node for node in groups if all(groups.get(user) == groups[node] for user in self.readers(node))}
        for position, block in enumerate(self.blocks):
            for is_forward in (True, False):
                calls = [each for each in self.calls if self.key(each) == (position, is_forward) and not is_view(each) and each not in held]
                block.eager_working = max(block.eager_working, self._peak(calls))
                block.fused_working = max(block.fused_working, self._peak([each for each in calls if each not in inside]))

    def _peak(self, calls: Sequence[Node]) -> float:
        """Bytes a sample of the results of `calls`, each until its last reader there."""
        at = {node: number for number, node in enumerate(calls)}
        ends: dict[int, float] = defaultdict(float)
        alive = most = 0.0
        for number, node in enumerate(calls):
            size = self.written(node).per_sample
            alive += size
            most = max(most, alive)
            ends[max((at[user] for user in self.readers(node) if user in at), default=number)] += size
            alive -= ends.pop(number, 0.0)
        return most

    def root(self, node: Node) -> Node:
        """The node whose memory a view shows."""
        return self.roots.get(node, node)

    def incoming(self, position: int) -> dict[Node, None]:
        """What the forward of a block reads of the samples that blocks before it made."""
        own = (node for node in self.calls if self.place[node] == position and _is_forward(node))
        read = (self.roots.get(operand, operand) for node in own for operand in node.all_input_nodes)
        return dict.fromkeys(root for root in read if root in self.place and self.place[root] < position and self.has_batch(root))

    def is_forward(self, node: Node) -> bool:
        return node.op == "call_function" and _is_forward(node)

    def read_parameters(self) -> int:
        """Elements by parameter, in the first block that reads it; gives the bytes of an element."""
        itemsize = 2
        for item, node in self.program.named_inputs():
            if item.kind != "parameter":
                continue
            users = [self.place[user] for user in node.users if user in self.place and _is_forward(user)]
            position = min(users, default=0)
            own = [position] + [each for each in sorted(set(users)) if each != position and self.is_tied(node)]
            size = math.prod(SHARDING[node][0].local_shape(DIMS[node][0], self.program.mesh))
            for each in own:
                self.blocks[each].parameters[item.name] = float(size)
            itemsize = item.dtype.itemsize if item.dtype.is_floating_point else itemsize
        return itemsize

    def is_tied(self, node: Node) -> bool:
        """Whether blocks read it that are far apart: each stage that does holds a copy."""
        return len({self.place[user] for user in node.users if user in self.place and self.is_forward(user)}) > 1


def _roots(calls: Sequence[Node]) -> dict[Node, Node]:
    """For each view the node whose memory it shows."""
    found: dict[Node, Node] = {}
    for node in calls:
        if is_view(node) and node.all_input_nodes:
            source = node.all_input_nodes[0]
            found[node] = found.get(source, source)
    return found


def _prefixes(path: str) -> list[str]:
    """`h.0.attn` → `h`, `h.0`, `h.0.attn`."""
    parts = path.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def _is_used(block: Block) -> bool:
    parts = (block.forward, block.input_gradient, block.weight_gradient)
    return bool(block.parameters) or any(part.products or part.transfers or part.eager_kernels for part in parts)


def _is_bool(node: Node) -> bool:
    value = results_of(node)[0]
    return value is not None and value.dtype == torch.bool


def _is_forward(node: Node) -> bool:
    return PHASE.get(node) != "backward"

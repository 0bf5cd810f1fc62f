"""The one list of passes, in order, each with the reason for its place."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.driver.manager import DecidingPass, Pass
from autopar.driver.options import Options
from autopar.ir.placement import Placement
from autopar.passes.forward.cast_to_precision import CastToPrecision
from autopar.passes.forward.choose_kernels import ChooseKernels
from autopar.passes.forward.decompose_bags import DecomposeBags
from autopar.passes.forward.decompose_indices import DecomposeIndices
from autopar.passes.forward.decompose_losses import DecomposeLosses
from autopar.passes.forward.decompose_masked_writes import DecomposeMaskedWrites
from autopar.passes.forward.detach_outputs import DetachOutputs
from autopar.passes.forward.drop_empty_parts import DropEmptyParts
from autopar.passes.forward.fuse_attention import FuseAttention
from autopar.passes.forward.fuse_cross_entropy import FuseCrossEntropy
from autopar.passes.forward.fuse_dropout import FuseDropout
from autopar.passes.forward.fuse_gates import FuseGates
from autopar.passes.forward.fuse_norms import FuseNorms
from autopar.passes.forward.fuse_projection import FuseProjection
from autopar.passes.forward.fuse_rotary import FuseRotary
from autopar.passes.forward.key_random import KeyRandom
from autopar.passes.forward.unify_attention import UnifyAttention
from autopar.passes.global_.choose_microbatches import ChooseMicrobatches
from autopar.passes.global_.choose_order import ChooseOrder
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.decompose_batch_norm import DecomposeBatchNorm
from autopar.passes.global_.decompose_convolutions import DecomposeConvolutions
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.fold_no_ops import FoldNoOps
from autopar.passes.global_.hold_copies import HoldCopies
from autopar.passes.global_.hold_gradients import HoldGradients
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.global_.mark_dropped import MarkDropped
from autopar.passes.global_.mark_pinned import MarkPinned
from autopar.passes.global_.mark_saved import MarkSaved
from autopar.passes.global_.merge_equal_calls import MergeEqualCalls
from autopar.passes.global_.pad_atoms import PadAtoms
from autopar.passes.global_.pad_batch import PadBatch
from autopar.passes.global_.pad_parameters import PadParameters
from autopar.passes.global_.place_stages import PlaceStages
from autopar.passes.global_.recompute import Recompute
from autopar.passes.global_.recut_parameters import RecutParameters
from autopar.passes.global_.reduce_compared import ReduceCompared
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.passes.global_.views_of_chunks import ViewsOfChunks
from autopar.passes.global_.views_of_strides import ViewsOfStrides
from autopar.passes.local.chunk_collectives import ChunkCollectives
from autopar.passes.local.copy_to_stages import CopyToStages
from autopar.passes.local.lower import Lower
from autopar.passes.local.separate_microbatches import SeparateMicrobatches
from autopar.passes.schedule.bucket_collectives import BucketCollectives
from autopar.passes.schedule.exchange_ties import ExchangeTies
from autopar.passes.schedule.free_buffers import FreeBuffers
from autopar.passes.schedule.gather_ahead import GatherAhead
from autopar.passes.schedule.go_by_node import GoByNode
from autopar.passes.schedule.hand_out import HandOut
from autopar.passes.schedule.offload_activations import OffloadActivations
from autopar.passes.schedule.offload_parameters import OffloadParameters
from autopar.passes.schedule.order_actions import OrderActions
from autopar.passes.schedule.overlap_communication import OverlapCommunication
from autopar.passes.schedule.reduce_gradients import ReduceGradients
from autopar.passes.schedule.wait_for_sums import WaitForSums
from autopar.passes.schedule.write_actions import WriteActions
from autopar.passes.schedule.write_updates import WriteUpdates
from autopar.passes.schedule.write_versions import WriteVersions
from autopar.plans.plan import Plan, PlannedInput


def default_passes(options: Options, training: bool, placements: Mapping[str, Placement] | None = None) -> tuple[Pass | DecidingPass, ...]:
    """The passes in order, each with the reason for its place. What one that has nothing to do returns is the program that it got."""
    cluster, budget, plan, own = options.cluster, options.budget, options.plan, options.microbatch_statistics
    choose = ChooseShardings(cluster, plan=plan, pins=options.pins, placements=placements, budget=budget, timeout=options.search_timeout)
    placed = _placed(options, placements)
    buckets = plan.buckets if plan is not None else None
    held = {name: each.stages for name, each in (placements or {}).items() if each.stages}
    return (
        # FORWARD: before the trace, so that autograd derives the backward of what is written here.
        CastToPrecision(options.precision),  # the first: what is fused, and how, follows from dtypes
        DetachOutputs(training),  # before the trace: what is detached has no gradient
        DropEmptyParts(),  # before the fusions: they need not know of caches that hold nothing
        DecomposeIndices(),  # before cross entropy, which reads the label of each row as a gather
        FuseCrossEntropy(options.fuses_losses),  # before losses are decomposed: that takes what is left
        FuseProjection(budget.capacity_bytes),  # after its cross entropy
        FuseGates(options.writes_rows, options.fuses_attention),
        FuseRotary(options.writes_rows),
        # As gates and rotary before attention is unified and draws are keyed: these take what is left.
        FuseAttention(options.fuses_attention),
        DecomposeBags(),  # before the trace: lookups and sums are split, and so are their gradients; bags are not
        DecomposeMaskedWrites(),  # before the trace: their backward would ask how many positions are true
        DecomposeLosses(),  # sums and counts explicit: they may then be split over the batch and the vocabulary
        UnifyAttention(),  # before the keys: dropout inside attention is a random site of its own
        FuseNorms(is_asked=options.writes_rows),  # after attention, whose forms it would hide
        KeyRandom(),  # draws become a function of position: the same on any mesh
        FuseDropout(is_asked=options.writes_rows),  # after the keys, whose draws it repeats, and the norms, whose sums it leaves
        # After the keys, which tell attention of its dropout; the backward is of the same kernel.
        ChooseKernels.by(options.kernels, cluster.device.name, plan, options.chooses_kernels),
        # GLOBAL
        TraceJoint(training),
        HoldGradients(),  # right behind the trace: what is summed, and where, follows from dtypes
        DecomposeBatchNorm(),  # after the trace, for a backward in closed form: autograd's of the sums would take twice the ops
        DecomposeConvolutions(),  # after the trace, too: its backward op yields the bias gradient
        ViewsOfStrides(),  # before folding, as chunks below: it leaves views, too
        ViewsOfChunks(),  # before folding: a split turned into views leaves views that change nothing
        FoldNoOps(),  # before merging: two calls are equal only once what lies between them is gone
        PadBatch(options.shares),  # before merging: a range of samples may be equal to one of positions, and only one is padded
        MarkPinned(options.pinned_modules),  # before saving: what the backward reads of a pinned value is the pinned one
        MarkSaved(),  # before merging: views that the backward makes anew may be there already
        MergeEqualCalls(),  # before the search: one value of three equal ones is gathered once
        ReduceCompared(),  # after merging, which may find more readers of a value
        HoldCopies(),  # after saving, for it takes the place of what is saved; before atoms, which its nodes need
        FindAtoms(placed),  # needs the final views
        ChooseMicrobatches(options.is_number_asked, own, options.mixing),  # needs atoms, which follow the samples
        PadAtoms(placed, options.is_real),  # needs atoms; what divides afterwards needs no sub-axes
        PadParameters(placements or {}),  # after padded atoms, which may divide; the mesh and the search need the sizes
        # After all that is padded, for sizes are final; before the search, which knows parameters by their atoms.
        RecutParameters(placements or {}),
        MarkDropped(options.recompute, budget.is_finite),  # before the search, whose budget counts what is saved
        RefineMesh(plan, placed=bool(placements)),  # needs atoms; the search needs the final axes
        choose,  # needs atoms, padding and the mesh: they say what can be split
        InsertReshards(),  # every mismatch that the decision leaves is a node from here on
        PlaceStages(cluster, budget, held, plan),  # needs shardings: what a stage costs follows from them
        ChooseOrder(options.is_order_free, cluster, budget),  # needs what the stages cost
        # After all that plans know calls by.
        Recompute(options.recompute, cluster, options.recompute_budget, plan.recomputed if plan is not None else ()),
        # LOCAL
        Lower(),
        SeparateMicrobatches(own),  # needs local shapes, and collectives as nodes
        CopyToStages(),  # needs microbatches separated: what follows on their sums is a part of the program then
        # Needs stages, of which a piece has one; before actions are written, which cut the program at its collectives.
        ChunkCollectives(cluster, options.collective_chunks, plan.chunks if plan is not None else None, options.recompute_budget),
        # SCHEDULE: what every rank executes
        OrderActions(options.device),  # whole actions, and what stages send
        WriteActions(options.frees_early),  # each as its fragments and collectives
        ReduceGradients(),  # after the last backward of a stage
        ExchangeTies(),  # needs the sums of all stages
        HandOut(),  # needs all results
        GatherAhead(cluster, buckets, budget),  # after all collectives are written
        BucketCollectives(cluster, buckets, budget),  # after gathers, which take memory first
        # The last that knows of no FREEs: what it moves takes memory for longer.
        OverlapCommunication(cluster, budget, keeps_actions=options.versions is not None),
        WaitForSums(cluster),  # needs the final order of what is launched
        GoByNode(cluster, budget),  # needs buckets as they are: what is large goes as one
        OffloadParameters(options.offload, cluster, options.limit or budget),  # needs the final order: what is away is there in time
        # Likewise, and what the device holds of parameters.
        OffloadActivations(options.offload, cluster, options.limit or budget, plan.offloaded.buffers if plan and plan.offloaded else None),
        FreeBuffers(),  # after all that uses buffers: what is added later is in use, too
        WriteUpdates(options.updates if options.versions is None else None),  # after the plain step is whole: `train_step` runs another
        WriteVersions(options.versions if options.updates is not None else None),  # in place of these updates
    )


def _placed(options: Options, placements: Mapping[str, Placement] | None) -> Mapping[str, Placement | PlannedInput]:
    """Known placements by parameter; an earlier capture overrides the plan."""
    plans = (each for each in (options.pins, options.plan) if isinstance(each, Plan))
    return {name: placed for plan in plans for name, placed in plan.parameters.items()} | dict(placements or {})

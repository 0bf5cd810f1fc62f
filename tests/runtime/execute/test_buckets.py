"""The memory of buckets: what comes out is what went in, apart, aligned, and taken again only once nobody looks at it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.cost.memory_walk import BUCKET_ALIGNMENT_BYTES
from autopar.ir.mesh import Mesh
from autopar.runtime.execute.buckets import Bucket, BucketMemory
from autopar.runtime.execute.owned_memory import OwnedMemory
from autopar.runtime.execute.virtual import Rendezvous, VirtualTransport

SHAPES = ((3, 5), (), (7,), (0,), (64,))


def tensors(start: float = 0.0) -> list[torch.Tensor]:
    return [torch.arange(float(torch.Size(shape).numel())).view(shape) + start for shape in SHAPES]


def test_tensors_come_out_as_they_went_in() -> None:
    given = [*tensors(), torch.arange(6.0).view(2, 3).t()]
    bucket = BucketMemory().packed("g", given)
    found = bucket.tensors()
    assert all(torch.equal(one, other) for one, other in zip(found, given, strict=True))
    assert all(each.is_contiguous() and each.storage_offset() * each.element_size() % BUCKET_ALIGNMENT_BYTES == 0 for each in found)


def test_no_two_tensors_share_a_byte() -> None:
    bucket = BucketMemory().packed("g", tensors())
    found = bucket.tensors()
    for number, each in enumerate(found):
        each.fill_(number + 1)
    assert all((each == number + 1).all() for number, each in enumerate(found))


def test_memory_is_taken_again_once_nobody_looks_at_it() -> None:
    memory = BucketMemory()
    first = memory.packed("g", tensors())
    views = first.tensors()
    kept = views[0].view(-1)[2:]
    del views
    second = memory.packed("g", tensors(100.0))
    assert second is not first, "a view of a view is still there"
    assert kept.tolist() == list(range(2, 15))
    assert memory.packed("g", tensors(200.0)) is second


def test_other_shapes_names_and_dtypes_have_memory_of_their_own() -> None:
    memory = BucketMemory()
    first = memory.packed("g", tensors())
    assert memory.packed("h", tensors()) is not first
    assert memory.packed("g", tensors()[1:]) is not first
    assert memory.packed("g", [each.double() for each in tensors()[1:]]).memory.dtype == torch.float64


class _Transport(VirtualTransport):
    """One whose results lie in `bucket`."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(Rendezvous(Mesh((("dp", 1),))), 0)
        object.__setattr__(self, "bucket", bucket)

    def bucket_parts(self) -> Mapping[int, int]:
        return self.bucket.parts  # type: ignore[attr-defined]


def test_a_gradient_keeps_its_place_in_a_bucket_unless_another_lies_there() -> None:
    bucket = BucketMemory().packed("g", tensors())
    owned = OwnedMemory([_Transport(bucket)], [])
    whole, other = bucket.tensors()[0], bucket.tensors()[2]
    kept = owned.own([whole, other])
    assert kept[0] is whole and kept[1] is other
    for part in (whole[1:], whole[:1], whole.view(3, 5), bucket.memory[:40]):
        (copy,) = owned.own([part])
        assert torch.equal(copy, part) and copy.untyped_storage().data_ptr() != bucket.memory.untyped_storage().data_ptr()

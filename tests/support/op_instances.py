"""An instance of every op that has a rule, by a name that says what is special about it."""

from __future__ import annotations

import torch
from torch.fx import Node

import autopar.kernels.attention  # noqa: F401 (registers the op)
from autopar.testing.prove import instance
from tests.support.kernels.attention import DRAWS, DROPS, PLAIN

aten = torch.ops.aten
X, Y, ROW, SCALAR = torch.empty(4, 6), torch.empty(4, 6), torch.empty(6), torch.empty(())
CUBE, IMAGE, EIGHT = torch.empty(2, 4, 6), torch.empty(4, 6, 8, 8), torch.empty(2, 8, 4, 4)
WEIGHT = torch.empty(4, 6, 3, 3)
IDS, FLAGS = torch.empty(4, 6, dtype=torch.int64), torch.empty(4, 6, dtype=torch.bool)
COLUMN_IDS = torch.empty(4, 1, dtype=torch.int64)
CONV = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
CONV_BACKWARD = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
Q, KV, LSE = torch.empty(2, 4, 6, 8), torch.empty(2, 2, 10, 8), torch.empty(2, 4, 6)
MASK = torch.empty(2, 1, 6, 10, dtype=torch.bool)


INSTANCES = {
    "add": (aten.add.Tensor, (X, ROW)),
    "add a number": (aten.add.Tensor, (X, 1.0)),
    "sub": (aten.sub.Tensor, (X, Y)),
    "mul": (aten.mul.Tensor, (X, Y)),
    "div": (aten.div.Tensor, (X, SCALAR)),
    "integers": (aten.mul.Tensor, (IDS, 3)),
    "exp": (aten.exp.default, (X,)),
    "log": (aten.log.default, (X,)),
    "logical": (aten.logical_and.default, (FLAGS, FLAGS)),
    "shift": (aten.bitwise_right_shift.Tensor_Scalar, (IDS, 2)),
    "where": (aten.where.self, (FLAGS, X, Y)),
    "masked fill with 0": (aten.masked_fill.Scalar, (X, FLAGS, 0)),
    "masked fill": (aten.masked_fill.Scalar, (X, FLAGS, -1.0)),
    "to float": (aten._to_copy.default, (IDS,), {"dtype": torch.float32}),
    "to integer": (aten._to_copy.default, (X,), {"dtype": torch.int64}),
    "gelu backward": (aten.gelu_backward.default, (X, Y), {"approximate": "tanh"}),
    "threshold backward": (aten.threshold_backward.default, (X, Y, 0)),
    "softplus backward": (aten.softplus_backward.default, (X, Y, 1.0, 20.0)),
    "copy": (aten.copy.default, (X, ROW)),
    "lerp": (aten.lerp.Scalar, (X, Y, 0.3)),
    "addcmul": (aten.addcmul.default, (X, Y, ROW)),
    "view": (aten.view.default, (CUBE, [8, 6])),
    "view apart": (aten.view.default, (X, [4, 2, 3])),
    "unsqueeze": (aten.unsqueeze.default, (X, 1)),
    "squeeze a split dim": (aten.squeeze.dim, (torch.empty(2, 3), 0)),
    "permute": (aten.permute.default, (CUBE, [2, 0, 1])),
    "transpose": (aten.transpose.int, (CUBE, 0, -1)),
    "expand": (aten.expand.default, (torch.empty(4, 1), [3, -1, 6])),
    "repeat": (aten.repeat.default, (X, [2, 1, 3])),
    "slice": (aten.slice.Tensor, (X, 1, 1, 4)),
    "slice backward": (aten.slice_backward.default, (X, [4, 9], 1, 2, 8, 1)),
    "select": (aten.select.int, (CUBE, 1, 2)),
    "select backward": (aten.select_backward.default, (X, [4, 3, 6], 1, 2)),
    "flip": (aten.flip.default, (X, [1])),
    "roll": (aten.roll.default, (X, [2], [1])),
    "tril": (aten.tril.default, (CUBE,)),
    "pad with 0": (aten.constant_pad_nd.default, (X, [1, 0], 0.0)),
    "pad": (aten.constant_pad_nd.default, (X, [1, 0], -100.0)),
    "split": (aten.split.Tensor, (X, 2, 1)),
    "unbind": (aten.unbind.int, (CUBE, 1)),
    "unfold": (aten.unfold.default, (X, 1, 2, 2)),
    "slice scatter": (aten.slice_scatter.default, (X, torch.empty(4, 2), 1, 1, 3)),
    "cat": (aten.cat.default, ([X, Y], 1)),
    "stack": (aten.stack.default, ([X, Y], 1)),
    "mm": (aten.mm.default, (X, torch.empty(6, 8))),
    "bmm": (aten.bmm.default, (CUBE, torch.empty(2, 6, 3))),
    "mv": (aten.mv.default, (X, ROW)),
    "dot": (aten.dot.default, (ROW, ROW)),
    "addmm": (aten.addmm.default, (torch.empty(8), X, torch.empty(6, 8))),
    "baddbmm": (aten.baddbmm.default, (torch.empty(2, 1, 3), CUBE, torch.empty(2, 6, 3))),
    "addmm without bias": (aten.addmm.default, (torch.empty(8), X, torch.empty(6, 8)), {"beta": 0}),
    "sum": (aten.sum.dim_IntList, (CUBE, [1], True)),
    "sum of all": (aten.sum.default, (X,)),
    "sum of booleans": (aten.sum.dim_IntList, (FLAGS, [0])),
    "amax": (aten.amax.default, (CUBE, [-1])),
    "amax kept": (aten.amax.default, (CUBE, [0, 2], True)),
    "amin": (aten.amin.default, (CUBE, [-1])),
    "max with indices": (aten.max.dim, (X, 1)),
    "argmax": (aten.argmax.default, (X, 1)),
    "any": (aten.any.dim, (FLAGS, 1)),
    "mean": (aten.mean.dim, (CUBE, [1])),
    "variance": (aten.var_mean.correction, (CUBE, [2]), {"keepdim": True}),
    "norm": (aten.linalg_vector_norm.default, (CUBE, 2, [1])),
    "histogram": (aten.histc.default, (X, 4, -2.0, 2.0)),
    "cumsum": (aten.cumsum.default, (X, 1)),
    "softmax": (aten._softmax.default, (CUBE, -1, False)),
    "softmax backward": (aten._softmax_backward_data.default, (CUBE, CUBE, 1, torch.float32)),
    "log softmax backward": (aten._log_softmax_backward_data.default, (CUBE, CUBE, 1, torch.float32)),
    "topk": (aten.topk.default, (X, 2, 1)),
    "glu": (aten.glu.default, (X, 1)),
    "glu backward": (aten.glu_backward.default, (torch.empty(4, 3), X, 1)),
    "bucketize": (aten.bucketize.Tensor, (X, ROW)),
    "embedding": (aten.embedding.default, (torch.empty(10, 6), IDS)),
    "embedding backward": (aten.embedding_dense_backward.default, (torch.empty(4, 6, 8), IDS, 10, -1, False)),
    "embedding backward, padded": (aten.embedding_dense_backward.default, (torch.empty(4, 6, 8), IDS, 10, 3, False)),
    "embedding backward, scaled": (aten.embedding_dense_backward.default, (torch.empty(4, 6, 8), IDS, 10, -1, True)),
    "index": (aten.index.Tensor, (CUBE, [None, IDS, None])),
    "index by two": (aten.index.Tensor, (CUBE, [IDS, COLUMN_IDS])),
    "index apart": (aten.index.Tensor, (CUBE, [IDS, None, COLUMN_IDS])),
    "index put": (aten.index_put.default, (CUBE, [IDS], torch.empty(4, 6, 4, 6), True)),
    "gather": (aten.gather.default, (X, 1, torch.empty(4, 2, dtype=torch.int64))),
    "gather a part": (aten.gather.default, (X, 1, torch.empty(2, 2, dtype=torch.int64))),
    "index select": (aten.index_select.default, (X, 1, torch.empty(4, dtype=torch.int64))),
    "scatter add": (aten.scatter_add.default, (X, 1, IDS, Y)),
    "scatter a number": (aten.scatter.value, (X, 1, COLUMN_IDS, 1.0)),
    "full": (aten.full.default, ([4, 6], 2.0)),
    "arange": (aten.arange.default, (12,)),
    "arange from": (aten.arange.start_step, (3, 27, 2)),
    "arange of floats": (aten.arange.start_step, (0.5, 3.5, 0.5)),
    "new zeros": (aten.new_zeros.default, (ROW, [4, 6])),
    "ones like": (aten.ones_like.default, (X,)),
    "layer norm": (aten.native_layer_norm.default, (CUBE, [6], ROW, ROW, 1e-5)),
    "layer norm backward": (
        aten.native_layer_norm_backward.default,
        (CUBE, CUBE, [6], torch.empty(2, 4, 1), torch.empty(2, 4, 1), ROW, ROW, [True, True, True]),
    ),
    "layer norm backward, input only": (
        aten.native_layer_norm_backward.default,
        (CUBE, CUBE, [6], torch.empty(2, 4, 1), torch.empty(2, 4, 1), ROW, None, [True, False, False]),
    ),
    "batch norm": (aten._native_batch_norm_legit_functional.default, (IMAGE, ROW, ROW, ROW, ROW, True, 0.1, 1e-5)),
    "batch norm, inference": (aten._native_batch_norm_legit_no_training.default, (IMAGE, ROW, ROW, ROW, ROW, 0.1, 1e-5)),
    "group norm": (aten.native_group_norm.default, (IMAGE, ROW, ROW, 4, 6, 64, 2, 1e-5)),
    "group norm backward": (
        aten.native_group_norm_backward.default,
        (IMAGE, IMAGE, torch.empty(4, 2), torch.empty(4, 2), ROW, 4, 6, 64, 2, [True, True, True]),
    ),
    "convolution": (aten.convolution.default, (IMAGE, WEIGHT, torch.empty(4), *CONV)),
    "convolution without bias": (aten.convolution.default, (IMAGE, WEIGHT, None, *CONV)),
    "convolution in groups": (aten.convolution.default, (EIGHT, torch.empty(8, 4, 3, 3), torch.empty(8), *CONV[:5], 2)),
    "convolution by channel": (aten.convolution.default, (IMAGE, torch.empty(6, 1, 3, 3), None, *CONV[:5], 6)),
    "convolution, transposed": (aten.convolution.default, (EIGHT, torch.empty(8, 2, 3, 3), None, *CONV[:3], True, [0, 0], 2)),
    "convolution of a sequence": (
        aten.convolution.default,
        (torch.empty(2, 4, 9), torch.empty(6, 4, 3), None, [2], [1], [1], False, [0], 1),
    ),
    "convolution in groups, backward": (
        aten.convolution_backward.default,
        (EIGHT, EIGHT, torch.empty(8, 4, 3, 3), [8], *CONV_BACKWARD[1:6], 2, [True, True, True]),
    ),
    "convolution by channel, backward": (
        aten.convolution_backward.default,
        (IMAGE, IMAGE, torch.empty(6, 1, 3, 3), None, *CONV_BACKWARD[1:6], 6, [True, True, False]),
    ),
    "convolution, transposed, backward": (
        aten.convolution_backward.default,
        (torch.empty(2, 4, 4, 4), EIGHT, torch.empty(8, 2, 3, 3), None, *CONV_BACKWARD[1:4], True, [0, 0], 2, [True, True, False]),
    ),
    "convolution backward": (
        aten.convolution_backward.default,
        (torch.empty(4, 4, 8, 8), IMAGE, WEIGHT, *CONV_BACKWARD, [True, True, True]),
    ),
    "convolution backward, no bias": (
        aten.convolution_backward.default,
        (torch.empty(4, 4, 8, 8), IMAGE, WEIGHT, None, *CONV_BACKWARD[1:], [True, True, False]),
    ),
    "average pooling": (aten.avg_pool2d.default, (IMAGE, [2, 2])),
    "max pooling": (aten.max_pool2d_with_indices.default, (IMAGE, [2, 2])),
    "upsample": (aten.upsample_bilinear2d.default, (IMAGE, [16, 16], False)),
    "upsample backward": (aten.upsample_bilinear2d_backward.default, (torch.empty(4, 6, 16, 16), [16, 16], [4, 6, 8, 8], False)),
    "attention": (torch.ops.autopar.attention.default, (Q, KV, KV, MASK, None, None, *DRAWS), PLAIN | DROPS),
    "attention, causal": (torch.ops.autopar.attention.default, (Q, Q, Q, *[None] * 6), PLAIN | {"is_causal": True}),
    "attention, window and soft cap": (
        torch.ops.autopar.attention.default,
        (Q, KV, KV, *[None] * 6),
        PLAIN | {"window": 3, "soft_cap": 2.0},
    ),
    "attention backward": (
        torch.ops.autopar.attention_backward.default,
        (Q, None, Q, KV, KV, MASK, None, None, *DRAWS, Q, LSE),
        PLAIN | DROPS,
    ),
    "attention backward, of both results": (
        torch.ops.autopar.attention_backward.default,
        (Q, LSE, Q, KV, KV, *[None] * 6, Q, LSE),
        PLAIN | {"soft_cap": 2.0},
    ),
}


def built(name: str) -> Node:
    target, args, *kwargs = INSTANCES[name]
    return instance(target, *args, **(kwargs[0] if kwargs else {}))

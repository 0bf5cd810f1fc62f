"""The table of measured attention kernels: the nearest shape decides, rows are compared within one run, and runs of ours come first."""

from __future__ import annotations

import pytest

from autopar.cost.hardware.attention_rates import read, table, winner
from benchmarks.attention_rates import merged, rates_of, text_of

HEAD = "device,direction,head_size,is_causal,length,kernel,who,tflops,run\n"


def test_the_rows_that_come_with_autopar() -> None:
    rates = table()
    assert {rate.device for rate in rates} >= {"a100", "h100"}
    assert {rate.kernel for rate in rates} == {"aten", "triton"}
    assert all(10 < rate.tflops < 1000 and rate.run for rate in rates)


@pytest.mark.parametrize(
    ("device", "head_size", "length", "is_causal", "kernel", "reason"),
    [
        ("a100", 128, 4096, True, "aten", "FlashAttention-2 173 TFLOP/s, FlashAttention Triton 74 (a100, heads of 128, 4096 rows, causal"),
        ("a100-40gb", 96, 3000, True, "aten", "(a100, heads of "),
        ("h100", 64, 1024, True, "aten", "cuDNN 254.8 TFLOP/s, autopar 110.7 (h100, heads of 64, 1024 rows, causal, forward and backward)"),
        ("h100", 128, 16384, False, "aten", "cuDNN 571.3 TFLOP/s, autopar 178.5"),
        ("h200", 128, 10**6, False, "aten", "cuDNN 571.3 TFLOP/s, autopar 178.5 (h100"),
    ],
)
def test_the_nearest_shape_decides(device: str, head_size: int, length: int, is_causal: bool, kernel: str, reason: str) -> None:
    found = winner(device, head_size, length, is_causal)
    assert found is not None and found.kernel == kernel and reason in str(found), found


def test_nothing_is_said_of_a_device_that_was_not_measured() -> None:
    assert winner("b200", 128, 4096, True) is None


def test_runs_of_ours_come_before_published_ones_and_both_directions_before_the_forward() -> None:
    rates = read(
        HEAD
        + "h100,forward,128,1,4096,triton,Triton,300,paper\nh100,forward,128,1,4096,aten,cuDNN,600,paper\n"
        + "h200,forward,128,1,4096,triton,autopar,700,run 1\nh200,forward,128,1,4096,aten,cudnn,600,run 1\n"
        + "h200,both,128,1,4096,triton,autopar,500,run 1\nh200,both,128,1,4096,aten,cudnn,550,run 1\n"
        + "h200,both,128,1,4096,aten,flash,400,run 1\n"
        + "h200,both,128,1,4096,triton,Triton,900,paper\n"
    )
    found = winner("h200", 128, 4096, True, rates)
    assert found is not None and (found.kernel, found.rate.tflops, found.other.who, found.other.tflops) == ("aten", 550, "autopar", 500)
    found = winner("h100", 128, 4096, True, rates)
    assert found is not None and found.kernel == "aten"


def test_one_kernel_alone_wins_over_nothing() -> None:
    assert winner("h200", 128, 4096, True, read(HEAD + "h200,both,128,1,4096,aten,cudnn,550,run\n")) is None


def test_a_run_on_a_gpu_becomes_rows_that_come_first() -> None:
    rows = [
        {"case": "attention 128 causal 4096", "who": who, "direction": direction, "ms": ms, "TFLOP/s": rate}
        for who, direction, ms, rate in [
            ("ours", "forward", 1.0, 600.0),
            ("ours", "backward", 3.0, 500.0),
            ("cudnn", "forward", 1.0, 500.0),
            ("cudnn", "backward", 3.0, 400.0),
            ("flex", "forward", 1.0, 900.0),
            ("flash", "forward", 1.0, 900.0),
        ]
    ]
    new = rates_of({"device": "NVIDIA H200", "rows": [*rows, {"case": "copy", "who": "torch", "ms": 1.0, "GB/s": 1.0}]})
    assert [(rate.kernel, rate.who, rate.tflops, rate.device) for rate in new] == [
        ("triton", "autopar", 525.0, "h200"),
        ("aten", "cuDNN", 425.0, "h200"),
    ]
    rates = read(text_of(merged(table(), new)))
    assert rates == (*table(), *new) and merged(rates, new) == list(rates)
    found = winner("h200", 128, 4096, True, rates)
    assert found is not None and str(found).startswith("autopar 525 TFLOP/s, cuDNN 425 (h200, heads of 128, 4096 rows, causal, forward and")

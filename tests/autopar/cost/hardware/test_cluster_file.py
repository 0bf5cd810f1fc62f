"""A cluster's file: every mistake is named at once, each with its place and a way out."""

from __future__ import annotations

import pytest

from autopar.cost.hardware.cluster_file import ClusterError, read_cluster
from autopar.errors import AutoparError

GOOD = """\
name: mine
device:
  flops: {bfloat16: 800 TFLOP/s, float32: {value: 6.7e13, source: data sheet}}
  memory: 80 GB
  memory_bandwidth: {value: 3.35 TB/s, source: measured}
  launch: 4 us
  host: {parameter: 25 us, update_bandwidth: {value: 10 GB/s, source: a copy}}
ranks_per_node: 8
inner: {latency: 2.7 us, bandwidth: 361 GB/s, small: {latency: 1 us, bandwidth: {value: 100 GB/s, source: guessed}}}
outer: {latency: 0, bandwidth: 400 Gb/s, source: the invoice, call: 30 us}
axes:
  tp: {latency: 1 us, bandwidth: 1 GB/s, wiring: mesh, factors: {all_to_all: 1.5}, busy: 0.7}
"""


def test_numbers_come_in_si_units_and_sources_with_the_number_that_they_are_of() -> None:
    content = read_cluster(GOOD, "mine.yaml")
    assert content["device"]["flops"] == {"bfloat16": 8e14, "float32": 6.7e13}
    assert content["device"]["host"] == {"parameter": 25e-6, "update_bandwidth": 1e10, "source": "update_bandwidth: a copy"}
    assert content["device"]["source"] == "flops.float32: data sheet; memory_bandwidth: measured"
    assert content["inner"]["small"] == {"latency": 1e-6, "bandwidth": 1e11}
    assert content["inner"]["source"] == "small.bandwidth: guessed"
    assert content["outer"] == {"latency": 0.0, "bandwidth": 5e10, "source": "the invoice", "call": 3e-5}
    assert content["axes"]["tp"]["factors"] == {"all_to_all": 1.5} and content["axes"]["tp"]["busy"] == 0.7


def test_every_mistake_is_reported_at_once_with_its_place() -> None:
    text = """\
name: mine
device:
  flops: {bflot16: 800 TFLOP/s}
  memory: 80 GHz
  memory_bandwith: 3.35 TB/s
  launch: -4 us
ranks_per_node: half
inner: {latency: 1 us, bandwidth: 0, wiring: mash}
inner: fast
outer: 10 GB/s
"""
    with pytest.raises(ClusterError) as raised:
        read_cluster(text, "mine.yaml")
    assert str(raised.value).splitlines() == [
        "mine.yaml describes no cluster, 10 to mend:",
        "  mine.yaml:9:1: inner is given twice",
        "  mine.yaml:5:3: device.memory_bandwith is not known here; did you mean 'memory_bandwidth'?",
        "  mine.yaml:3:3: device.memory_bandwidth is missing",
        "  mine.yaml:3:11: device.flops.bflot16 is not known here; did you mean 'bfloat16'?",
        "  mine.yaml:4:11: device.memory is '80 GHz', where 'GHz' is not a unit for B; write '80 GB' or a plain number in B",
        "  mine.yaml:6:11: device.launch must be at least 0, got '-4 us'",
        "  mine.yaml:7:17: ranks_per_node must be a whole number of at least 1, got 'half'",
        "  mine.yaml:8:35: inner.bandwidth must be more than 0, got '0'",
        "  mine.yaml:8:46: inner.wiring is 'mash'; did you mean 'mesh'?",
        "  mine.yaml:10:8: outer needs a mapping of names to values",
    ]
    assert isinstance(raised.value, AutoparError)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "mine.yaml is empty; it needs name, device"),
        ("name: [", "mine.yaml:1:8 is not YAML"),
        ("a\x00b", "mine.yaml is not YAML"),
        ("- 1", "mine.yaml:1:1: needs a mapping"),
        (GOOD.replace("name: mine", "name: [mine]"), "mine.yaml:1:7: name needs one value"),
        (GOOD.replace("memory: 80 GB", "memory: [80 GB]"), "memory needs a number"),
        (
            GOOD.replace("{bfloat16: 800 TFLOP/s, float32: {value: 6.7e13, source: data sheet}}", "{}"),
            "device.flops needs at least one entry",
        ),
        (GOOD.replace("{value: 3.35 TB/s, source: measured}", "{source: measured}"), "device.memory_bandwidth.value is missing"),
        (GOOD.replace("  tp: {", "  [tp]: {"), "a key must be a plain name"),
        (GOOD.replace("all_to_all: 1.5", "all2all: 1.5"), "axes.tp.factors.all2all is not known here; did you mean 'all_to_all'?"),
        (GOOD.replace("parameter: 25 us", "parameters: 25 us"), "device.host.parameters is not known here; did you mean 'parameter'?"),
        (GOOD.replace("parameter: 25 us", "parameter: 25 GB"), "device.host.parameter is '25 GB', where 'GB' is not a unit for s"),
        (GOOD.replace("busy: 0.7", "busy: 70"), "axes.tp.busy is a share and at most 1, got '70'"),
    ],
)
def test_single_mistakes(text: str, problem: str) -> None:
    with pytest.raises(ClusterError) as raised:
        read_cluster(text, "mine.yaml")
    assert problem in str(raised.value)

"""A cluster as text: YAML that reads back to an equal cluster, and a table for people."""

from __future__ import annotations

import json
from collections.abc import Iterable

from autopar.cost.hardware.device import Device
from autopar.cost.hardware.host import Host
from autopar.cost.hardware.links import Link, Protocol
from autopar.ir.units import BYTES, BYTES_PER_SECOND, FLOPS, SECONDS, format_quantity

_DIGITS = 3


Axes = Iterable[tuple[str, Link]]


def yaml_of(name: str, device: Device, ranks_per_node: int, inner: Link, outer: Link, axes: Axes, copies: Axes = ()) -> str:
    """The YAML of a cluster, every number exact; `axes` are links of single mesh axes, `copies` those to other memories."""
    lines = [f"name: {_quoted(name)}", "device:", f"  name: {_quoted(device.name)}", "  flops:"]
    lines += [f"    {dtype}: {format_quantity(rate, FLOPS)}" for dtype, rate in device.flops]
    lines += [
        f"  memory: {format_quantity(device.memory_bytes, BYTES)}",
        f"  memory_bandwidth: {format_quantity(device.memory_bandwidth, BYTES_PER_SECOND)}",
        f"  launch: {format_quantity(device.launch_seconds, SECONDS)}",
        *([f"  source: {_quoted(device.source)}"] if device.source else []),
        *_host_lines(device.host),
        f"ranks_per_node: {ranks_per_node}",
        *_link_lines("inner", inner, ""),
        *_link_lines("outer", outer, ""),
        *(line for memory, link in copies for line in _link_lines(memory, link, "")),
    ]
    of_axes = [line for axis, link in axes for line in _link_lines(axis, link, "  ")]
    return "\n".join([*lines, *(["axes:"] if of_axes else []), *of_axes]) + "\n"


def _host_lines(host: Host) -> list[str]:
    fields = {name: format_quantity(seconds, SECONDS) for name, seconds in _host_seconds(host).items()}
    if host.update_bandwidth:
        fields["update_bandwidth"] = format_quantity(host.update_bandwidth, BYTES_PER_SECOND)
    if host.source:
        fields["source"] = _quoted(host.source)
    return ["  host:", *(f"    {key}: {value}" for key, value in fields.items())] if fields else []


def _host_seconds(host: Host) -> dict[str, float]:
    found = {
        "instruction": host.instruction_seconds,
        "launch": host.launch_seconds,
        "parameter": host.parameter_seconds,
        "update": host.update_seconds,
    }
    return {name: seconds for name, seconds in found.items() if seconds}


def _link_lines(name: str, link: Link, indent: str) -> list[str]:
    fields = {
        "latency": format_quantity(link.latency_seconds, SECONDS),
        "bandwidth": format_quantity(link.bytes_per_second, BYTES_PER_SECOND),
    }
    if link.call_seconds:
        fields["call"] = format_quantity(link.call_seconds, SECONDS)
    for key, protocol in (("small", link.small), ("in_switch", link.in_switch)):
        if protocol is not None:
            fields[key] = f"{{latency: {format_quantity(protocol.latency_seconds, SECONDS)}, bandwidth: {_rate(protocol, None)}}}"
    if link.wiring != "switch":
        fields["wiring"] = link.wiring
    if link.factors:
        fields["factors"] = f"{{{', '.join(f'{transfer}: {factor!r}' for transfer, factor in link.factors)}}}"
    if link.busy:
        fields["busy"] = repr(link.busy)
    if link.source:
        fields["source"] = _quoted(link.source)
    return [f"{indent}{_quoted(name)}:", *(f"{indent}  {key}: {value}" for key, value in fields.items())]


def _rate(protocol: Protocol, digits: int | None) -> str:
    return format_quantity(protocol.bytes_per_second, BYTES_PER_SECOND, digits)


def _quoted(text: str) -> str:
    """A YAML scalar: plain where that is safe, else in double quotes (JSON's are YAML's)."""
    return (
        text
        if text.isidentifier() and text.lower() not in ("null", "true", "false", "yes", "no", "on", "off")
        else json.dumps(text, ensure_ascii=False)
    )


def table_of(name: str, device: Device, ranks_per_node: int, inner: Link, outer: Link, axes: Axes) -> str:
    """Name, device and links of a cluster in a few aligned lines, three digits a number."""
    rates = ", ".join(f"{dtype} {format_quantity(rate, FLOPS, _DIGITS)}" for dtype, rate in device.flops)
    size = format_quantity(device.memory_bytes, BYTES, _DIGITS)
    speed = format_quantity(device.memory_bandwidth, BYTES_PER_SECOND, _DIGITS)
    links = [("within a node", inner), ("between nodes", outer), *((f"along {axis}", link) for axis, link in axes)]
    rows = [("link", "per step", "bandwidth", "per call", "small messages", "in the switch", "wiring", "slower by", "slows compute")]
    rows += [(place, *_cells(link)) for place, link in links]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    heads = [
        f"{name}: {ranks_per_node} ranks per node of {device.name}",
        f"  matmul  {rates}",
        f"  memory  {size} at {speed}",
        f"  launch  {format_quantity(device.launch_seconds, SECONDS, _DIGITS)}",
    ]
    return "\n".join(heads + _host_row(device.host) + table)


def _host_row(host: Host) -> list[str]:
    cells = [f"{name} {format_quantity(seconds, SECONDS, _DIGITS)}" for name, seconds in _host_seconds(host).items()]
    cells += [f"updates at {format_quantity(host.update_bandwidth, BYTES_PER_SECOND, _DIGITS)}"] if host.update_bandwidth else []
    return [f"  host    {', '.join(cells)}"] if cells else []


def _cells(link: Link) -> tuple[str, ...]:
    return (
        format_quantity(link.latency_seconds, SECONDS, _DIGITS),
        _rate(link.bulk, _DIGITS),
        format_quantity(link.call_seconds, SECONDS, _DIGITS),
        *(_protocol_cell(protocol) for protocol in (link.small, link.in_switch)),
        link.wiring,
        ", ".join(f"{transfer} {factor:.2g}" for transfer, factor in link.factors) or "-",
        f"{link.busy:.2g}" if link.busy else "-",
    )


def _protocol_cell(protocol: Protocol | None) -> str:
    return f"{format_quantity(protocol.latency_seconds, SECONDS, _DIGITS)}, {_rate(protocol, _DIGITS)}" if protocol else "-"

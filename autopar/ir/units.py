"""Quantities with units: as people write them, as files hold them, and as reports show seconds and bytes."""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation

_TEXT = re.compile(r"(?P<number>[-+]?[\d.][\d._]*(?:[eE][-+]?\d+)?)\s*(?P<unit>.*)")
_DECIMAL_PREFIXES = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY_PREFIXES = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5}
_SMALL_PREFIXES = {"": 0, "m": -3, "u": -6, "µ": -6, "μ": -6, "n": -9, "p": -12}

BYTES, BYTES_PER_SECOND, FLOPS, SECONDS, PLAIN = "B", "B/s", "FLOP/s", "s", ""
_EXAMPLES = {PLAIN: "1.5", BYTES: "80 GB", BYTES_PER_SECOND: "3.35 TB/s", FLOPS: "795 TFLOP/s", SECONDS: "2.7 us"}


def _units(unit: str) -> dict[str, Decimal]:
    """Every spelling of `unit` with what it stands for."""
    if unit == SECONDS:
        return {f"{prefix}s": Decimal(10) ** power for prefix, power in _SMALL_PREFIXES.items()}
    decimal = {prefix: Decimal(10) ** power for prefix, power in _DECIMAL_PREFIXES.items()}
    if unit == FLOPS:
        return {f"{prefix}{spelling}": factor for prefix, factor in decimal.items() for spelling in ("FLOP/s", "FLOPS", "FLOPs", "FLOP")}
    prefixes = decimal | {prefix: Decimal(1024) ** power for prefix, power in _BINARY_PREFIXES.items()}
    if unit == BYTES:  # in any capitals: nobody gives a memory in bits
        return {f"{prefix}B".lower(): factor for prefix, factor in prefixes.items()}
    sizes = {"B": Decimal(1), "b": Decimal(1) / 8, "bit": Decimal(1) / 8}
    return {f"{p}{name}{end}": factor * size for p, factor in prefixes.items() for name, size in sizes.items() for end in ("/s", "ps")}


_UNITS = {PLAIN: dict[str, Decimal]()} | {unit: _units(unit) for unit in (BYTES, BYTES_PER_SECOND, FLOPS, SECONDS)}


def parse_quantity(text: str, unit: str) -> float:
    """The SI value of `text`, a number of `unit` ("B", "B/s", "FLOP/s", "s", or "" for a plain one): `3.35 TB/s`, `40GiB`, `2.7 us`.

    Raises ValueError saying what is wrong, to follow the name of what was given: "is 'fast', no number; write '2.7 us'".
    """
    match = _TEXT.fullmatch(text.strip())
    try:
        number = Decimal(match["number"].replace("_", "")) if match else None
    except InvalidOperation:
        number = None
    if match is None or number is None:
        raise ValueError(f"is {text!r}, no number; write {_EXAMPLES[unit]!r}{f' or its value in {unit}' if unit else ''}")
    spelling = match["unit"].strip()
    known = spelling.lower() if unit == BYTES else spelling
    if known and known not in _UNITS[unit]:
        wanted = f"a unit for {unit}; write {_EXAMPLES[unit]!r} or a plain number in {unit}" if unit else "wanted; write a plain number"
        raise ValueError(f"is {text!r}, where {spelling!r} is not {wanted}")
    return float(number * (_UNITS[unit][known] if known else 1))


def format_quantity(value: float, unit: str, digits: int | None = None) -> str:
    """`value` with the prefix that leaves 1 to 999: exactly, so that `parse_quantity` gives it back, or with `digits` digits."""
    if value == 0:
        return f"0 {unit}"
    exact = Decimal(f"{value:.{digits - 1}e}" if digits else repr(float(value)))
    prefixes = _SMALL_PREFIXES if unit == SECONDS else _DECIMAL_PREFIXES
    powers = {power: prefix for prefix, power in reversed(prefixes.items()) if prefix not in ("K", "µ", "μ")}
    power = max((each for each in powers if each <= exact.adjusted()), default=min(powers))
    return f"{exact.scaleb(-power).normalize():f} {powers[power]}{unit}"


def in_seconds(value: float, sign: bool = False) -> str:
    """`1.2 ms`: three digits, for people."""
    plus = "+" if sign and value >= 0 else ""
    if not math.isfinite(value):
        return f"{plus}{value} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= scale:
            return f"{plus}{value / scale:.3g} {unit}"
    return f"{plus}{value / 1e-9:.3g} ns"


def in_bytes(value: float) -> str:
    """`12.6 MB`: one decimal, for people."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"

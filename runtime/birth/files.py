"""Values from safetensors files, as Hugging Face lays them out, of which a rank reads its own slices."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from autopar.errors import WeightsError
from autopar.runtime.birth.slots import names_of, slots_of
from autopar.runtime.birth.values import Values, held_ranges
from autopar.runtime.module.parameters import Placement

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_MOST = 5  # problems that an error lists


class Entry(NamedTuple):
    """A tensor in a file, under its name there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Files(Values):
    """The tensors of `model` as they are in the safetensors files at `path`: a file, or a folder with one file, several, or an index.

    Names in the files are the model's, or differ from these by transformers' prefix of a base model, or as transformers names some models'
    tensors in files; what it converts otherwise as it loads (experts put together) is refused. A tied tensor is there under any of its
    names. Where names, shapes or dtypes are others `WeightsError` is raised, before anything is read; with `cast` dtypes may be,
    and values are converted. What the model does not save (buffers that are not persistent) is not asked for. Nothing is unpickled.
    """

    def __init__(self, model: nn.Module, path: str | Path, cast: bool = False) -> None:
        self._dtypes = {name: tensor.dtype for name, tensor in slots_of(model).items()}
        entries = entries_at(Path(path))
        entries = {new: entries[name] for new, name in _renamed(model, list(entries)).items()}
        self._entries = _matched(model, entries, Path(path), cast)
        sizes = {entry.file: entry.file.stat().st_size for entry in self._entries.values()}
        self.identity: dict[str, object] = {name: (entry.shape, entry.dtype, sizes[entry.file]) for name, entry in self._entries.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def whole(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        with safe_open(entry.file, framework="pt") as file:
            return self._own(file.get_tensor(entry.name), name)

    def part(self, name: str, placement: Placement, rank: int) -> torch.Tensor:
        entry = self._entries[name]
        ranges = held_ranges(placement, rank)
        with safe_open(entry.file, framework="pt") as file:
            return self._own(_read(file.get_slice(entry.name), ranges, ()) if ranges else file.get_tensor(entry.name), name)

    def _own(self, read: torch.Tensor, name: str) -> torch.Tensor:
        """In memory of its own: what is read may be a view of the mapped file."""
        return torch.empty(read.shape, dtype=self._dtypes[name], device="cpu").copy_(read)


def _read(source: Any, ranges: Sequence[Sequence[tuple[int, int]]], chosen: tuple[slice, ...]) -> torch.Tensor:
    """The product of `ranges`, one list for each dim after those that are `chosen`, box by box."""
    if len(chosen) == len(ranges):
        return source[chosen]
    dim = len(chosen)
    parts = [_read(source, ranges, (*chosen, slice(*each))) for each in ranges[dim] or [(0, 0)]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def entries_at(path: Path) -> dict[str, Entry]:
    """Every tensor in the files at `path`, by its name there. Raises `WeightsError` for files that are not whole or say one name twice."""
    found: dict[str, Entry] = {}
    with ExitStack() as stack:
        for file in _files_at(path):
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
                names = list(opened.keys())
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{file} is no whole safetensors file: {error}") from error
            for name in names:
                if name in found:
                    raise WeightsError(f"{name!r} is in {found[name].file} and in {file}: take one of them away, or write an {_INDEX}")
                piece = opened.get_slice(name)
                found[name] = Entry(file, name, tuple(piece.get_shape()), _dtype(piece.get_dtype(), name, file))
    return found


def _dtype(word: str, name: str, file: Path) -> torch.dtype:
    if word not in _DTYPES:
        raise WeightsError(f"{name!r} in {file} has dtype {word}, which is none of {', '.join(_DTYPES)}")
    return _DTYPES[word]


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return _indexed(path) if path.name.endswith(".index.json") else [path]
    if (path / _INDEX).is_file():
        return _indexed(path / _INDEX)
    found = [path / _SINGLE] if (path / _SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if not found:
        others = sorted(each.name for each in path.glob("*.bin")) if path.is_dir() else []
        hint = f"; {others[0]} is a pickle, which may run code: save it anew, save_pretrained(folder)" if others else ""
        raise WeightsError(f"no *.safetensors and no {_INDEX} at {path}{hint}")
    return found


def _indexed(index: Path) -> list[Path]:
    """The files that an index names; they lie beside it."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = sorted({str(name) for name in names})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f'{index} is no index of safetensors files, {{"weight_map": {{name: file}}}}: {error!r}') from error
    for name in files:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise WeightsError(f"{index} names the file {name!r}, which does not lie beside it")
    return [index.parent / name for name in files]


def _matched(model: nn.Module, entries: Mapping[str, Entry], path: Path, cast: bool) -> dict[str, Entry]:
    """The entry of each tensor that `model` saves, by its first name. Raises `WeightsError` with the first few problems."""
    saved = set(model.state_dict(keep_vars=True))
    wanted = {first: [name for name in names if name in saved] for first, names in names_of(model).items()}
    wanted = {first: names for first, names in wanted.items() if names}
    rename = _renaming(model, {name for names in wanted.values() for name in names}, entries)
    found: dict[str, Entry] = {}
    used: set[str] = set()
    problems: list[str] = []
    slots = slots_of(model)
    for first, names in wanted.items():
        there = [rename(name) for name in names if rename(name) in entries]
        used |= set(there)
        if not there:
            if not _is_ignored(model, "_keys_to_ignore_on_load_missing", first):
                problems.append(f"{first!r} is not in the files")
            continue
        entry, tensor = entries[there[0]], slots[first]
        if entry.shape != tuple(tensor.shape):
            problems.append(f"{first!r} is {list(tensor.shape)} in the model, {list(entry.shape)} in {entry.file.name}")
        elif entry.dtype != tensor.dtype and not cast:
            problems.append(f"{first!r} is {_word(tensor.dtype)} in the model, {_word(entry.dtype)} in {entry.file.name}")
        found[first] = entry
    extra = [name for name in entries if name not in used and not _is_ignored(model, "_keys_to_ignore_on_load_unexpected", name)]
    problems += [f"{name!r} in {entries[name].file.name} is none of the model's" for name in extra]
    if problems:
        more = f"\n  and {len(problems) - _MOST} more" if len(problems) > _MOST else ""
        raise WeightsError(
            f"the files at {path} do not fit the model, and nothing was changed:\n  " + "\n  ".join(problems[:_MOST]) + more + "\n"
            "Build the model as the files have it (model.to(dtype) for a dtype), or convert them: Weights(path, cast=True) converts dtypes"
        )
    return found


def _renaming(model: nn.Module, names: set[str], entries: Mapping[str, Entry]) -> Any:
    """From the model's names to those in the files: the same, or without or with transformers' prefix of a base model."""
    prefix = getattr(model, "base_model_prefix", "")
    choices = [lambda name: name]
    if isinstance(prefix, str) and prefix:
        choices += [lambda name: name.removeprefix(f"{prefix}."), lambda name: f"{prefix}.{name}"]
    return max(choices, key=lambda choice: sum(choice(name) in entries for name in names))


def _renamed(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The names in the files by those that transformers would give them as it loads `model`."""
    mapping = getattr(sys.modules.get("transformers.conversion_mapping"), "get_model_conversion_mapping", None)
    if mapping is None or not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return {name: name for name in names}
    renamings = [each for each in mapping(model) if not hasattr(each, "operations")]
    found: dict[str, str] = {}
    for name in names:
        new = name
        for each in renamings:
            new, _ = each.rename_source_key(new)
        found[new] = name
    return found if len(found) == len(names) else {name: name for name in names}


def _is_ignored(model: nn.Module, attribute: str, name: str) -> bool:
    """Whether transformers' model says that this name may be missing, or superfluous."""
    return any(re.search(pattern, name) for pattern in getattr(model, attribute, None) or ())


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

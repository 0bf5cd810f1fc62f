"""Models by what a command line says of them: a configuration of Hugging Face's transformers, or a function of somebody's package."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError

Example = Mapping[str, Any] | tuple[Any, ...]
_HERE = str(Path(__file__))
# Samples of the batch that is captured: amounts are read off by the sample.
NUM_SAMPLES = 2


def load_model(spec: str, length: int | None) -> tuple[nn.Module, Example]:
    """The model on meta, and a batch.

    "config.json"              of a causal language model in transformers; batches are ids and labels of `length` tokens
    "package.module:function"  gives a model, or a model and its batch, which has two samples or more; called with the length where one
                               was given

    Raises `InputError` for what is neither.
    """
    with torch.device("meta"):
        if ":" in spec and not Path(spec).exists():
            return _of_function(spec, length)
        return _of_config(Path(spec), length)


def batch_dims_of_text(text: str | None) -> int | dict[str, int | None] | None:
    """As `autopar.compile` takes it: "1" is of all inputs, "src=1,labels=0,mask=none" by name. Raises `InputError`."""
    if text is None:
        return None
    if _is_number(text):
        return int(text)
    found: dict[str, int | None] = {}
    for part in text.split(","):
        name, _, dim = (each.strip() for each in part.partition("="))
        if not name or name in found or not (_is_number(dim) or dim == "none"):
            why = f"{name} is there twice" if name in found else f"{part.strip()!r} is no input and its dim"
            raise InputError(f"--batch-dims {text}: {why}; write 1, the dim of all inputs, or src=1,labels=0,mask=none")
        found[name] = None if dim == "none" else int(dim)
    return found


def _is_number(text: str) -> bool:
    return text.strip().removeprefix("-").isdigit()


def _of_config(path: Path, length: int | None) -> tuple[nn.Module, Example]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--model {path}: {error.strerror}; pass a config.json of transformers, or package.module:function") from None
    except ValueError as error:
        raise InputError(f"--model {file} is no JSON: {error}") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise InputError(
            f"--model {file} is no configuration of transformers, which names its model_type; pass one, or package.module:function"
        )
    if length is None:
        raise InputError(
            f"how long are the samples? Pass --seq-len (the model of {file} takes {values.get('max_position_embeddings', 'any')})"
        )
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise InputError(f"--model {file} wants the package transformers, which is not installed; pass package.module:function") from None
    try:
        config: Any = AutoConfig.for_model(values.pop("model_type"), **values)
        config.use_cache = False
        model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a foreign configuration does
        known, told = values.get("architectures") or "nothing", " ".join(str(error).split())[:160]
        raise InputError(
            f"--model {file} is no causal language model of transformers (it names {known}); for others pass package.module:function, "
            f"which gives a model and a batch. transformers says: {told}"
        ) from None
    ids = torch.zeros(NUM_SAMPLES, length, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def _of_function(spec: str, length: int | None) -> tuple[nn.Module, Example]:
    package, _, name = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(package), name)
        made = function() if length is None else function(length)
    except Exception as error:  # whatever foreign code does
        raise InputError(f"--model {spec}: {_told(error, package)}") from error
    finally:
        sys.path.remove(os.getcwd())
    return _with_batch(spec, made, length)


def _told(error: Exception, package: str) -> str:
    """What went wrong in whose line; of a package that is not there that alone."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None and package.startswith(error.name):
        return f"{error}; name a function that Python finds from here, package.module:function"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((_HERE, "<"))]
    frames = [frame for frame in frames if "importlib" not in frame.filename]
    if not frames:
        return str(error)
    first = f"{error}".strip().splitlines()[:1]
    return f"{type(error).__name__}{f': {first[0][:200]}' if first else ''}, at {frames[-1].filename}:{frames[-1].lineno}"


def _with_batch(spec: str, made: Any, length: int | None) -> tuple[nn.Module, Example]:
    match made:
        case nn.Module():
            if length is None:
                raise InputError(f"--model {spec} gives a model without a batch: return both, or pass --seq-len for a language model")
            ids = torch.zeros(NUM_SAMPLES, length, dtype=torch.int64)
            return made, {"input_ids": ids, "labels": ids}
        case (nn.Module() as model, dict() | tuple() as batch):
            return model, batch
        case _:
            raise InputError(f"--model {spec} gives a {type(made).__name__}: return a model, or a model and a batch (a dict or a tuple)")

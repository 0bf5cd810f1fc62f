"""From an exception of `torch.export` to an error for users: what is wrong, where in their source, how to fix it; torch's text last."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass

from torch import nn

from autopar.errors import CaptureError
from autopar.frontend._torch import HOOKS_ARE_FUNCTIONS
from autopar.ir.keys import Source
from autopar.ir.source import is_library, user_frames

# Of torch's own text so much is shown.
_MOST_CHARACTERS = 400
# These report each failure of a trace, whoever handles it.
_LOUD = ("torch._subclasses.fake_tensor", "torch.export._trace", "torch._dynamo.variables.builder")


@dataclass(frozen=True)
class _Fault:
    """A known reason why a capture stops: `what` is wrong, and how to `mend` it.

    It is recognised by one of `words` and one of `also`, in torch's text or in the user's line that the text is about.
    """

    words: tuple[str, ...]
    what: str
    mend: str
    also: tuple[str, ...] = ("",)

    def fits(self, text: str) -> bool:
        return all(any(word.lower() in text.lower() for word in words) for words in (self.words, self.also))


_SIZES = "the size of a result depends on values"
_FAULTS = (
    _Fault(
        ("expert_hit",),
        "experts are visited one by one, by what their indices say",
        'model.set_experts_implementation("grouped_mm"), which sets config._experts_implementation, or "batched_mm", which copies an '
        "expert's weights for each token but splits over dp",
    ),
    _Fault(
        ("one of the inputs with type",),
        "an input is an object that is no structure of tensors",
        "pass tensors in tuples, lists, dicts or dataclasses known to torch.export.register_dataclass; an object that is the same in every "
        "call may be an attribute of the model",
    ),
    _Fault(
        ("DynamicCache", "register_pytree", "Encountered unrecognized type", "Generator reconstruction"),
        "the output holds an object that is no structure of tensors (a key-value cache, a generator)",
        "return tensors in tuples, lists, dicts or dataclasses; of transformers, set config.use_cache=False",
    ),
    _Fault(
        ("_pack_padded_sequence", "_pad_packed_sequence"),
        f"{_SIZES}: a packed sequence has as many rows as the lengths say",
        "leave the sequences padded: run the recurrent layer on them as they are, and mask its output by the lengths, with torch.where "
        "(a layer of one direction gives the same at all true positions; of the last state, gather the output at lengths - 1)",
    ),
    _Fault(
        ("on the same device", "two different devices"),
        "forward computes with a tensor on meta, which has no numbers, beside others that have some; weights= fills parameters and "
        "buffers alone",
        "make it where the others are (device=x.device); what a module holds as a plain attribute, register as a buffer: "
        "self.register_buffer('scale', scale), with persistent=False where no file has it",
        also=("and meta", "meta and", ", meta", "meta, "),
    ),
    _Fault(
        ("ignore_fresh_unbacked",),  # what while_loop itself raises where it has gradients
        "forward calls while_loop, an op of torch's with graphs of its own, which autopar does not rewrite",
        "step through a loop of a known length in Python, for step in range(n), and keep what is done by torch.where(is_done, h, next_h)",
    ),
    _Fault(
        ("FlexAttention does not",),
        "flex_attention has graphs of its own, which autopar does not rewrite",
        "call F.scaled_dot_product_attention with attn_mask=, or write it in plain ops, softmax(q @ k.mT * scale + bias) @ v: they are "
        "split, and fused where there is a kernel",
    ),
    _Fault(
        ("_ctc_loss",),
        f"{_SIZES}: torch.nn.functional.ctc_loss lays out its table by the longest target",
        "let the model return log_probs and compute the loss outside: without a loss in the model, the gradient of the loss outside "
        "comes back through its output (pp = 1)",
    ),
    _Fault(
        ("aten.bincount",),
        f"{_SIZES}: torch.bincount has as many counts as the largest value says",
        "write torch.bincount(x, minlength=n) with the number of classes; that no value is larger is then asserted when it runs",
    ),
    _Fault(
        ("aten.repeat_interleave",),
        f"{_SIZES}: repeat_interleave is as long as its repeats add up to",
        "repeat by a plain number, or pick the rows with index_select, by indices computed before the call",
    ),
    _Fault(
        ("DynamicOutputShape", "nonzero"),
        f"{_SIZES} (a boolean index, nonzero, unique)",
        "keep the shape and mask with torch.where: torch.where(mask, x, 0).sum() / mask.sum() for x[mask].mean(), "
        "y = torch.where(mask[..., None], f(x), y) for y[mask] = f(x[mask]); a mask that forward makes of torch.arange, torch.eye and "
        "literals alone may index; of one in a buffer keep the places: register_buffer('places', mask.nonzero().squeeze(1)), then "
        "x[:, self.places]",
    ),
    _Fault(
        (
            "`<unknown module>.Random.",
            "`Random.",
            "RandomValueSource",
            "of class `Generator`",
            "Could not guard on data-dependent expression zuf",
            "np.random",
            "numpy.random.",
            "random.random",
        ),
        "forward draws numbers by Python's or numpy's random, which a captured program would repeat at every call",
        "draw by torch.rand, randint or bernoulli (keyed by seed, step and position), choose by torch.where, or draw before the call and "
        "pass a tensor in",
    ),
    _Fault(
        ("torch._C.Generator", "An opaque object was created", "manual_seed", "urandom"),
        "forward has a random generator or seed of its own, which a captured program cannot have",
        "leave both out: torch's draws are keyed by torch.initial_seed(), step and position",
    ),
    _Fault(
        ("`time.", "`<unknown module>.datetime", "datetime.now", "time.time("),
        "forward reads the clock, which a captured program would read once",
        "measure around the call, or pass a tensor in",
    ),
    _Fault(
        (
            "autograd.grad",
            "torch.func.grad",
            "torch.func.vjp",
            "torch.func.jvp",
            " jvp(",
            "torch.func.jac",
            "vmap(grad",
            "element 0 of tensors does not require grad",
            ".backward(",
        ),
        "forward differentiates inside itself (a gradient penalty, forces, .backward()), and a captured forward has no backward inside",
        "write the derivative out, or compare outputs at two inputs, (f(x + h * v) - f(x)) / h; outside of forward no input has a gradient",
    ),
    _Fault(
        ("referenced nonexistent value",) if HOOKS_ARE_FUNCTIONS else (),
        "a hook on a gradient reads what forward computes, which torch before 2.13 cannot trace",
        "write a torch.autograd.Function that returns x.clone() and whose backward does what the hook does, or install torch 2.13",
    ),
    _Fault(
        ("assert ",),
        "this assert cannot be kept for the run: its text, or more of its condition than one tensor, reads a value",
        "write `assert (...).all()` with a constant text: `assert (~bad).all()` for `assert not bad.any()`",
        ("DataDependent", "data-dependent"),
    ),
    _Fault(
        ("one_hot(",),
        "torch.nn.functional.one_hot reads its values to learn how many classes there are",
        "say how many: one_hot(x, num_classes)",
        ("DataDependent",),
    ),
    _Fault(
        ("DataDependent", "data-dependent", "Dynamic control flow", "item()", "FakeTensor.__format__"),
        "forward reads the value of a tensor (a branch, .item(), .tolist(), an f-string), which no graph knows",
        "write it with torch.where, or decide it before the call; x[:, i], where i is a tensor without dims, is read too: "
        "x.index_select(1, i.view(1)).squeeze(1) is not; x[:, i : i + n] (a queue, from its pointer on) is "
        "x[:, i + torch.arange(n)], where it is written, too; a branch that only raises is checked in every call as an assert: "
        "assert (a | b).all(), 'text' for if not a and not b: raise ValueError(text)",
    ),
    _Fault(
        # So torch.export ends where a parameter is none of the module's that it exports: by its name for what it has found.
        ("KeyError'L__self__", "KeyError'self__", "KeyError'G__"),
        "forward computes with a parameter that is none of the model's: the module that has it is no submodule (it stands in a list, a "
        "tuple, a dict, a closure or a global)",
        "assign that module in __init__ (self.teacher = teacher; several in an nn.ModuleList), with teacher.requires_grad_(False) where it "
        "is not to be trained; a parameter alone is assigned as one, several in an nn.ParameterList",
    ),
    _Fault(
        ("sparse_coo_tensor(", "sparse_csr_tensor("),
        "forward makes a sparse tensor, of which nothing is known that could be split",
        "compute with its indices and values: torch.zeros_like(h).index_add(0, rows, values[:, None] * h[columns])",
        ("Unsupported", "skipped"),
    ),
    _Fault(
        ("_apply(): Couldn't swap",),
        "forward moves or casts a module (.to(...), .half(), .cuda()), which makes its parameters anew",
        "do it before autopar.compile, and leave the line out where the module is there already; cast tensors, not modules",
    ),
    _Fault(
        ("torch.nn.Parameter()",),
        "forward makes a parameter",
        "make it in __init__, where optimizers find it",
    ),
    _Fault(
        ("numpy", "np."),
        "forward leaves torch for numpy",
        "write it with torch's functions, or move it out of forward",
    ),
    _Fault(
        ("logging", "print("),
        "forward logs what a graph does not know",
        "move it out of forward, or log shapes alone",
    ),
    _Fault(
        ("functorch",),
        "a transform of torch.func (vmap, grad, jacrev) runs over a module with parameters of its own",
        "give it a function of tensors alone (torch.func.functional_call), or write the extra dim out",
    ),
    _Fault(
        ("retain_grad",),
        "a value inside has no gradient of its own in the program",
        "return it, and use autograd on the original, or register a hook on it",
    ),
    _Fault(
        ("backwards hooks",),
        "backward hooks of modules are not traced",
        "in forward, register_hook on the value itself, or hooks on parameters before the call",
    ),
    _Fault(
        ("hook removal",),
        "a hook that forward registers cannot be removed by it",
        "register it only where it is wanted",
    ),
    _Fault(
        ("checkpoint_sequential",),
        "torch.utils.checkpoint.checkpoint_sequential is no region that torch traces",
        "call torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False) on each part, in a loop",
    ),
    _Fault(
        ("graph break", "Unsupported", "skipped", "custom C"),
        "this line leaves the graph (I/O, a foreign library, an unsupported call)",
        "move it out of forward, or make it an op that torch knows (torch.library.custom_op, with register_fake and register_autograd)",
    ),
)
_PLAIN = "the model must run as plain tensor code on inputs of these shapes"
_ALONE = (
    "call the model alone on inputs of these shapes, dtypes and devices: if it fails there, too, mend it there; else write this line in "
    "plain tensor code"
)
_CAUGHT = "where forward catches the error (try, except), decide by the shapes instead"
_OTHERWISE = (
    "where it runs alone, it does another thing when it is traced (by torch.compiler.is_compiling(), often in a library), and "
    "torch.compile(model, fullgraph=True) fails as it does here"
)
_NO_VIEW = re.compile("Cannot view a tensor|view size is not compatible")
_RESHAPE = "write .reshape(...) in place of .view(...); a program takes inputs row by row, also where they are given with other strides"
_ARGUMENTS = "example_inputs, and each call, must have the arguments of forward: a dict has them by name, a tuple by place"
# What a model's own code raises when a call does not fit it, traced or not.
_OWN_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, NameError, ImportError, AssertionError, OSError)
# What torch adds, with a traceback, to the text of whatever is raised while it runs a graph of Dynamo's.
_TRACED_AT = "\n\nWhile executing "
# In Dynamo's words, what the model raised: `got RuntimeError('mat1 and mat2 ...')`.
_RAISED = re.compile(r"got (?P<kind>\w+)\((?P<quote>['\"])(?P<text>.*?)(?P=quote),?\)", re.DOTALL)
# So where nothing in forward caught it; torch says what it was among its notes for developers.
_UNCAUGHT = re.compile(_RAISED.pattern.replace("got ", r"raised exception "), re.DOTALL)


@contextlib.contextmanager
def explained(model: nn.Module) -> Generator[None]:
    """Turn what Dynamo or the model raises while it is traced into a `CaptureError`; one of our own, raised there, is told its line."""
    loggers = [logging.getLogger(name) for name in _LOUD]
    were_disabled = [log.disabled for log in loggers]
    for log in loggers:
        log.disabled = True
    try:
        yield
    except CaptureError as error:
        what, traced, _ = str(error).partition(_TRACED_AT)
        if not traced:
            raise
        what, *mend = what.splitlines()
        raise CaptureError("\n".join([what, *(f"  {where}" for where in _where(model, _frames(error))), *mend])) from error
    except Exception as error:
        raise CaptureError(_explanation(model, error)) from error
    finally:
        for log, was_disabled in zip(loggers, were_disabled, strict=True):
            log.disabled = was_disabled


def _explanation(model: nn.Module, error: Exception) -> str:
    said, places, name = _said(error), _frames(error), type(model).__name__
    caught = _RAISED.search(said)
    uncaught = _UNCAUGHT.search(str(error)) if caught is None and said.startswith("Observed exception") else None
    raised = caught or uncaught
    if raised is not None:
        what = f"this line of {name} fails on these inputs: {raised['kind']}: {_shortened(raised['text'])}"
        return _message(what, model, places, f"{_ALONE}; {_CAUGHT if uncaught is None else _OTHERWISE}")
    codes = "".join(place.code for place in places[-2:])
    fault = next((fault for fault in _FAULTS if fault.fits(type(error).__name__ + said + codes)), None)
    said = f"{type(error).__name__}: {_shortened(said)}"
    if fault is not None:
        return _message(f"{name} cannot be captured as one graph: {fault.what}", model, places, fault.mend, said)
    if isinstance(error, _OWN_ERRORS) and not type(error).__module__.startswith("torch._dynamo"):
        is_missing = isinstance(error, TypeError) and "argument" in said
        mend = _ARGUMENTS if is_missing else _RESHAPE if _NO_VIEW.search(said) else _ALONE
        return _message(f"{name} fails on these inputs: {said}", model, places, mend)
    return _message(f"{name} cannot be captured as one graph", model, places, _PLAIN, said)


def _message(what: str, model: nn.Module, places: list[Source], mend: str, said: str = "") -> str:
    return "\n  ".join([what, *_where(model, places), f"how to mend it: {mend}", *([f"torch says: {said}"] if said else [])])


def _said(error: Exception) -> str:
    """What torch says, without the stacks, hints and addresses that follow it."""
    text = str(error).split("\nfrom user code")[0].split("\nUser Stack")[0].strip()
    return re.split(r"\n\s*(?:Hint:|Developer debug context|For more details|For more information|consider using)", text)[0]


def _shortened(text: str) -> str:
    """The beginning of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " …"


def _frames(error: Exception) -> list[Source]:
    """The lines outside of torch and of this package that the error passed through, outermost first."""
    stack = getattr(error, "real_stack", None)  # Dynamo's own record, where its text has none
    texts: tuple[Callable[[], str], ...] = (
        lambda: str(error),
        lambda: "".join(traceback.format_list(stack)) if stack else "",
        lambda: "".join(traceback.format_tb(error.__traceback__)),
    )
    return next((frames for text in texts if (frames := user_frames(text()))), [])


def _where(model: nn.Module, places: list[Source]) -> list[str]:
    """The innermost line of the user's own, and below it that of the library which it calls; of a library's model the latter alone."""
    own = [place for place in places if not is_library(place.file)]
    inner = [place for place in places if "site-packages" in place.file]
    if own and inner and places.index(inner[-1]) > places.index(own[-1]):
        return [f"where: {own[-1].at}", f"inside: {inner[-1].at}"]
    if own or inner:
        return [f"where: {(own or inner)[-1].at}"]
    return [f"where: {_definition(model)}"]


def _definition(model: nn.Module) -> str:
    """Where a model's forward begins, for want of a line of it."""
    try:
        lines, first = inspect.getsourcelines(type(model).forward)
        return f"in {inspect.getsourcefile(type(model).forward)}:{first}  {lines[0].strip()}"
    except (OSError, TypeError):
        return f"in {type(model).__name__}.forward"

"""What cannot be captured, in the user's words: how to mend what Dynamo raises."""

from __future__ import annotations

# Words of which one is in what Dynamo says or in the user's line, and what they mean. The first that fits is told.
_KNOWN = (
    (
        (
            "`<unknown module>.Random.",
            "`Random.",
            "RandomValueSource",
            "of class `Generator`",
            "np.random.",
            "numpy.random.",
            "random.random(",
        ),
        "forward draws numbers by Python's or numpy's random, which a captured program would repeat at every call; draw by torch.rand, "
        "randint or bernoulli (keyed by seed, step and position), choose by torch.where, or draw before the call and pass a tensor in",
    ),
    (
        ("torch._C.Generator", "`manual_seed`", "urandom"),
        "forward has a random generator or seed of its own, which a captured program cannot have; leave both out: torch's draws are keyed "
        "by torch.initial_seed(), step and position",
    ),
    (
        ("`time.", "`<unknown module>.datetime", "datetime.now", "time.time("),
        "forward reads the clock, which a captured program would read once; measure around the call, or pass a tensor in",
    ),
    (
        ("autograd.grad", "torch.func.grad", "torch.func.vjp", "torch.func.jac", "functorch tensor"),
        "forward differentiates (a gradient penalty, forces), and a captured forward has no backward inside; write the derivative out, or "
        "compare outputs at two inputs, (f(x + h * v) - f(x)) / h",
    ),
)
_HINTS = (
    (
        ("expert_hit",),
        'experts are visited one by one, by what their indices say: model.set_experts_implementation("grouped_mm"), which sets '
        'config._experts_implementation, or "batched_mm", which copies an expert\'s weights for each token but splits over dp',
    ),
    (
        ("DynamicCache", "pytree"),
        "the output holds an object that is no tensor structure (a key-value cache): set config.use_cache=False, or return tensors only",
    ),
    (
        ("DataDependent", "data-dependent", "Dynamic control flow", "item()"),
        "forward reads the value of a tensor (a branch, .item(), .tolist()); write it with torch.where, or decide it before the call",
    ),
    (
        ("DynamicOutputShape", "nonzero"),
        "the shape of a result depends on values (a boolean index, nonzero, unique); keep the shape and mask with torch.where",
    ),
    (
        ("graph break", "Unsupported", "skip", "numpy"),
        "this line leaves the graph (I/O, a foreign library, an unsupported call); move it out of forward",
    ),
)


def hint_for(text: str) -> tuple[str, bool]:
    """How to mend what raised `text`, and whether that says all there is to say: then Dynamo's explanation is noise."""
    for hints, is_known in ((_KNOWN, True), (_HINTS, False)):
        for words, hint in hints:
            if any(word.lower() in text.lower() for word in words):
                return hint, is_known
    return "the model must run as plain tensor code on inputs of these shapes", False

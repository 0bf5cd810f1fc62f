"""The training loop that the examples share: plain PyTorch, with autopar behind the call of the model."""

from __future__ import annotations

import inspect
import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from checkpointing import Checkpoints
from options import Options, parse
from place import Place, choose_backend, find_place
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from text import Windows, read_text
from torch import Tensor, nn

import autopar


@dataclass(frozen=True)
class Example:
    """What is trained: a model made from the options, and its arguments made from windows int64 [B, length + 1]."""

    title: str
    build_model: Callable[[Options], nn.Module]
    make_batch: Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Step:
    """One line of the log; the loss is the global batch's, in nats a byte."""

    step: int
    loss: float
    seconds: float


def train(example: Example, arguments: list[str] | None = None) -> list[Step]:
    """Run the example with these command-line arguments (default: the process's own)."""
    options = parse(example.title, arguments)
    place = find_place(options)
    console = Console(quiet=not place.prints)
    _show_log(console)

    torch.manual_seed(options.seed)
    model = example.build_model(options).to(place.device)
    text = read_text(options.text)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"training {example.title} of {num_parameters / 1e6:.1f} million parameters on {len(text) / 1e6:.1f} MB of text")
    console.print(f"on {place.description}", highlight=False)

    windows = Windows(text, options.batch, options.length + 1, options.seed, options.epoch)
    parallel = None
    if not options.single:
        parallel = _parallelise(example, options, place, model, console)
    steps = _loop(example, options, place, model if parallel is None else parallel, windows, console)

    if steps and steps[-1].step + 1 < options.steps:  # by a signal, which may not wait
        _leave()
        return steps
    state = model.state_dict() if parallel is None else parallel.full_state_dict()  # every rank takes part
    if parallel is not None:
        console.rule("what autopar decided (parallel.explain())")
        console.print(parallel.explain(), markup=False, highlight=False, soft_wrap=True)
    if place.prints and options.sample:
        reader = example.build_model(options)
        reader.load_state_dict(state)
        console.rule("a sample of what it learned")
        console.print(write_text(reader.eval(), "import ", options), markup=False, highlight=False)
    _leave()
    return steps


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _parallelise(example: Example, options: Options, place: Place, model: nn.Module, console: Console) -> autopar.ParallelModule:
    backend, reason = choose_backend(options.backend)
    if reason:
        console.print(reason, style="yellow")
    started = time.perf_counter()
    windows = torch.zeros(options.batch, options.length + 1, dtype=torch.int64)
    # A virtual mesh would be planned for free links; here virtual and real ranks shall take the same decisions.
    cluster = "cpu" if place.device.type == "cpu" else None
    example_inputs = place.share(example.make_batch(windows))
    parallel = autopar.compile(
        model,
        place.mesh,
        example_inputs=example_inputs,
        backend=backend,
        cluster=cluster,
        precision=options.precision,
        zero=options.zero or None,
        optimizer=lambda parameters: make_optimizer(parameters, options),
        train_step=autopar.TrainStep(clip_grad_norm=options.clip, accumulate=options.accumulate),
    )
    console.print(f"captured, planned and lowered in {time.perf_counter() - started:.1f} s", highlight=False)
    return parallel


def _loop(example: Example, options: Options, place: Place, model: Any, windows: Windows, console: Console) -> list[Step]:
    """`options.steps` batches through `model`, a plain module or a ParallelModule, whose step is one call."""
    optimizer = make_optimizer(model.parameters(), options) if options.single else model.optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: _learning_rate(update * options.accumulate, options))
    steps: list[Step] = []
    checkpoints = Checkpoints(options, None if options.single else model, windows, schedule)
    done = checkpoints.resume()
    if options.resume:
        console.print(f"going on after step {done - 1}" if done else f"there is no checkpoint in {options.save}: this is a new run")
    with ExitStack() as stack:
        stack.callback(checkpoints.end)
        progress = stack.enter_context(_progress(console))
        log = stack.enter_context(options.losses.open("a" if done else "w")) if options.losses and place.prints else None
        task = progress.add_task("training (the first step compiles)", total=options.steps, completed=done, loss=math.nan, speed=0.0)
        for number in range(done, options.steps):
            started = time.perf_counter()
            batch, updates = place.share(example.make_batch(windows.draw())), (number + 1) % options.accumulate == 0
            output = _plain_step(model, optimizer, batch, options, updates) if options.single else model.train_step(**batch)
            loss = getattr(output, "loss", output)  # transformers returns a structure, our GPT the loss alone
            if updates:
                schedule.step()
            steps.append(Step(number, loss.item(), time.perf_counter() - started))
            _report(steps, options, progress, task)
            if log:
                print(json.dumps(asdict(steps[-1])), file=log, flush=True)
            if heard := checkpoints.after(number + 1, updates):
                console.print(f"ended by {heard} after step {number}; --resume goes on from {options.save}")
                break
    return steps


def make_optimizer(parameters: Iterable[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    """Of the class that was asked for, which loops over all parameters at once where it can."""
    kind = getattr(torch.optim, options.optimizer)
    at_once = {"foreach": True} if "foreach" in inspect.signature(kind).parameters else {}
    return kind(parameters, lr=options.learning_rate, **at_once)


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], options: Options, updates: bool) -> Any:
    """What `train_step` does, in plain PyTorch."""
    with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bf16"):
        output = model(**batch)
    (getattr(output, "loss", output) / options.accumulate).backward()
    if updates:
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
    return output


def _learning_rate(step: int, options: Options) -> float:
    """A factor: up in a straight line, then down to a tenth along a cosine."""
    if step < options.warmup:
        return (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * done)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


def _report(steps: list[Step], options: Options, progress: Progress, task: Any) -> None:
    last = steps[-1]
    warm = steps[1:] or steps  # the first step compiles
    speed = options.batch * options.length * len(warm) / sum(step.seconds for step in warm)
    progress.update(task, advance=1, loss=last.loss, speed=speed, description="training")
    if last.step % 25 == 0 or last.step == options.steps - 1:
        progress.console.print(f"step {last.step:4d}   loss {last.loss:.4f}   {speed:8,.0f} tokens/s", highlight=False)


def _show_log(console: Console) -> None:
    """autopar logs one line a pass; show them above the progress bar."""
    logger = logging.getLogger("autopar")
    logger.handlers = [RichHandler(console=console, show_time=False, show_level=False, show_path=False)]
    logger.setLevel(logging.INFO)


@torch.no_grad()
def write_text(model: nn.Module, prompt: str, options: Options) -> str:
    """`options.sample` bytes drawn from the model after `prompt`, at temperature 0.7."""
    generator = torch.Generator().manual_seed(options.seed)
    written = torch.tensor(list(prompt.encode()))
    for _ in range(options.sample):
        output = model(written[None, -options.length :])
        logits = getattr(output, "logits", output)[0, -1]
        following = torch.multinomial(torch.softmax(logits / 0.7, dim=-1), 1, generator=generator)
        written = torch.cat([written, following])
    return bytes(written.tolist()).decode(errors="replace")

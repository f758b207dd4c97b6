"""What is shown on standard error of what takes long: bars on a terminal, else a line now and then."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from argosy import spec
from argosy.plan import flops

Told = Callable[[int, dict[str, float]], None]  # of (finished updates, metrics of the last)

EVERY_S = 15.0  # between lines where there is no terminal


def note(row: dict[str, float]) -> str:
    return (
        f"loss {row['train/loss']:.3f}  {row['throughput/tokens_per_second']:,.0f} tokens/s"
        f"  drops {100 * row['moe/drop_fraction']:.1f}%"
    )


def bars() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("[green]{task.fields[count]}"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(compact=True),
    )
    return Progress(*columns, console=Console(stderr=True))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """A function that says what is being done: one line that changes on a terminal, else one every five seconds at the most.

    Meanwhile, imports of what does it included, SIGTERM interrupts as Ctrl-C does, so that nothing is left half-written.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ValueError):  # not the main thread: signals are somebody else's
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        if sys.stderr.isatty():
            yield stack.enter_context(Console(stderr=True, highlight=False).status("")).update
            return
        last = time.monotonic()

        def now_and_then(text: str) -> None:
            nonlocal last
            if time.monotonic() - last > 5:
                last = time.monotonic()
                say(text)

        yield now_and_then


@contextlib.contextmanager
def of_run(run: spec.Run, at: int) -> Iterator[Told]:
    """A function of (step, row) that shows a run that begins after `at` updates."""
    total = spec.steps(run)
    if sys.stderr.isatty():
        with bars() as bar:
            task = bar.add_task("training", total=total, completed=at, count=f"{at:,}/{total:,}", note="compiling")

            def draw(step: int, row: dict[str, float]) -> None:
                bar.update(task, completed=step, count=f"{step:,}/{total:,}", note=note(row))

            yield draw
        return
    last = -1e9
    say(f"training: {at:,} of {total:,} updates finished; compiling")

    def line(step: int, row: dict[str, float]) -> None:
        nonlocal last
        if step == total or time.monotonic() - last > EVERY_S:
            last = time.monotonic()
            say(f"{step:,}/{total:,}  {note(row)}")

    yield line


Show = Callable[[spec.Run, int], contextlib.AbstractContextManager[Told]]


@contextlib.contextmanager
def of_several(runs: Mapping[str, spec.Run], left: Sequence[str], whole: str, one: str) -> Iterator[Callable[[str], Show]]:
    """What shows a run of several by its name, as `of_run` does, under a bar of them all: which, and the share of all FLOPs.

    `left` are those that are not finished, in the order in which they are trained; `whole` and `one` are what people call
    all of them and one of them, e.g. ladder and rung.
    """
    cost = {name: float(spec.steps(run) * flops.train_step(run, readout=True)) for name, run in runs.items()}
    every, finished = sum(cost.values()), sum(n for name, n in cost.items() if name not in left)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(bars()) if sys.stderr.isatty() else None
        ladder = bar.add_task(whole, total=every, completed=int(finished), count="", note="") if bar else None

        @contextlib.contextmanager
        def show(name: str, run: spec.Run, at: int) -> Iterator[Told]:
            nonlocal finished
            total, last = spec.steps(run), -1e9
            place = f"{one} {len(runs) - len(left) + 1 + list(left).index(name)} of {len(runs)}"

            def share(step: int) -> str:
                return f"{(finished + cost[name] * step / total) / every:.1%} of the {whole}'s FLOPs"

            task = None
            if bar is not None and ladder is not None:
                task = bar.add_task(name, total=total, completed=at, count=f"{at:,}/{total:,}", note="compiling")
                bar.update(ladder, completed=finished + cost[name] * at / total, count=place, note=share(at))
            else:
                say(f"{place}, {name}: {at:,} of {total:,} updates finished; {share(at)}; compiling")

            def tell(step: int, row: dict[str, float]) -> None:
                nonlocal last
                if bar is not None and task is not None and ladder is not None:
                    bar.update(task, completed=step, count=f"{step:,}/{total:,}", note=note(row))
                    bar.update(ladder, completed=finished + cost[name] * step / total, note=share(step))
                elif step == total or time.monotonic() - last > EVERY_S:
                    last = time.monotonic()
                    say(f"{place}, {name}: {step:,}/{total:,}  {note(row)}  {share(step)}")

            yield tell
            finished += cost[name]
            if bar is not None and task is not None:
                bar.remove_task(task)

        yield lambda name: partial(show, name)

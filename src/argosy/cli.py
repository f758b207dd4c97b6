"""The command line. Each command is one function; what it prints as a table it also prints with `--json`."""

import json as jsonlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, UseAppendAction, arg
from tyro.extras import SubcommandApp

from argosy import progress, runs, spec
from argosy.launch import join
from argosy.plan.ladder import Rung

Name = Annotated[str, Positional]
Settings = Annotated[UseAppendAction[tuple[str, ...]], arg(name="set", metavar="KEY=VALUE")]
As = Annotated[str, arg(name="as", metavar="RUN")]
Json = Annotated[bool, FlagCreatePairsOff, arg(name="json", help="Print JSON alone.")]
Home = Annotated[Path, arg(help="Where runs and corpora live (or ARGOSY_HOME).")]
Every = Annotated[float, arg(help="Seconds between checkpoints.")]
Flag = Annotated[bool, FlagCreatePairsOff]
Linked = Annotated[join.Link, OmitArgPrefixes]
ALONE = join.Link()

HOME = Path(os.environ.get("ARGOSY_HOME") or "voyages")

app = SubcommandApp()
data = SubcommandApp()
app.command(data, name="data", help="Make corpora.")
forecast = SubcommandApp()
app.command(forecast, name="forecast", help="From small runs to a large one, with bands.")
ladder = SubcommandApp()
app.command(ladder, name="ladder", help="Small runs of the hero's recipe: plan, train, check them.")
scaling = SubcommandApp()
app.command(scaling, name="scaling", help="Learning-rate rules from sweeps.")
launch = SubcommandApp()
app.command(launch, name="launch", help="Start several processes.")


def resolve(recipe: str, settings: Sequence[str], seed: int | None) -> spec.Run:
    """A recipe with the command line's overrides."""
    run = spec.override(runs.find(recipe), settings)
    return run if seed is None else replace(run, seed=seed)


def run_name(recipe: str, given: str) -> str:
    """What a run is called: `--as`, or after its recipe (a file's function after the file).

    Raises:
        ValueError: for a name that would not be one folder.
    """
    path, _, function = recipe.rpartition(":")
    name = given or (f"{Path(path).stem}-{function}" if path.endswith(".py") else recipe.replace("/", "-"))
    if name in (".", "..") or any(c in name for c in "/\\\0") or name.startswith((".", "-")) or len(name) > 100:
        raise ValueError(f"--as {name!r} must be a plain folder name, at most 100 characters; e.g. {recipe.split('/')[0]}-2")
    return name


def emit(body: Any) -> None:
    """JSON, and nothing else, on standard output."""
    print(jsonlib.dumps(body, indent=2, allow_nan=False, default=str))


def console() -> Console:
    return Console(highlight=False)


@app.command
def voyage(
    recipe: Name,
    /,
    settings: Settings = (),
    as_: As = "",
    seed: int | None = None,
    ladder: Literal["climb", "skip"] = "climb",
    budget: str = "",
    stop_on: Literal["nothing", "off"] = "nothing",
    despite_no_go: Flag = False,
    home: Home = HOME,
    port: int = 8700,
    checkpoint_every: Every = 60.0,
    link: Linked = ALONE,
    json: Json = False,
) -> None:
    """The main job, whole: plan, data, ladder, check, forecast, register, train, judge, with a live page.

    Args:
        recipe: A recipe's name (pocket, marin-535b, ...) or file.py:function.
        settings: Override a field, e.g. data.seq_len=128.
        as_: Name of the run; after the recipe by default.
        seed: Seed of the run; the recipe's by default.
        ladder: climb trains the small runs that the forecast needs; skip trains without them.
        budget: Share of the run's FLOPs for a ladder that is proposed, e.g. 1%.
        stop_on: off ends the training when the run leaves its forecast for good.
        despite_no_go: Train although the ladder's check says NO-GO.
        port: First port to try for the page.
        link: Where this process belongs when the run has several.
    """
    from argosy import voyage as job

    run = resolve(recipe, settings, seed)
    host = spec.Host(home=home, name=run_name(recipe, as_), port=port, checkpoint_every_s=seconds(checkpoint_every))
    join.join(link)
    rungs: Sequence[Rung] = ()
    if ladder == "climb":
        try:
            rungs = runs.ladder(recipe, run, share(budget))
        except ValueError as refusal:
            raise ValueError(f"{refusal}; --ladder skip trains without a ladder") from None
    try:
        result = job.whole(run, host, rungs, stop_on=stop_on, despite_no_go=despite_no_go, as_json=json)
    except job.NoGo as refusal:
        fail(str(refusal), 3)
    if json and result is not None:
        emit(result)


@app.command
def train(
    recipe: Name,
    /,
    settings: Settings = (),
    as_: As = "",
    seed: int | None = None,
    home: Home = HOME,
    stop_after: int | None = None,
    stop_on: Literal["nothing", "off"] = "nothing",
    checkpoint_every: Every = 60.0,
    link: Linked = ALONE,
    json: Json = False,
) -> None:
    """The training alone; a second call goes on from the last checkpoint.

    Args:
        recipe: A recipe's name or file.py:function.
        settings: Override a field, e.g. data.seq_len=128.
        as_: Name of the run; after the recipe by default.
        seed: Seed of the run; the recipe's by default.
        stop_after: Stop, with a checkpoint, once this many updates of the run are finished.
        stop_on: off ends the training when the run leaves its registered forecast for good.
        link: Where this process belongs when the run has several.
    """
    from argosy import processes
    from argosy import voyage as job

    if stop_after is not None and stop_after < 1:
        raise ValueError(f"--stop-after {stop_after} counts finished updates; nearest legal 1")
    run = resolve(recipe, settings, seed)
    host = spec.Host(home=home, name=run_name(recipe, as_), checkpoint_every_s=seconds(checkpoint_every))
    join.join(link)
    job.begin(run, host, stop_after)
    job.train(run, host, stop_after, stop_on=stop_on)
    if processes.first():
        result = job.summary(host)
        emit(result) if json else job.show_summary(result, console())


def seconds(every: float) -> float:
    """`--checkpoint-every` as given.

    Raises:
        ValueError: below 0, or no number.
    """
    if not every >= 0:
        raise ValueError(f"--checkpoint-every {every} is in seconds, 0 for a checkpoint after every update; nearest legal 0")
    return every


@app.command
def new(file: Annotated[Path, Positional], /) -> None:
    """Write a commented recipe of your own.

    Args:
        file: The Python file to write, e.g. my_run.py; an existing file is left alone.
    """
    from argosy.runs import template

    if file.suffix != ".py":
        raise ValueError(f"argosy new {file}: a recipe is a Python file; nearest legal {file.with_suffix('.py')}")
    try:
        with file.open("x") as handle:
            handle.write(template.TEXT.format(file=file, name=file.stem))
    except FileExistsError:
        raise ValueError(f"{file} exists and is left as it is; choose another name") from None
    print(f"wrote {file}; try: argosy plan {file}:run")


@app.command
def plan(
    recipe: Annotated[str, Positional] = "",
    /,
    settings: Settings = (),
    seed: int | None = None,
    price: float | None = None,
    deadline: str | None = None,
    goodput: float | None = None,
    chip: str = "",
    chips: int = 0,
    days: float = 0.0,
    fit: Flag = False,
    drops_from: str = "",
    home: Home = HOME,
    json: Json = False,
) -> None:
    """Parameters, FLOPs, tokens, memory, time and money of a run, or a run that fits given chips and days.

    Args:
        recipe: A recipe's name or file.py:function; left out for the inverse.
        settings: Override a field, e.g. data.seq_len=8192.
        seed: Seed of the run.
        price: Price of a chip-hour, in your currency.
        deadline: Days from now, or a date like 2027-03-31: prints the slack.
        goodput: Share of wall-clock time spent in steps that count.
        chip: The inverse: propose a run for this chip ...
        chips: ... this many of them ...
        days: ... and this many days.
        fit: The fastest choices of memory that fit, and what each costs in time and bytes.
        drops_from: A run, by name or folder, whose logged loads say how alike the tokens of a document route.
    """
    from argosy.plan import cost, report, sheet
    from argosy.plan import fit as fitting
    from argosy.runs import propose

    if fit and (chip or chips or days or price or deadline or goodput or drops_from or not recipe):
        raise ValueError("argosy plan --fit takes a recipe and --set alone; e.g. argosy plan marin-535b --fit")
    if fit:
        choices = fitting.fit(resolve(recipe, settings, seed))
        emit(choices) if json else fitting.show(choices, console())
        if choices["nothing"]:
            sys.exit(1)
        return
    if chip or chips or days:
        if recipe or drops_from:
            raise ValueError(
                f"argosy plan {recipe or '--drops-from'} --chip: name a recipe, or --chip, --chips and --days, not both"
            )
        if settings or seed is not None or deadline is not None:
            raise ValueError(
                "argosy plan --chip proposes a whole run, whose deadline is --days: --set, --seed and --deadline are for a"
                " recipe; leave them out"
            )
        found = propose.propose(chip, chips, days, propose.GOODPUT if goodput is None else goodput, price=price)
        emit(found) if json else report.show_proposal(found, console())
        return
    if not recipe:
        raise ValueError(f"argosy plan needs a recipe ({', '.join(runs.RECIPES)}) or --chip, --chips and --days")
    share = cost.GOODPUT if goodput is None else goodput
    fitted = None
    if drops_from:
        from argosy.plan import drops
        from argosy.track import loads, log

        fitted = drops.refit(drops_from, *loads.logged(log.read(drops_from, home)))
    run = resolve(recipe, settings, seed)
    planned = sheet.plan(run, price=price, deadline=deadline, goodput=share, fitted=fitted)
    emit(planned) if json else report.show(planned, console())


@app.command
def rehearse(recipe: Name, /, settings: Settings = (), devices: int | None = None, json: Json = False) -> None:
    """The whole training step, compiled for the run's real mesh on this CPU, and its bytes and collectives audited.

    Nothing is allocated on any device. Exit status 1 if the audit finds a problem.

    Args:
        recipe: A recipe's name or file.py:function.
        settings: Override a field, e.g. routing.waves=2.
        devices: Rehearse on this many devices: more or fewer replicas, the same batch.
    """
    from argosy.launch import rehearse as rehearsal
    from argosy.launch import report

    run = resolve(recipe, settings, None)
    found = rehearsal.rehearse(run if devices is None else rehearsal.scaled(run, devices))
    emit(found) if json else report.show(found, console())
    if not found["ok"]:
        sys.exit(1)


@data.command
def build(
    inputs: Annotated[tuple[str, ...], Positional],
    /,
    name: str = "",
    force: Flag = False,
    tokenizer: Path | None = None,
    vocab: int = 4096,
    text_key: str = "text",
    home: Home = HOME,
    json: Json = False,
) -> None:
    """Make a corpus: read, deduplicate, hold out, train a tokenizer, store tokens, with a ledger.

    Args:
        inputs: "stdlib" for this Python's own library, or files and folders: .jsonl, .jsonl.gz, .txt, .py, .parquet ...
        name: The corpus's name; "stdlib" for the library.
        force: Rebuild a corpus that is there.
        tokenizer: A tokenizer.json to use in place of an own vocabulary.
        vocab: Size of the own vocabulary.
        text_key: The key of the text in JSON lines and parquet.
    """
    from argosy.data import prepare

    if not name:
        if inputs != (prepare.STDLIB,):
            raise ValueError(f"argosy data build {' '.join(inputs[:3])}: give the corpus a name, e.g. --name mine")
        name = prepare.STDLIB
    ledger = prepare.build(name, inputs, home, force=force, tokenizer=tokenizer, vocab=vocab, text_key=text_key)
    emit(ledger) if json else console().print(prepare.table(ledger))


@ladder.command(name="show")
def show_ladder(
    recipe: Name,
    /,
    settings: Settings = (),
    budget: str = "",
    run: Flag = False,
    as_: As = "",
    seed: int | None = None,
    home: Home = HOME,
    checkpoint_every: Every = 60.0,
    json: Json = False,
) -> None:
    """The rungs of a hero run, what each is for and what it costs; with --run they are trained: argosy ladder NAME.

    Args:
        recipe: The hero's recipe, by name or file.py:function.
        settings: Override a field of the hero, e.g. optim.lr_scale=1; its rungs take it too.
        budget: Propose rungs that cost this share of the hero's FLOPs, e.g. 1%; the recipe's own ladder, or 1%, by default.
        run: Train the rungs, one after another, from where they stopped; exit status 130 after a signal to stop.
        as_: Name of the hero; after the recipe by default. Its rungs are runs named after it.
        seed: Seed of the hero; the recipe's by default.
    """
    from argosy.judge import ladders
    from argosy.plan import ladder as planning
    from argosy.plan import ladder_report

    hero, name = resolve(recipe, settings, seed), run_name(recipe, as_)
    rungs = runs.ladder(recipe, hero, share(budget))
    body = planning.sheet(hero, rungs, runs.ladder_rule(recipe, hero, rungs, share(budget)))
    if not run:
        known = ladders.state(home, name) if ladders.path_of(home, name).is_file() else []
        emit({"name": name, **body, "state": known}) if json else ladder_report.show(body, console(), known)
        return
    from argosy import voyage as job

    ladders.save(home, name, hero, rungs)
    if all(rung["finished"] for rung in ladders.state(home, name)):
        print(f"all {len(rungs)} rungs of {name} were finished before", file=sys.stderr, flush=True)
    done = job.climb(name, rungs, spec.Host(home=home, name=name, checkpoint_every_s=seconds(checkpoint_every)))
    known = ladders.state(home, name)
    emit({"name": name, **body, "state": known}) if json else ladder_report.show(body, console(), known)
    if not done:
        print("argosy: stopped; the same command goes on from here", file=sys.stderr, flush=True)
        sys.exit(130)


def share(text: str) -> float | None:
    """`--budget` as given: 1% or 0.01; None for nothing.

    Raises:
        ValueError: when it is no number.
    """
    if not text:
        return None
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"--budget {text!r} is a share of the hero's FLOPs, e.g. --budget 1% or 0.01") from None


@ladder.command(name="check")
def check_ladder(name: Name, /, home: Home = HOME, json: Json = False) -> None:
    """GO, CAUTION or NO-GO before a hero is launched, with the evidence; exit status 3 on NO-GO.

    Growth of gradient and parameter norms by group, after warm-up, and how it changes with batch and width; the logits' scale;
    drops, router bias, rungs that are unfinished or off the trend, alarms of the fit. Limits are the reference run's where it gives one.

    Args:
        name: The hero whose ladder is checked, e.g. pocket; or one run.
    """
    with progress.telling() as say:
        from argosy.judge import check as checking

        found = checking.check(home, name, say)
    emit(found) if json else console().print(checking.show(found))
    if status := checking.EXIT[found["verdict"]]:
        sys.exit(status)


@forecast.command
def fit(
    name: Annotated[str, Positional] = "",
    /,
    points: Path | None = None,
    target: Path | None = None,
    method: str = "joint",
    tail_correction: float | None = None,
    home: Home = HOME,
    json: Json = False,
) -> None:
    """Forecast a hero from its ladder in the store, or rows of one table from another, with 50% and 90% bands.

    Args:
        name: The hero whose ladder is fitted; left out with --points and --target.
        points: CSV with run, metric, step, steps_total, tokens, tokens_per_step, active_params, total_params, flops, lr, value.
        target: CSV of the rows to forecast: the same columns without value.
        method: joint, per_fraction (the reference ladder's own) or schedule (learning-rate paths demanded).
        tail_correction: Of per_fraction: added to the continued part of unfinished rungs; the rule's own mean error by default.
    """
    if bool(name) == bool(points or target) or bool(points) != bool(target):
        raise ValueError("argosy forecast fit takes a hero's NAME, or --points and --target; e.g. argosy forecast fit pocket")
    if points and target:
        from argosy.forecast import fit as fitting

        table = fitting.from_files(points, target, method, tail_correction)
        emit(table) if json else console().print(fitting.table(table))
        return
    if tail_correction is not None:
        raise ValueError("--tail-correction belongs to --points and --target; leave it out with a NAME")
    with progress.telling() as say:
        from argosy.judge import fits, report

        found = fits.of_store(home, name, method, say)
    emit(found) if json else report.show(found, console())


@forecast.command
def plot(name: Name, /, metric: str = "", out: Path | None = None, home: Home = HOME, json: Json = False) -> None:
    """A registered forecast as a picture: the ladder, the hero's bands, what was measured, what it is now expected to end at.

    Args:
        name: The hero's name in the store.
        metric: A metric of the forecast; the mean of held-out bits per byte by default.
        out: The file to write, .png, .pdf or .svg; NAME-forecast.png by default, with --json none.
    """
    from argosy.judge import plot as plotting

    written = None
    if out is not None or not json:
        to = plotting.legal(out or Path(f"{name}-forecast.png"))
        written = plotting.save(plotting.picture(home, name, metric), to)
    emit(plotting.page(home, name)) if json else print(f"wrote {written}")


@forecast.command
def register(
    name: Name,
    /,
    method: str = "joint",
    reason: str = "",
    home: Home = HOME,
    json: Json = False,
) -> None:
    """Fit a hero's ladder and keep the forecast with all that it rests on: dated, hashed, never changed.

    Args:
        name: The hero's name in the store; its ladder has to be there.
        method: joint, per_fraction or schedule.
        reason: Why it supersedes the forecast that is registered already.
    """
    with progress.telling() as say:
        from argosy.judge import register as registry
        from argosy.judge import report

        path, body = registry.register(home, name, method=method, reason=reason, say=say)
    emit(report.registered(path, body)) if json else report.show_registered(path, body, console())


@forecast.command
def verify(file: Annotated[Path, Positional], /, json: Json = False) -> None:
    """Check a registered forecast: its hash, and every number by a refit of the data inside. Exit status 1 if it does not hold.

    Args:
        file: A file like voyages/forecasts/pocket/0001.json.
    """
    with progress.telling() as say:
        from argosy.judge import report
        from argosy.judge import verify as verifying

        found = verifying.verify(file, say)
    emit(found) if json else report.show_verified(found, console())
    if not found["ok"]:
        sys.exit(1)


@forecast.command
def witness(name: Name, /, *, at: str, home: Home = HOME, json: Json = False) -> None:
    """Note where the newest forecast's line was published.

    Args:
        name: The hero's name.
        at: Where: a URL, a commit, a tag.
    """
    from argosy.judge import witness as witnesses

    entry = witnesses.note(home, name, at)
    emit(entry) if json else print(f"noted at {entry['noted']}: {entry['at']} witnesses sha256 {entry['sha256']}")


@forecast.command
def bridge(
    name: Name,
    /,
    *,
    event: str,
    rerun: UseAppendAction[tuple[str, ...]] = (),
    reason: str = "",
    home: Home = HOME,
    json: Json = False,
) -> None:
    """Carry a registered forecast over a change of the hero: its effect on rungs shifts and widens the bands from there on.

    Args:
        name: The hero's name.
        event: The change in the hero's log: its kind, or KIND@STEP.
        rerun: OLD=NEW, a rung and the run that repeats it with the change from the same fraction on; once for each pair.
        reason: Words for the record.
    """
    with progress.telling() as say:
        from argosy.judge import bridge as bridging
        from argosy.judge import report

        path, body = bridging.bridge(home, name, event, rerun, reason=reason, say=say)
    emit(report.registered(path, body) | {"bridge": body["bridge"]}) if json else report.show_bridged(path, body, console())


@forecast.command
def judge(name: Name, /, home: Home = HOME, json: Json = False) -> None:
    """Hold a run against its registered forecast: ahead, on track, behind, off or not comparable. Exit status 3 if it is off.

    Args:
        name: The hero, e.g. pocket.
    """
    from argosy.judge import report, verdict

    found = verdict.judge(home, name)
    emit(found) if json else report.show_verdict(found, console())
    if "page" in found:
        print(f"argosy: the page of {name} still shows the verdict before: its file is {found['page']}", file=sys.stderr)
    if found["verdict"] == "off":
        sys.exit(3)


@app.command
def diagnose(name: Name, /, home: Home = HOME, json: Json = False) -> None:
    """Why a run left its registered forecast: data, routing, optimizer or implementation, and what would tell them apart.

    Args:
        name: The hero, e.g. pocket.
    """
    from argosy.judge import diagnose as diagnosing

    found = diagnosing.diagnose(home, name)
    emit(found) if json else console().print(diagnosing.show(found))


@app.command
def serve(run: Annotated[str, Positional] = "", /, port: int = 8700, host: str = "127.0.0.1", home: Home = HOME) -> None:
    """Serve the page of the runs under a home until interrupted.

    Args:
        run: The run to show first.
        port: First port to try.
        host: Address to listen on; this machine alone by default.
    """
    from argosy.track import layout, server

    if run:
        layout.find(run, home)
    server.serve_here(home, run, port, host, say=lambda address: print(f"{address}   (Ctrl-C ends it)", flush=True))


@app.command(name="runs")
def runs_(home: Home = HOME, json: Json = False) -> None:
    """All runs under a home, newest first."""
    from argosy.track import report

    found = report.runs(home)
    emit(found) if json else console().print(report.runs_table(found))


@app.command
def show(run: Name, metric: Annotated[str, Positional] = "", /, home: Home = HOME, json: Json = False) -> None:
    """A run's summary, or one metric as a chart and a table.

    Args:
        run: The run's name or folder.
        metric: A metric's name, e.g. train/loss.
    """
    from argosy.track import report

    found = report.show(run, metric, home)
    emit(found) if json else console().print(report.show_table(found))


@app.command
def note(run: Name, text: Name, /, at: int | None = None, home: Home = HOME, json: Json = False) -> None:
    """Note in a run's lineage what was changed by hand: from then on its forecast asks for a bridge.

    Args:
        run: The run's name or folder; it may be live.
        text: What was changed, e.g. "decay of the gates from 0 to 0.02".
        at: From which finished update on; the run's newest by default.
    """
    from argosy.judge import ladders
    from argosy.track import log, store

    if not text.strip():
        raise ValueError("argosy note needs words: what was changed, e.g. 'mixture: more code'")
    read = log.read(run, home)
    step, total = ladders.updates(read) if at is None else at, spec.steps(spec.from_json(read.run["run"]))
    if not 0 <= step <= total:
        raise ValueError(f"--at {step:,} is an update of the run, 0 to {total:,}; nearest legal {min(max(step, 0), total):,}")
    store.note(read.folder, "change", step, what=text.strip())
    said = {"run": read.name, "step": step, "what": text.strip()}
    emit(said) if json else print(f"noted in {read.name}, from update {step:,} on: {text.strip()}")


@app.command
def diff(a: Name, b: Name, /, home: Home = HOME, json: Json = False) -> None:
    """What differs between two runs: configuration, code, data.

    Args:
        a: A run's name or folder.
        b: Another's.
    """
    from argosy.track import report

    found = report.diff(a, b, home)
    emit(found) if json else console().print(report.diff_table(found))


@app.command
def sweep(
    recipe: Name,
    /,
    settings: Settings = (),
    seeds: int = 3,
    rungs: str = "",
    as_: As = "",
    home: Home = HOME,
    checkpoint_every: Every = 60.0,
    json: Json = False,
) -> None:
    """A recipe under several values of a key, each with several seeds: mean, spread, paired differences.

    A second call goes on where the first stopped; finished runs are left alone.

    Args:
        recipe: A recipe's name or file.py:function.
        settings: Give a key several values, e.g. optim.lr_scale=1,2,4; several such keys make a grid; other settings hold for all.
        seeds: How many seeds for each value, from the recipe's own upwards.
        rungs: Sweep these rungs of the recipe's ladder in its place, e.g. d48,d64.
        as_: What the runs' names begin with; the recipe by default.
    """
    from argosy import voyage as job
    from argosy.judge import sweeps

    name = run_name(recipe, as_)
    bases = {f"{name}-{r.name}": r.run for r in sweeps.rungs(recipe, rungs)} if rungs else {name: runs.find(recipe)}
    made = [sweeps.make(base, name, settings, seeds) for name, base in bases.items()]
    host = spec.Host(home=home, checkpoint_every_s=seconds(checkpoint_every))
    out = Console(stderr=json, highlight=False)
    for each in made:
        sweeps.must_fit(each, home)
    planned = [sweeps.plan(each, home) for each in made]
    out.print(sweeps.plan_table(planned))
    if not job.in_turn([(m.name, m.run) for each in made for m in each.members], host, "sweep", "run"):
        raise KeyboardInterrupt  # a signal: the runs that are finished stay, the same command goes on
    found = [{**sweeps.result(each, home), "plan": p} for each, p in zip(made, planned, strict=True)]
    if json:
        emit({"sweeps": found})
    else:
        for body in found:
            out.print(sweeps.table(body))


@app.command
def compare(
    a: Name,
    b: Name,
    /,
    floor: float = 0.0,
    with_speed: Flag = False,
    ladder: str = "",
    alpha: float | None = None,
    home: Home = HOME,
    json: Json = False,
) -> None:
    """Is B worth promoting over A: effective speed-up at equal loss, its 90% interval, a verdict.

    Args:
        a: The baseline: a hero with a ladder, a run, or a sweep's arm (NAME for NAME-s0, NAME-s1, ...).
        b: The variant: the same.
        floor: Irreducible loss, as a share of the baseline's smallest loss; the exponent is refitted for it.
        with_speed: Multiply by the ratio of tokens per second.
        ladder: For runs: the ladder that says what a difference in loss is worth; by default one in the store with the same text.
        alpha: For runs: the exponent in its place.
    """
    from argosy.judge import compare as comparing

    found = comparing.compare(a, b, home, floor=floor, with_speed=with_speed, ladder=ladder, alpha=alpha)
    emit(found) if json else console().print(comparing.table(found))


@scaling.command(name="fit")
def fit_rates(names: Annotated[tuple[str, ...], Positional], /, home: Home = HOME, json: Json = False) -> None:
    """The learning-rate rule from sweeps over optim.lr_scale: best rate of each size, exponents, intervals, range.

    Args:
        names: What the sweeps were of, e.g. pocket-d32 pocket-d48; pocket for those of all its rungs.
    """
    from argosy.judge import rates

    if not names:
        raise ValueError("argosy scaling fit needs what the sweeps were of; e.g. argosy scaling fit pocket-d32 pocket-d48")
    found = rates.fit(names, home)
    emit(found) if json else console().print(rates.table(found))


@launch.command
def local(
    command: Annotated[str, Positional] = "",
    /,
    processes: int = 2,
    devices_per_process: int = 4,
) -> None:
    """Several processes on this machine with CPU devices: argosy launch local --processes 2 -- train pocket.

    Args:
        command: After "--": what each process runs, train, voyage or sample with its own words.
        processes: How many processes.
        devices_per_process: CPU devices of each.
    """
    from argosy.launch import local as launching

    words = shlex.split(command)  # `main` has made them one word
    launching.check(words, processes, devices_per_process)
    words = launching.laid_over(words, processes * devices_per_process)
    status = launching.run(words, processes, devices_per_process)
    if status:
        sys.exit(status)


@app.command
def sample(
    run: Name,
    prompt: Name,
    /,
    tokens: int = 200,
    temperature: float = 0.7,
    seed: int = 0,
    home: Home = HOME,
    link: Linked = ALONE,
) -> None:
    """Text from a run's last checkpoint, dropless.

    Args:
        run: The run's name or folder.
        prompt: The text to continue.
        tokens: At most this many tokens.
        temperature: 0 takes the likeliest token.
        seed: Seed of the drawing.
        link: Where this process belongs when the text is made by several.
    """
    from argosy import processes
    from argosy.export import sample as sampling

    join.join(link)
    for piece in sampling.from_run(run, home, prompt, tokens=tokens, temperature=temperature, seed=seed):
        if processes.first():
            print(piece, end="", flush=True)
    if processes.first():
        print()


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point: a user's mistake ends with exit status 2 and a plain sentence, never a traceback."""
    # Before NumPy is loaded: fits are many small problems, which one thread solves in less than half the time. JAX has its own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    args = list(sys.argv[1:] if argv is None else argv)
    known = (
        "voyage",
        "train",
        "new",
        "plan",
        "data",
        "ladder",
        "forecast",
        "diagnose",
        "serve",
        "runs",
        "show",
        "diff",
        "note",
        "sample",
        "sweep",
        "compare",
        "scaling",
        "launch",
        "rehearse",
    )
    if args[:1] == ["ladder"] and args[1:2] not in (["show"], ["check"], ["--help"], ["-h"]):
        args.insert(1, "show")  # `argosy ladder NAME` is the one that people type
    if args[:1] == ["launch"]:
        from argosy.launch import local as launching

        args = launching.grouped(args)
    try:
        join.interruptible()
        if args and not args[0].startswith("-") and args[0] not in known:
            raise ValueError(f"unknown command {args[0]!r}; nearest: {', '.join(spec.nearest(args[0], known))}")
        app.cli(prog="argosy", description="Plan, train and publish a sparse mixture-of-experts run.", args=args)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except Exception as error:
        if join.lost(error):
            first = (str(error).strip().splitlines() or [""])[0]
            fail(f"another process of the run ended or cannot be reached, so this one ends too ({first[:160]})", 1)
        if isinstance(error, ValueError):
            fail(str(error), 2)
        if isinstance(error, OSError):
            where = f": {error.filename}" if error.filename else ""
            room = "; what was saved before is intact, and the same command goes on once there is room"
            fail(f"{error.strerror or error}{where}{room if error.errno == ENOSPC else ''}", 1)
        if join.several():
            traceback.print_exc()
            join.leave(1)
        raise


def fail(message: str, status: int) -> None:
    print(f"argosy: {message}", file=sys.stderr, flush=True)
    join.leave(status)
    sys.exit(status)


if __name__ == "__main__":
    main()

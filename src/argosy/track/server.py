"""The live page: a few JSON endpoints over the run folders, pushed news, and five static files.

Plotly's JavaScript is served out of the installed `plotly` package; the page asks nothing of any other host. The
server only reads. It runs as a process of its own, at low priority, and ends with the process that started it,
however that one ends.

- `GET /api/runs`                   summaries of all runs, and which one to show
- `GET /api/run/<name>`             configuration, plan, code, events, lineage, metrics with meaning, panels
- `GET /api/run/<name>/series?metrics=train/loss,grad/norm/*&buckets=2000&from=0&to=99`
- `GET /api/run/<name>/news?after=` what was added since a position
- `GET /api/run/<name>/stream?after=` the same as server-sent events, the first at once
- `GET /api/run/<name>/forecast`    its registered bands, verdict and updated forecast; {} where none is registered
- `GET /api/run/<name>/ladder`      its rungs and how far they are; {} where it has none
"""

import asyncio
import contextlib
import errno
import fnmatch
import importlib.util
import json
import math
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import argosy
from argosy import spec
from argosy.track import columns, forecasts, index, metrics
from argosy.track.layout import finite, names, writing
from argosy.track.log import RunLog, follow, read

PAGE = Path(__file__).parent / "page"
POLL_S = 2.0
ALIVE_S = 15.0
MOST_BUCKETS = 20_000
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'"
)


class Unknown(Exception):
    """A name that is not there: what was asked, and the nearest that are."""

    def __init__(self, what: str, asked: str, known: list[str]):
        near = spec.nearest(asked, known)
        self.body = {
            "error": f"no {what} {asked!r}; " + (f"nearest: {', '.join(near)}" if near else "there is none yet"),
            "nearest": near,
        }


def application(home: Path, run: str = "") -> Starlette:
    """The page and its endpoints over the runs of a home; `run` is shown first, else the newest that reads."""

    def folder_of(request: Request) -> Path:
        name, known = request.path_params["name"], names(home)
        if name not in known:
            raise Unknown("run", name, known)
        return home / "runs" / name

    def hero_of(request: Request) -> str:
        """The name of a run that has a folder or a ladder."""
        name, known = request.path_params["name"], [*names(home), *forecasts.ladders(home)]
        if name not in known:
            raise Unknown("run", name, known)
        return name

    def runs(request: Request) -> Response:
        found, heroes = index.summaries(home), forecasts.heroes(home)
        found += forecasts.unborn(home, [body["name"] for body in found])
        newest = next((body["name"] for body in sorted(found, key=lambda body: body["state"] == "damaged")), "")
        listed = [body | {"hero": heroes.get(body["name"])} for body in found]
        shown = run or heroes.get(newest, newest)
        return answer({"runs": listed, "default": shown, "version": argosy.__version__, "now": time.time()})

    def about(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in names(home) and name in forecasts.ladders(home):
            return answer(forecasts.planned(home, name) | {"now": time.time()})
        folder = folder_of(request)
        position = follow(folder).position  # before the log is read: what comes in between is told twice, not missed
        also = {"hero": forecasts.heroes(home).get(name), "forecast": beside(folder), "position": position, "now": time.time()}
        return answer(describe(read(folder)) | also)

    def forecast(request: Request) -> Response:
        return answer(forecasts.forecast(home, hero_of(request)))

    def ladder(request: Request) -> Response:
        return answer(forecasts.ladder(home, hero_of(request)))

    def series(request: Request) -> Response:
        query = request.query_params
        log = read(folder_of(request))
        most = number(query.get("buckets", "2000"), "buckets", 1, MOST_BUCKETS)
        between = tuple(float(number(query.get(k, str(d)), k, 0, 2**53)) for k, d in (("from", 0), ("to", 2**53)))
        wanted = choose(query.get("metrics", ""), log.metrics)
        return answer({"metrics": {name: drawn(log, name, int(most), (between[0], between[1])) for name in wanted}})

    def latest(request: Request) -> Response:
        return answer(news(folder_of(request), request.query_params.get("after", "")))

    async def stream(request: Request) -> Response:
        folder = await run_in_threadpool(folder_of, request)
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        await run_in_threadpool(follow, folder, after)  # a bad position is refused before the stream begins
        leaving = getattr(request.app.state, "leaving", lambda: False)
        return StreamingResponse(
            pushed(folder, after, leaving), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    routes = [
        Route("/", static(PAGE / "index.html", {"Content-Security-Policy": POLICY})),
        *(Route(f"/{name}", static(PAGE / name)) for name in ("page.css", "page.js", "charts.js", "forecast.js")),
        Route("/plotly.min.js", static(plotly_file(), {"Cache-Control": "max-age=86400"})),
        Route("/api/runs", runs),
        Route("/api/run/{name}", about),
        Route("/api/run/{name}/series", series),
        Route("/api/run/{name}/news", latest),
        Route("/api/run/{name}/stream", stream),
        Route("/api/run/{name}/forecast", forecast),
        Route("/api/run/{name}/ladder", ladder),
    ]
    refusals: Any = {
        Unknown: lambda request, error: JSONResponse(error.body, 404),
        ValueError: lambda request, error: JSONResponse({"error": str(error)}, 400),
        HTTPException: lambda request, error: JSONResponse({"error": error.detail}, error.status_code),
    }
    return Starlette(routes=routes, exception_handlers=refusals, middleware=[Middleware(GZipMiddleware, minimum_size=4096)])


def static(path: Path, headers: dict[str, str] | None = None) -> Callable[[Request], Response]:
    """An endpoint that gives one file."""
    return lambda request: FileResponse(
        path, headers={"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"} | (headers or {})
    )


def plotly_file() -> Path:
    """Plotly's JavaScript inside the installed package, found without importing it.

    Raises:
        ValueError: when the package is missing or ships no such file.
    """
    found = importlib.util.find_spec("plotly")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise ValueError(
        "the page needs plotly/package_data/plotly.min.js of the plotly package; install it with: pip install plotly"
    )


# ---- what the endpoints answer -----------------------------------------------------------------


def answer(body: Any) -> Response:
    return Response(text(body), media_type="application/json", headers={"Cache-Control": "no-store"})


def text(body: Any) -> str:
    """JSON that every browser reads: what is not finite becomes null."""
    try:
        return json.dumps(body, allow_nan=False)
    except ValueError:
        return json.dumps(finite(body))


def number(given: str, name: str, least: int, most: int) -> int:
    """A whole number of a query."""
    if not given.isdigit() or not least <= int(given) <= most:
        raise ValueError(f"{name}={given!r} must be a whole number from {least:,} to {most:,}; e.g. {name}={least}")
    return int(given)


def choose(wanted: str, known: list[str]) -> list[str]:
    """Metric names for a comma-separated list of names and `*` patterns."""
    found: dict[str, None] = {}
    for part in filter(None, wanted.split(",")):
        matched = fnmatch.filter(known, part) if "*" in part else [part] if part in known else []
        if not matched and "*" not in part:
            raise Unknown("metric", part, known)
        found |= dict.fromkeys(matched)
    return list(found)


def describe(log: RunLog) -> dict[str, Any]:
    """Everything about a run but its series."""
    known = {name: metrics.describe(name) for name in sorted(log.metrics, key=metrics.rank)}
    return {
        "summary": index.summary(log),
        **{key: log.run.get(key) for key in ("run", "plan", "code", "environment", "created")},
        "events": log.events,
        "lineage": log.lineage,
        "attempts": [a._asdict() for a in log.attempts],
        "metrics": {
            name: {"unit": m.unit, "meaning": m.meaning, "panel": m.panel, "label": m.label} for name, m in known.items()
        },
        "panels": [panel._asdict() for panel in metrics.PANELS],
    }


def drawn(log: RunLog, name: str, most: int, between: tuple[float, float]) -> dict[str, Any]:
    """A series in buckets; `low` and `high` only where a bucket holds several points. Seven digits are kept."""
    found = columns.buckets(log.pieces(name, between=between), most)
    body: dict[str, Any] = {"step": found.last.tolist(), "mean": short(found.mean)}
    if found.points.size and found.points.max() > 1:
        body |= {"low": short(found.low), "high": short(found.high)}
    return body


def short(values: Any) -> list[float | None]:
    return [float(f"{v:.7g}") if math.isfinite(v) else None for v in values.tolist()]


def news(folder: Path, after: str) -> dict[str, Any]:
    """What was added since a position; with the run's summary, and a mark that changes with its forecast."""
    found = follow(folder, after)
    rows = [[step, {k: v for k, v in row.items() if metrics_drawn(k)}] for step, _, row in found.rows]
    body = {"rows": rows, "events": found.events, "lineage": found.lineage, "position": found.position, "missed": found.missed}
    return body | {"summary": index.summary(read(folder)), "forecast": beside(folder), "now": time.time()}


def beside(folder: Path) -> str:
    return forecasts.mark(folder.parents[1], folder.name)


def metrics_drawn(name: str) -> bool:
    return bool(metrics.describe(name).panel) or name == "throughput/total_tokens"


async def pushed(folder: Path, after: str, leaving: Callable[[], bool]) -> AsyncIterator[str]:
    """What was added since a position, at once, so that nothing before the connection is missed; then news as server-sent events,
    when there are any, until the server is `leaving`. A comment now and then keeps the connection open."""
    position = after or (await run_in_threadpool(follow, folder)).position
    told, seen = time.monotonic(), None
    while (folder / "run.json").exists():
        around = writing(folder), beside(folder)  # before the news are gathered: told twice, not missed
        found = await run_in_threadpool(follow, folder, position)
        if found.position != position or around != seen:
            seen = around
            body = await run_in_threadpool(news, folder, position)
            position, told = body["position"], time.monotonic()
            yield f"id: {position}\ndata: {text(body)}\n\n"
        elif time.monotonic() - told > ALIVE_S:
            told = time.monotonic()
            yield ": alive\n\n"
        for _ in range(10):
            if leaving():
                return
            await asyncio.sleep(POLL_S / 10)


# ---- running it --------------------------------------------------------------------------------


@contextlib.contextmanager
def serve(home: Path, run: str = "", port: int = 8700, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve the page while the context lasts; the address is there at once.

    The page is a process of its own. It is gone when the context ends, and soon after this process ends in any other
    way: interrupted, terminated or killed.

    Raises:
        OSError: when no port can be had on the host.
        ValueError: when Plotly's JavaScript is not installed.
    """
    plotly_file()
    with bind(host, port) as listener:
        here = str(Path(argosy.__file__).resolve().parents[1])
        paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        words = [str(home), run, str(listener.fileno()), str(os.getpid())]
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "argosy.track.server", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # the terminal's Ctrl-C is for the run; the page goes when the run is gone
            env=os.environ | {"PYTHONPATH": paths},
        )
        address = address_of(listener)
    try:
        yield address
    finally:
        assert child.stdin
        child.stdin.close()
        try:
            child.wait(3)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def serve_here(
    home: Path, run: str = "", port: int = 8700, host: str = "127.0.0.1", say: Callable[[str], None] = print
) -> None:
    """Serve the page from this process until it is interrupted; the address is said first.

    Raises: as `serve`.
    """
    plotly_file()
    with bind(host, port) as listener:
        say(address_of(listener))
        listen(listener, home, run)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: at the port asked for, else at one of the next 20, else at any, saying so; 0 is any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for other in [port, *range(port + 1, min(port + 21, 65_536)), 0]:
        try:
            found = socket.create_server((host, other), family=family)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or other == 0:
                raise
            continue
        if port and other != port:
            print(f"argosy: port {port} is in use; the page is at {address_of(found)}", file=sys.stderr, flush=True)
        return found
    raise AssertionError("port 0 was tried")


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def listen(listener: socket.socket, home: Path, run: str) -> None:
    app = application(home, run)
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    one = uvicorn.Server(config)
    app.state.leaving = lambda: one.should_exit
    with contextlib.suppress(KeyboardInterrupt):
        one.run(sockets=[listener])


def end_with(parent: int) -> None:
    """End this process once its parent closes our standard input or is gone."""
    while True:
        ready, _, _ = select.select([0], [], [], 1.0)
        if (ready and not os.read(0, 1)) or os.getppid() != parent:
            os._exit(0)


def main() -> None:
    home, run, handle, parent = sys.argv[1:]
    threading.Thread(target=end_with, args=(int(parent),), daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(10)
    listen(socket.socket(fileno=int(handle)), Path(home), run)


if __name__ == "__main__":
    main()

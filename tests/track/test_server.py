"""The page's endpoints on a real loopback port, and the life of its process."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import psutil
import pytest
import sample_forecasts
from sample_runs import evaluation, row, small_run

from argosy import spec
from argosy.track import read, server, store


def get(address, path="", **headers):
    """Status, headers and body of a GET."""
    request = urllib.request.Request(address + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def ask(address, path):
    status, headers, body = get(address, path)
    assert headers["content-type"] == "application/json"
    return status, json.loads(body)


def test_endpoints_tell_the_run(home):
    """Fails when an endpoint is missing, gives other figures than the log, or is not strict JSON."""
    log = read("pocket", home)
    with server.serve(home, "pocket", 0) as address:
        status, runs = ask(address, "api/runs")
        assert status == 200 and runs["default"] == "pocket"
        assert {r["name"]: r["state"] for r in runs["runs"]} == {"pocket": "done", "planned": "planned"}

        status, about = ask(address, "api/run/pocket")
        assert about["run"]["data"]["seq_len"] == 256 and about["summary"]["step"] == 1024
        assert about["metrics"]["moe/drop_fraction"]["panel"] == "drops"
        assert [r["kind"] for r in about["lineage"]] == ["attempt", "corpus", "ended", "attempt", "ended"]
        assert [(e["kind"], e["superseded"]) for e in about["events"]] == [("baseline", False), ("loss_spike", True)]
        assert {p["key"] for p in about["panels"]} >= {m["panel"] for m in about["metrics"].values() if m["panel"]}

        _, body = ask(address, "api/run/pocket/series?metrics=train/loss,eval_dropless/*&buckets=2000")
        steps, loss = log.series("train/loss")
        assert body["metrics"]["train/loss"]["step"] == steps.tolist()
        np.testing.assert_allclose(body["metrics"]["train/loss"]["mean"], loss, rtol=1e-6)
        assert len(body["metrics"]) == 6 and "low" not in body["metrics"]["train/loss"]

        _, body = ask(address, "api/run/pocket/series?metrics=train/loss&buckets=50&from=100&to=300")
        drawn = body["metrics"]["train/loss"]
        assert len(drawn["step"]) <= 50 and drawn["step"][-1] == 300
        np.testing.assert_allclose(min(drawn["low"]), loss[(steps >= 100) & (steps <= 300)].min(), rtol=1e-6)

        for path, kind in (
            ("", "text/html"),
            ("page.css", "text/css"),
            ("page.js", "text/javascript"),
            ("charts.js", "text/javascript"),
            ("forecast.js", "text/javascript"),
            ("plotly.min.js", "text/javascript"),
        ):
            status, headers, text = get(address, path)
            assert status == 200 and headers["content-type"].startswith(kind) and len(text) > 1000
        assert "default-src 'none'" in get(address)[1]["content-security-policy"]


def test_a_value_that_is_not_finite_is_null(home):
    """Fails when one NaN makes the whole answer unreadable for a browser."""
    with store.open_writer(home / "runs" / "planned", 0) as writer:
        writer.record(1, {"train/loss": float("nan"), "moe/drop_fraction": float("inf")})
        writer.event("diverged", 1, loss=float("nan"))
    with server.serve(home, "", 0) as address:
        _, body = ask(address, "api/run/planned/series?metrics=train/loss,moe/*")
        assert body["metrics"]["train/loss"]["mean"] == body["metrics"]["moe/drop_fraction"]["mean"] == [None]
        _, about = ask(address, "api/run/planned")
        assert about["events"][0]["fields"] == {"loss": None} and about["summary"]["loss"] is None


def test_mistakes_are_answered_with_json(home):
    """Fails when an unknown name, a bad number or a way out of the folder gives anything but a JSON refusal."""
    (home / "secret.txt").write_text("secret")
    with server.serve(home, "", 0) as address:
        status, body = ask(address, "api/run/pockt")
        assert status == 404 and body["nearest"][0] == "pocket" and "no run 'pockt'" in body["error"]
        status, body = ask(address, "api/run/pocket/series?metrics=train/los")
        assert status == 404 and body["nearest"][0] == "train/loss"
        for query in ("buckets=0", "buckets=ten", "buckets=999999", "from=-1", "to=x"):
            assert ask(address, f"api/run/pocket/series?metrics=train/loss&{query}")[0] == 400
        assert ask(address, "api/run/pocket/news?after=1:2")[0] == 400
        for after in ("a:b:c:d", "-1:-1:-1:-1", "0:0:0:-1", "-2:0:0:0", "0:0:0:99999999999999999999"):
            for path in ("news", "stream"):
                status, body = ask(address, f"api/run/pocket/{path}?after={after}")
                assert status == 400 and "tail:bytes:bytes:bytes" in body["error"], (path, after)
        assert ask(address, "api/run/planned/news?after=-1:0:0:0")[0] == 200
        assert ask(address, "api/nothing")[0] == 404
        for path in (
            "api/run/..",
            "api/run/%2e%2e",
            "api/run/..%2f..%2fsecret.txt",
            "api/run/%2fetc",
            "../secret.txt",
            "%2e%2e/secret.txt",
        ):
            host, port = address.removeprefix("http://").rstrip("/").split(":")
            with socket.create_connection((host, int(port)), timeout=60) as raw:  # urllib would tidy the path up
                raw.sendall(f"GET /{path} HTTP/1.0\r\n\r\n".encode())
                answer = b"".join(iter(lambda: raw.recv(65536), b""))
            assert answer.startswith(b"HTTP/1.1 404") and b"secret\n" not in answer and b"root:" not in answer, path


def test_a_damaged_run_is_listed_and_not_shown_first(home):
    """Fails when one bad run.json takes the page from all runs, or the page opens with it."""
    (home / "runs" / "planned" / "run.json").write_text("[]")
    with server.serve(home, "", 0) as address:
        status, body = ask(address, "api/runs")
        assert status == 200 and body["default"] == "pocket"
        assert {r["name"]: r["state"] for r in body["runs"]} == {"pocket": "done", "planned": "damaged"}
        status, body = ask(address, "api/run/planned")
        assert status == 400 and "planned/run.json is not what was written" in body["error"]


@contextlib.contextmanager
def pushed(address, name, about):
    """What is pushed after a run was asked about, one by one; never more than a minute of it."""
    with urllib.request.urlopen(f"{address}api/run/{name}/stream?after={about['position']}", timeout=20) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        end = time.monotonic() + 60
        lines = iter(lambda: stream.readline().decode() if time.monotonic() < end else "", "")
        yield (json.loads(line[6:]) for line in lines if line.startswith("data: "))


def test_new_rows_are_pushed(home):
    """Fails when the stream does not bring what is recorded, once, in order, with a position to go on from."""
    folder = home / "runs" / "planned"
    with server.serve(home, "", 0) as address, store.open_writer(folder, 0) as writer:
        writer.record(1, {"train/loss": 8.0, "own/detail": 1.0})
        _, about = ask(address, "api/run/planned")
        assert about["summary"]["state"] == "running"
        writer.record(2, {"train/loss": 7.0, "own/detail": 1.0})
        writer.event("note", 2, text="here")
        with pushed(address, "planned", about) as every:
            news = next(every)
            assert news["rows"] == [[2, {"train/loss": 7.0}]] and news["summary"]["step"] == 2
            assert news["events"][0]["fields"] == {"text": "here"}
            writer.record(3, {"train/loss": 6.0})
            assert next(every)["rows"] == [[3, {"train/loss": 6.0}]]
        _, late = ask(address, f"api/run/planned/news?after={about['position']}")
        assert [row[0] for row in late["rows"]] == [2, 3]


HEAD = "eval_dropless/stdlib/macro_bpb"


def some_forecast(**given):
    curves = {HEAD: lambda step: 2 - 2e-4 * step, "grad/norm/total": lambda step: 1 + 0.0 * step}
    return sample_forecasts.forecast(curves, 1024, **given)


def test_a_forecast_is_told_and_its_changes_are_pushed(home):
    """Fails when bands, verdict or what metrics mean are not served, news of them are not pushed, or a damaged file is served."""
    with server.serve(home, "pocket", 0) as address:
        assert ask(address, "api/run/pocket/forecast") == (200, {})
        assert ask(address, "api/run/nobody/forecast")[0] == 404
        _, about = ask(address, "api/run/pocket")
        assert about["forecast"] == ""
        sample_forecasts.write(home, "pocket", some_forecast(at=256))  # before the page has connected
        written = some_forecast(at=512)
        with pushed(address, "pocket", about) as every:
            first = next(every)
            assert first["forecast"] and first["rows"] == []
            sample_forecasts.write(home, "pocket", written)
            news = next(every)
        assert news["forecast"] not in ("", first["forecast"]) and news["rows"] == []
        status, told = ask(address, "api/run/pocket/forecast")
        assert status == 200 and {key: told[key] for key in written} == json.loads(json.dumps(written))
        assert told["headline"] == HEAD and told["metrics"]["grad/norm/total"]["panel"] == "grad"
        assert ask(address, "api/run/pocket")[1]["forecast"] == news["forecast"]
        path = home / "forecasts" / "pocket" / "page.json"
        uneven = dict(written, bands={HEAD: {**written["bands"][HEAD], "mean": [1.0]}})
        letters = dict(written, bands={HEAD: {key: ["a"] for key in written["bands"][HEAD]}})
        damaged = [json.dumps(body) for body in (uneven, letters, written | {"verdict": "off"})]
        for text in ("{", "[]", "null", '{"forecast": {}}', '{"forecast": {}, "bands": {"x": 1}}', *damaged):
            path.write_text(text)
            status, told = ask(address, "api/run/pocket/forecast")
            assert status == 400 and "forecasts/pocket/page.json is not what was written" in told["error"], text
            assert ask(address, "api/runs")[0] == ask(address, "api/run/pocket")[0] == 200
        path.unlink()
        path.mkdir()
        status, told = ask(address, "api/run/pocket/forecast")
        assert status == 400 and "page.json cannot be read: Is a directory" in told["error"]


def test_a_ladder_is_told_under_its_hero(home):
    """Fails when rungs are not grouped under their hero, their progress is another than their logs', or a hero without a folder is
    not there."""
    sample_forecasts.ladder(home, "hero", small_run(), [("d32", "size"), ("d64", "size"), ("d64-seed1", "seed")])
    listed = json.loads((home / "ladders" / "hero.json").read_text())["rungs"]
    for entry, until in zip(listed[:2], (1024, 300), strict=True):
        store.create(home / "runs" / entry["name"], entry["run"], {"argosy": "0.1.0"})
        with store.open_writer(home / "runs" / entry["name"], 0) as writer:
            writer.record(until, row(until, 1024) | evaluation(until))
            writer.close("done" if until == 1024 else "stopped")
    (home / "ladders" / "bad.json").write_text("{")
    with server.serve(home, "", 0) as address:
        _, runs = ask(address, "api/runs")
        assert {r["name"]: r["hero"] for r in runs["runs"] if r["hero"]} == {"hero-d32": "hero", "hero-d64": "hero"}
        assert runs["default"] == "hero"  # a rung was the newest
        _, told = ask(address, "api/run/hero/ladder")
        assert told["finished"] == 1
        assert [(r["rung"], r["purpose"], r["state"], r["step"], r["steps"]) for r in told["rungs"]] == [
            ("d32", "size", "done", 1024, 1024),
            ("d64", "size", "stopped", 300, 1024),
            ("d64-seed1", "seed", "planned", None, 1024),
        ]
        assert told["rungs"][0]["macro_bpb"] == pytest.approx(evaluation(1024)[HEAD])
        status, about = ask(address, "api/run/hero")
        assert status == 200 and about["position"] == "" and about["summary"]["state"] == "planned"
        assert about["run"] == json.loads(json.dumps(spec.to_json(small_run()))) and about["summary"]["steps"] == 1024
        assert ask(address, "api/run/hero-d32")[1]["hero"] == "hero"
        assert ask(address, "api/run/pocket/ladder") == (200, {})
        assert ask(address, "api/run/bad/ladder")[0] == 404
        (home / "ladders" / "pocket.json").write_text('{"hero": {}, "rungs": [{}]}')
        status, told = ask(address, "api/run/pocket/ladder")
        assert status == 400 and "ladders/pocket.json is not what was written" in told["error"]


def test_a_taken_port_gives_the_next_and_says_so(home, capfd):
    """Fails when a second page on a machine does not start, or starts silently somewhere else."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with server.serve(home, "", port) as address:
            assert address != f"http://127.0.0.1:{port}/"
            assert ask(address, "api/runs")[0] == 200
        assert f"port {port} is in use; the page is at {address}" in capfd.readouterr().err


def alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def answers(host, port):
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_page_is_gone_when_its_parent_is(home, number):
    """Fails when Ctrl-C, SIGTERM or SIGKILL of a run leaves the page's process or its port behind."""
    script = (
        "import pathlib, signal, sys, time\n"
        "from argosy.track import server\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "with server.serve(pathlib.Path(sys.argv[1]), 'pocket', 0) as address:\n"
        "    print(address, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(home)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        address = parent.stdout.readline().strip()
        assert ask(address, "api/runs")[0] == 200
        (page,) = psutil.Process(parent.pid).children()
        os.kill(parent.pid, number)
        parent.wait(60)
    host, port = address.removeprefix("http://").rstrip("/").split(":")
    deadline = time.monotonic() + 60
    while (alive(page) or answers(host, int(port))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(page) and not answers(host, int(port))


def test_a_stream_ends_with_its_server(home):
    """Fails when an open page keeps a server that was interrupted, which then ends with a traceback."""

    async def told():
        return [line async for line in server.pushed(home / "runs" / "pocket", "", lambda: True)]

    (news,) = asyncio.run(told())
    assert news.startswith("id: ") and json.loads(news.split("data: ")[1])["rows"] == []


def test_a_missing_plotly_is_said_in_words(home, monkeypatch):
    """Fails when the page starts without its charts, or dies with a traceback."""
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install plotly"), server.serve(home):
        pass


def test_the_page_asks_nothing_of_other_hosts():
    """Fails when a file of the page names another host."""
    for name in ("index.html", "page.css", "page.js", "charts.js", "forecast.js"):
        text = (server.PAGE / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "//cdn" not in text, name

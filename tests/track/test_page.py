"""The page in a real headless Chromium, driven through chromedriver's plain HTTP protocol."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest
import sample_forecasts
from sample_runs import SOURCES, evaluation, row, small_run

from argosy import spec
from argosy.track import server, store

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium chromium-driver)"
)

MAIN = ["loss", "heldout", "entropy", "load", "drops", "bias", "heat", "speed", "mfu", "grad", "rates"]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,4000",
]  # fmt: skip


class Browser:
    """A browser session."""

    def __init__(self, port):
        self.base = f"http://127.0.0.1:{port}/session"
        options = {"args": FLAGS, "binary": CHROMIUM}
        always = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.base += "/" + self.post("", capabilities={"alwaysMatch": always})["sessionId"]

    def post(self, path, **body):
        request = urllib.request.Request(self.base + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def run(self, script):
        return self.post("/execute/sync", script=script, args=[])

    def until(self, script, seconds=60):
        """Wait until a script gives something true."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"never true: {script}; {self.run('return document.body.innerText')[:600]}"
            time.sleep(0.1)
        return found

    def errors(self):
        severe = [entry["message"] for entry in self.post("/se/log", type="browser") if entry["level"] == "SEVERE"]
        return severe + self.run("return window.argosyErrors")


@pytest.fixture
def browser():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.1)
            session = Browser(port)
            yield session
            request = urllib.request.Request(session.base, method="DELETE")
            urllib.request.urlopen(request, timeout=30).close()
        finally:
            driver.terminate()


def drawn(key):
    """A script: how many curves (or heat map images) of a chart are on the screen."""
    return (
        f"return [...document.querySelectorAll('#chart-{key} .scatterlayer path.js-line')].filter((p) => p.getTotalLength() > 20).length"
        f" + document.querySelectorAll('#chart-{key} .heatmaplayer image').length"
    )


def test_every_chart_draws(home, browser):
    """Fails when a chart stays empty, a script error is logged, or a request goes to another host."""
    with server.serve(home, "pocket", 0) as address:
        browser.post("/url", url=address + "?live=off")
        for key in MAIN:
            browser.until(drawn(key))
        counts = {key: browser.run(drawn(key)) for key in MAIN}
        assert counts["heldout"] == 5 and counts["drops"] == 3 and counts["bias"] == 2 and counts["grad"] == 2
        assert browser.run("return document.getElementById('name').textContent") == "pocket"
        assert browser.run("return document.getElementById('state').innerText") == "Done"
        way = browser.run("return document.getElementById('way').textContent")
        assert way == "2.1M of 2.1M tokens · update 1,024 of 1,024 · 100% · attempt 2"
        tiles = browser.run("return document.getElementById('tiles').innerText")
        assert "3.590" in tiles and "12% below gzip -9 (2.12)" in tiles and "2.00%" in tiles
        assert (
            browser.run("return document.querySelectorAll('#chart-heldout .shapelayer path').length") >= 4
        )  # gzip, per source
        assert "gzip 1.820" in browser.run("return document.getElementById('chart-heldout').innerHTML")
        happened = browser.run("return document.getElementById('happened').innerText")
        assert "loss spike (rolled back)" in happened and "checksum 5f1d77c2" in happened and "attempt 1: stopped" in happened
        config = browser.run("return document.getElementById('config').innerText")
        assert "main to 80%: library 50%, tests 25%, prose 15%, topics 10%" in config

        tokens = browser.run("return document.getElementById('chart-loss').layout.xaxis.range[1]")
        browser.run("document.querySelector('input[value=share]').click()")
        browser.until("return document.getElementById('chart-loss').layout.xaxis.title.text === 'share of the run'")
        share = browser.run("return document.getElementById('chart-loss').layout.xaxis.range[1]")
        assert tokens > 2e6 and 0.9 < share < 1.1
        browser.run("document.querySelector('#more summary').click(); document.getElementById('more').scrollIntoView()")
        browser.until(drawn("params"))
        browser.run("paper(true)")  # as a browser does before it prints
        assert (
            browser.run("return ['loss', 'params'].map((key) => document.getElementById(`chart-${key}`).layout.width)")
            == [browser.run("return document.getElementById('chart-loss').clientWidth")] * 2
        )
        assert browser.run("return document.getElementById('chart-loss').layout.width") < 350
        browser.run("paper(false)")
        assert browser.run("return document.getElementById('chart-loss').layout.width") > 500
        hosts = browser.run(
            "return [...new Set(performance.getEntriesByType('resource').map((entry) => new URL(entry.name).host))]"
        )
        assert [f"http://{host}/" for host in hosts] == [address]
        assert browser.errors() == []


TOLD_AGAIN = """
const told = { rows: [[31, { "train/loss": 1 }]], events: [page.about.events[0]], lineage: [], missed: false };
Object.assign(told, { summary: page.summary, forecast: page.mark, now: Date.now() / 1000 });
page.dirty.clear();
apply({ ...told, rows: [], events: [] });
const redrawn = page.dirty.size;
apply(told);
return [redrawn, page.about.events.length, page.series["train/loss"].step.length];
"""  # news of nothing, as at each connection, and news that are known


def test_the_page_follows_a_run(home, browser):
    """Fails when new rows, a new metric, the end of a run or of the server do not reach an open page, or news count twice."""
    with server.serve(home, "planned", 0) as address:
        browser.post("/url", url=address + "?live=stream")
        browser.until("return document.getElementById('notice').textContent.startsWith('Nothing was recorded yet')")
        browser.until("return document.querySelector('#chart-loss .empty')?.textContent.includes('from the first update on')")
        with store.open_writer(home / "runs" / "planned", 0) as writer:
            for step in range(1, 30):
                writer.record(step, row(step, 1024))
            browser.until("return document.getElementById('state-word').textContent === 'Running'")
            browser.until(drawn("loss"))
            browser.until("return document.getElementById('way').textContent.includes('update 29 of 1,024')")
            writer.record(30, row(30, 1024))
            writer.record(30, evaluation(30))
            browser.until("return document.getElementById('way').textContent.includes('update 30 of 1,024')")
            browser.until("return document.getElementById('tiles').innerText.includes('bits/byte')")
            assert browser.run("return page.series['train/loss'].step.length") == 30
            writer.event("loss_spike", 31, loss=5.0)
            writer.record(31, row(31, 1024))
            browser.until("return page.series['train/loss'].step.at(-1) === 31")
            assert browser.run("return page.series['train/loss'].step") == list(range(1, 32))
            assert browser.run(TOLD_AGAIN) == [0, 1, 31]
            browser.run("Object.defineProperty(document, 'hidden', { value: true, configurable: true }); page.look()")
            writer.close("stopped")
        # told though no connection is kept
        browser.until("return document.getElementById('state-word').textContent === 'Stopped'")
        browser.run("delete document.hidden; page.look()")
        assert browser.errors() == []
    browser.until("return document.getElementById('fresh').textContent.includes('the server of this page has ended')")


HEAD = "eval_dropless/stdlib/macro_bpb"


def promise(home, **given):
    """A forecast of the sample run: its own curve, and a level for the gradient's norm."""
    middle = sum(SOURCES.values()) / len(SOURCES)
    curves = {HEAD: lambda step: 0.88 * middle - 1e-4 * step, "grad/norm/total": lambda step: 1 + 0.0 * step}
    sample_forecasts.write(home, "pocket", sample_forecasts.forecast(curves, 1024, **given))


def bands(key):
    """A script: how many filled areas of a chart are on the screen."""
    return f"return document.querySelectorAll('#chart-{key} .scatterlayer path.js-fill').length"


def test_the_verdict_and_its_bands(home, browser):
    """Fails when the verdict, what was registered or the bands are not shown, an early row sets the scale, or news need a reload."""
    promise(home, verdict="behind", at=600, late=57, number=2, witness=["git tag forecast-2"])
    with server.serve(home, "pocket", 0) as address:
        browser.post("/url", url=address + "?live=poll")
        browser.until("return document.getElementById('verdict-word').textContent === 'Behind'")
        told = browser.run("return document.getElementById('judged').innerText")
        for words in ("its forecast since update", "registered late", "late, after 57 updates", "2, in place of 1: a rung was repeated",
                      "recorded: git tag forecast-2", "3fa13fa13fa1", "At the end: mean of sources", "All 2 metrics"):  # fmt: skip
            assert words in told, (words, told)
        assert "3fa1" * 16 not in told
        browser.run("document.querySelector('.hash summary').click()")
        assert "3fa1" * 16 in browser.run("return document.getElementById('registered').innerText")
        for key in ("residual", "heldout", "grad"):
            browser.run(f"document.getElementById('chart-{key}').scrollIntoView()")
            browser.until(drawn(key))
            assert browser.run(bands(key)) == 2, key
        low, high = browser.run("return document.getElementById('chart-heldout').layout.yaxis.range")
        assert 1 < low < high < 3  # the evaluation before the first update is above 5
        assert browser.run("return document.getElementById('chart-residual').getAttribute('aria-label')").endswith("90% band")
        browser.run("window.scrollTo(0, 0); window.kept = true")
        browser.run("page.forecast.verdict.why = {}; besides()")  # what the server cannot know to be damaged
        assert "is not what was written" in browser.run("return document.getElementById('unforecast').innerText")
        promise(home, verdict="off", at=700)
        browser.until("return document.getElementById('verdict-word').textContent === 'Off'")
        assert browser.run("return window.kept && document.getElementById('verdict').className") == "verdict off"
        assert "before the first update" in browser.run("return document.getElementById('judged').innerText")
        (home / "forecasts" / "pocket" / "page.json").write_text("{")
        browser.until("return document.getElementById('unforecast').innerText.includes('is not what was written')")
        assert not browser.run("return document.getElementById('judged').checkVisibility()")
        severe = [text for text in browser.errors() if "400 (Bad Request)" not in text]
        assert severe == []


def test_rungs_come_before_their_hero(home, browser):
    """Fails when a hero without a folder shows no rungs, or its page does not go on by itself once the run begins."""
    sample_forecasts.ladder(home, "hero", small_run(), [("d32", "size"), ("d64", "size")])
    curves = {
        "train/loss": lambda step: 5 - 1e-3 * step,
        "train/router/layer_0/load_max_over_mean": lambda step: 1.5 + 0 * step,
    }
    body = sample_forecasts.forecast({HEAD: lambda step: 2 - 1e-4 * step, **curves}, 1024, verdict=None)
    sample_forecasts.write(home, "hero", body)
    listed = json.loads((home / "ladders" / "hero.json").read_text())["rungs"]
    store.create(home / "runs" / "hero-d32", listed[0]["run"], {"argosy": "0.1.0"})
    with store.open_writer(home / "runs" / "hero-d32", 0) as writer:
        writer.record(512, row(512, 1024) | evaluation(512))
        writer.close("stopped")
    with server.serve(home, "hero", 0) as address:
        browser.post("/url", url=address + "?live=poll")
        browser.until("return document.getElementById('ladder').open")
        assert "0 of 2 rungs finished" in browser.run("return document.getElementById('ladder-title').textContent")
        rows = browser.run("return [...document.querySelectorAll('#rungs tr')].map((row) => row.innerText)")
        assert "d32" in rows[0] and "512 of 1,024" in rows[0] and "Planned, 1,024 updates" in rows[1]
        assert browser.run("return document.querySelector('#rungs a').getAttribute('href')") == "?run=hero-d32"
        assert browser.run("return document.querySelector('#runs optgroup').label") == "ladder of hero"
        assert browser.run("return document.getElementById('verdict-word').textContent") == "Registered"
        browser.until(drawn("loss"))
        browser.until("return document.querySelector('#chart-rates .empty')")  # the last of the charts
        browser.run("document.querySelector('.hash').open = true")
        store.create(home / "runs" / "hero", spec.to_json(small_run()), {"argosy": "0.1.0"})
        with store.open_writer(home / "runs" / "hero", 0) as writer:
            writer.record(1, row(1, 1024))
            browser.until("return document.getElementById('way').textContent.includes('update 1 of 1,024')")
            writer.close("stopped")
        assert browser.run("return document.querySelector('.hash').open")  # what the reader opened stays open
        assert browser.errors() == []


def test_narrow_and_dark(home, browser):
    """Fails when the page is wider than a phone, or stays light where the reader asks for dark."""
    promise(home, verdict="on track", at=600, bridged=True)
    sample_forecasts.ladder(home, "pocket", small_run(), [("d64-small-batch", "small_batch")])
    with server.serve(home, "pocket", 0) as address:
        send = {
            "cmd": "Emulation.setDeviceMetricsOverride",
            "params": {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True},
        }
        browser.post("/goog/cdp/execute", **send)
        send = {
            "cmd": "Emulation.setEmulatedMedia",
            "params": {"features": [{"name": "prefers-color-scheme", "value": "dark"}]},
        }
        browser.post("/goog/cdp/execute", **send)
        browser.post("/url", url=address + "?live=off")
        browser.until(drawn("residual"))
        browser.run("document.getElementById('chart-loss').scrollIntoView()")
        browser.until(drawn("loss"))
        browser.until(drawn("heldout"))
        plot = "return document.querySelector('#chart-heldout .nsewdrag').getBoundingClientRect().height"
        assert browser.run(plot) > 140  # the legend has a row for each source
        browser.run("for (const part of document.querySelectorAll('#ladder, #judged details')) part.open = true")
        assert browser.run("return document.documentElement.scrollWidth") <= 390
        inside = "return document.getElementById('rungs').getBoundingClientRect().right"
        assert browser.run(inside) <= browser.run(inside.replace("rungs", "ladder"))
        ground, ink = browser.run(
            "return [getComputedStyle(document.body).backgroundColor, document.getElementById('chart-loss').layout.font.color]"
        )
        assert ground == "rgb(13, 19, 26)" and ink == "#9aa9b8"
        assert browser.errors() == []


def test_a_hostile_name_is_only_text(home, browser):
    """Fails when what a run recorded is taken for markup."""
    folder = home / "runs" / "planned"
    with store.open_writer(folder, 0) as writer:
        writer.record(1, row(1, 1024) | {"grad/norm/<img src=x onerror=alert(1)>": 1.0})
        writer.record(2, row(2, 1024) | {"grad/norm/<img src=x onerror=alert(1)>": 1.0})
        writer.event("<script>alert(1)</script>", 1, text="<b>bold</b><img src=x onerror=alert(2)>")
    with server.serve(home, "planned", 0) as address:
        browser.post("/url", url=address + "?live=off")
        browser.until(drawn("loss"))
        browser.until("return document.getElementById('happened').innerText.includes('<script>')")
        browser.run("document.getElementById('chart-grad').scrollIntoView()")
        browser.until(drawn("grad"))
        assert browser.run("return document.querySelectorAll('main img, main script').length") == 0
        assert browser.errors() == []

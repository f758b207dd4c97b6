"use strict";
// The live page of a run. Plain functions over one `page` value: load() reads a run, tell() writes words and figures, charts.js draws
// with Plotly, forecast.js adds the forecast and the ladder, watch() follows the run by server-sent events, or by polling where those fail.

const $ = (id) => document.getElementById(id);
const BUCKETS = 700, POLL_MS = 4000, QUIET = ["checkpoint", "baseline", "baseline_whole", "evaluation"];
const KINDS = { baseline: "gzip -9, bits/byte", baseline_whole: "gzip -9, bits/byte, all held-out text" };
const STATES = { planned: "Planned", running: "Running", done: "Done", stopped: "Stopped", failed: "Failed", damaged: "Damaged" };
const page = { name: "", about: null, series: {}, summary: null, axis: "tokens", skew: 0, dirty: new Set(), seen: new Set(), zoom: {}, stop: null, look: null, lost: false, forecast: {}, ladder: {}, mark: "" };
window.argosyErrors = [];
addEventListener("error", (event) => window.argosyErrors.push(String(event.message)));
addEventListener("unhandledrejection", (event) => window.argosyErrors.push(String(event.reason)));

// ---- words and numbers ------------------------------------------------------------------------

const grouped = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

function compact(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (Number(Math.abs(value).toPrecision(3)) >= size) return Number((value / size).toPrecision(3)) + unit;
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3)));
}

function figure(value, unit) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (unit === "share") return (100 * value).toFixed(Math.abs(value) < 0.1 ? 2 : 1) + "%";
  if (unit === "tokens/s") return grouped(value);
  if (unit === "rate") return value.toExponential(2);
  if (unit === "nats/token" || unit === "bits/byte") return value.toFixed(3);
  return String(Number(value.toPrecision(3)));
}

function duration(seconds) {
  if (seconds < 1.5) return "1 second";
  for (const [size, unit] of [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]]) {
    if (seconds < 1.5 * size && size > 1) continue;
    const count = seconds / size;
    const text = count < 9.5 && size >= 3600 ? Number(count.toFixed(1)) : Math.round(count);
    return `${text} ${unit}${text === 1 ? "" : "s"}`;
  }
}

function plain(value) {  // any JSON value in a few words
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return Number.isInteger(value) ? (Math.abs(value) > 1e15 ? value.toExponential(4) : grouped(value)) : Math.abs(value) >= 1e6 ? (Math.abs(value) < 1e15 ? grouped(value) : value.toExponential(4)) : String(Number(value.toPrecision(5)));
  if (Array.isArray(value)) return value.map(plain).join(", ");
  if (typeof value === "object") return Object.entries(value).map(([key, part]) => `${words(key)} ${plain(part)}`).join(", ");
  return String(value);
}

const words = (key) => key.replaceAll("_", " ");
const clock = (seconds) => new Date(seconds * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" });

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) key in made ? (made[key] = value) : made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function fill(node, ...children) {  // leaves alone what is there already, with the reader's focus and what was opened
  const made = node.cloneNode(false);
  made.append(...children);
  if (!made.isEqualNode(node)) node.replaceChildren(...made.childNodes);
}

const pairs = (entries) => element("dl", { className: "pairs" }, ...entries.flatMap(([key, value]) => [element("dt", { textContent: key }), element("dd", { textContent: value })]));

// ---- reading ----------------------------------------------------------------------------------

async function ask(path) {
  const answer = await fetch(path);
  const body = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(body.error), { status: answer.status });
  return body;
}

const runPath = (rest = "") => `api/run/${encodeURIComponent(page.name)}${rest}`;

async function start() {
  const list = await ask("api/runs").catch((error) => ({ runs: [], failed: error }));
  const asked = new URLSearchParams(location.search).get("run");
  if (!list.runs.length && !list.failed) {
    notice("No run is here yet. “argosy voyage pocket” starts one; it appears here by itself.");
    $("name").textContent = "No run yet";
  }
  if (list.failed) notice("The page's server does not answer; the run may have ended. Retrying.");
  if (!list.runs.length) return setTimeout(start, POLL_MS);
  page.name = asked || list.default;
  pick(list);
  await load();
}

function pick({ runs }) {
  $("picker").hidden = runs.length < 2 && runs[0].name === page.name;
  fill($("runs"), ...listed(runs));
  $("runs").value = page.name;
}

function listed(runs) {  // rungs under their hero, so that they do not bury it
  const option = (run) => element("option", { value: run.name, textContent: `${run.name} · ${STATES[run.state].toLowerCase()}` });
  const heroes = new Set(runs.map((run) => run.hero).filter(Boolean)), placed = new Set();
  const group = (hero) => { placed.add(hero); const made = element("optgroup", { label: `ladder of ${hero}` }); made.append(...runs.filter((run) => run.hero === hero).sort((a, b) => a.created - b.created).map(option)); return made; };
  const tops = runs.filter((run) => !run.hero).flatMap((run) => (heroes.has(run.name) ? [option(run), group(run.name)] : [option(run)]));
  return [...tops, ...[...heroes].filter((hero) => !placed.has(hero)).map(group)];
}

async function load() {
  if (page.stop) page.stop();
  const first = !page.about;
  try {
    const about = await ask(runPath());
    const shown = Object.entries(about.metrics).filter(([name, metric]) => metric.panel || name === "throughput/total_tokens").map(([name]) => name);
    const body = shown.length ? await ask(runPath(`/series?buckets=${BUCKETS}&metrics=${encodeURIComponent(shown.join(","))}`)) : { metrics: {} };
    Object.assign(page, { about, series: body.metrics, summary: about.summary, zoom: {}, skew: Date.now() / 1000 - about.now });
    await readForecast();
    if (!first) pick(await ask("api/runs"));
  } catch (error) {
    $("name").textContent = page.name;
    notice(`${error.message}. Trying again.`);
    return setTimeout(load, POLL_MS);
  }
  notice("");
  page.lost = false;
  for (const id of ["tools", "facts", "config-section"]) $(id).hidden = false;
  cards();
  tell();
  besides();
  facts();
  redraw();
  watch(page.about.position);
}

function watch(position) {
  let timer = 0, turn = 0, source = null, fails = 0;
  const every = (look, mine = turn) => {
    timer = setTimeout(async () => {
      try { await look(); } catch (error) {
        if (mine !== turn) return;
        if (error.status) return load();  // a refusal: the run is gone, or is another by now
        lost();
      }
      if (mine === turn) every(look);
    }, POLL_MS);
  };
  const quiet = () => { turn++; clearTimeout(timer); source?.close(); };
  const poll = () => every(async () => {
    const news = await ask(runPath(`/news?after=${encodeURIComponent(position)}`));
    position = news.position;
    apply(news);
  });
  const begins = async () => {
    const about = await ask(runPath());
    if (about.position || about.forecast !== page.mark) return load();
    if (page.lost) { page.lost = false; fresh(); }
  };
  page.stop = () => { quiet(); page.look = null; };
  const asked = new URLSearchParams(location.search).get("live");
  if (asked === "off") return;
  if (!position) return every(begins);  // a hero whose ladder comes first: its folder is not there yet
  // A headless browser takes its picture once no request is open, so it gets no endless one.
  if (asked === "poll" || !window.EventSource || (asked !== "stream" && /Headless/.test(navigator.userAgent))) return poll();
  const listen = () => {
    source = new EventSource(runPath(`/stream?after=${encodeURIComponent(position)}`));
    source.onmessage = (event) => { fails = 0; const news = JSON.parse(event.data); position = news.position; apply(news); };
    source.onerror = () => { lost(); if (++fails === 3 || source.readyState === EventSource.CLOSED) { source.close(); poll(); } };
  };
  page.look = () => { quiet(); document.hidden ? poll() : listen(); };  // a browser has six connections to a host: a hidden page keeps none
  page.look();
}

function apply(news) {  // a connection is told at once what came before it, mostly nothing; some of it may be known
  const { state } = page.summary;
  Object.assign(page, { summary: news.summary, lost: false });
  page.skew = Date.now() / 1000 - news.now;
  const again = news.missed || news.lineage.length || news.rows.some(([, row]) => Object.keys(row).some((name) => !(name in page.series)));
  if (again || Object.values(page.series).some((one) => one.step.length > 3 * BUCKETS)) return load();
  for (const [step, row] of news.rows) {
    for (const [name, value] of Object.entries(row)) {
      const one = page.series[name];
      if (one.step.length && one.step.at(-1) >= step) continue;
      one.step.push(step);
      for (const part of ["mean", "low", "high"]) one[part]?.push(value);
    }
  }
  const key = (event) => `${event.time} ${event.step} ${event.kind}`, known = new Set(news.events.length ? page.about.events.map(key) : []);
  const added = news.events.filter((event) => !known.has(key(event)));
  page.about.events.push(...added);
  tell();
  if (news.forecast !== page.mark) renewForecast(news.forecast);
  if (added.length) facts();
  if (news.rows.length || added.length || state !== page.summary.state) redraw();
}

function lost() { page.lost = true; fresh(); }

// ---- the top of the page ----------------------------------------------------------------------

function notice(text) { $("notice").hidden = !text; $("notice").textContent = text; }

function tell() {
  const { summary, about } = page;
  const run = about.run, total = about.plan?.params?.total, active = about.plan?.params?.active;
  $("name").textContent = page.name;
  $("state").hidden = false;
  $("state").className = `state ${summary.state}`;
  $("state-word").textContent = STATES[summary.state];
  $("shape").textContent = [
    total && `${compact(total)} parameters, ${compact(active)} active per token`,
    run.model && `${run.model.layers} layers of width ${grouped(run.model.width)}`,
    run.moe && `${grouped(run.moe.experts)} experts, ${run.moe.experts_per_token} per token`,
    run.data && `${run.data.corpus} corpus`,
  ].filter(Boolean).join(" · ");
  const share = summary.progress ?? 0;
  $("progress").hidden = summary.progress === null;
  $("progress").setAttribute("aria-valuenow", Math.round(100 * share));
  $("fill").style.width = `${100 * share}%`;
  $("way").textContent = way(summary, share);
  document.title = `${summary.state === "running" ? Math.floor(100 * share) + "% · " : ""}${page.name} · Argosy`;
  if (summary.step === null && summary.state === "running") notice("The run is compiling its program; the first figures appear with its first update.");
  else if (summary.step === null) notice("Nothing was recorded yet. Loss, evaluations, routing and speed appear here with the first updates.");
  else notice("");
  fresh();
  tiles();
}

function way(summary, share) {
  if (summary.step === null) return summary.steps ? `${compact(summary.horizon_tokens)} tokens in ${grouped(summary.steps)} updates are planned` : "";
  const parts = [`${compact(summary.tokens)}${summary.horizon_tokens ? ` of ${compact(summary.horizon_tokens)}` : ""} tokens`, `update ${grouped(summary.step)}${summary.steps ? ` of ${grouped(summary.steps)}` : ""}`];
  if (summary.progress !== null) parts.push(`${Math.floor(100 * share)}%`);
  if (summary.state === "running" && summary.eta_s) parts.push(`about ${duration(summary.eta_s)} left`);
  if (summary.attempts > 1) parts.push(`attempt ${summary.attempts}`);
  return parts.join(" · ");
}

function fresh() {
  if (!page.summary) return;
  if (page.lost) return ($("fresh").textContent = "the server of this page has ended; this is what it last knew");
  const verb = { done: "finished", stopped: "stopped", failed: "failed", planned: "planned", running: "updated" }[page.summary.state];
  $("fresh").textContent = `${verb} ${duration(Math.max(0, Date.now() / 1000 - page.skew - page.summary.updated))} ago`;
}

function tiles() {
  const { about, series } = page;
  const mean = (name, count = 20) => { const all = (series[name]?.mean ?? []).slice(-count).filter((v) => v !== null); return all.length ? all.reduce((a, b) => a + b) / all.length : null; };
  const loss = series["train/cross_entropy_loss"] ? "train/cross_entropy_loss" : "train/loss";
  const macro = Object.keys(series).find((name) => /^eval_dropless\/.+\/macro_bpb$/.test(name));
  const gzip = Object.values(baselines()), gzipMean = gzip.length ? gzip.reduce((a, b) => a + b) / gzip.length : null;
  const bits = macro ? mean(macro, 1) : null;
  const chip = about.plan?.hardware?.label;
  const made = [
    ["Training loss", mean(loss), "nats/token", "mean of the latest updates", loss],
    ["Held-out text", bits, "bits/byte", bits === null ? "after the first evaluation" : gzipMean ? `${Math.abs(100 * (1 - bits / gzipMean)).toFixed(0)}% ${bits < gzipMean ? "below" : "above"} gzip -9 (${gzipMean.toFixed(2)})` : "mean of sources", macro],
    ["Speed", mean("throughput/tokens_per_second"), "tokens/s", about.plan?.time?.tokens_per_s ? `planned ${grouped(about.plan.time.tokens_per_s)}` : "", "throughput/tokens_per_second"],
    ["Use of the hardware", mean("throughput/mfu"), "share", chip ? `of the peak of ${chip}` : "of the peak", "throughput/mfu"],
    ["Dropped", mean("moe/drop_fraction"), "share", "of token-expert pairs", "moe/drop_fraction"],
  ];
  fill($("tiles"), ...made.map(([title, value, unit, note, name]) => {
    const number = element("div", { className: "figure", textContent: figure(value, unit) });
    if (unit !== "share" && value !== null) number.append(element("span", { className: "unit", textContent: unit }));
    const body = element("dd", {}, number, element("div", { className: "note", textContent: value === null && page.summary.step === null ? "not yet" : note }));
    const tile = element("div", { className: "tile" }, element("dt", { textContent: title }), body);
    if (name && series[name]) tile.append(spark(series[name].step, series[name].mean));
    return tile;
  }));
}

function spark(steps, values) {
  const from = 0.05 * steps.at(-1);
  const kept = values.filter((value, i) => value !== null && steps[i] >= from);
  const low = Math.min(...kept), high = Math.max(...kept), every = Math.max(1, Math.floor(kept.length / 90));
  const thin = kept.filter((_, i) => i % every === 0);
  const path = thin.map((value, i) => `${i ? "L" : "M"}${((100 * i) / Math.max(1, thin.length - 1)).toFixed(1)},${(24 - 22 * ((value - low) / (high - low || 1))).toFixed(1)}`).join("");
  const box = document.createElement("template");
  box.innerHTML = `<svg viewBox="0 0 100 26" preserveAspectRatio="none" aria-hidden="true"><path d="${thin.length > 1 ? path : ""}"/></svg>`;
  return box.content.firstChild;
}

// ---- plan, events, configuration --------------------------------------------------------------

function facts() {
  const { run, plan, code, environment, events, lineage } = page.about;
  $("plan").replaceChildren(...planned(plan));
  fill($("happened"), history(events, lineage));
  const groups = Object.entries(run).filter(([, part]) => part && typeof part === "object" && !Array.isArray(part));
  const loose = Object.entries(run).filter(([, part]) => !part || typeof part !== "object");
  const machine = Object.entries(environment ?? {}).filter(([key]) => key !== "packages");
  const packages = Object.entries(environment?.packages ?? {}).filter(([name]) => /^(jax|jaxlib|numpy|optax|orbax-checkpoint|tensorstore|tokenizers)$/.test(name));
  const sections = [["run", [...loose, ["name", page.name]]], ...groups.map(([key, part]) => [key, Object.entries(part)]), ["code", Object.entries(code ?? {})], ["machine", [...machine, ...packages]]];
  $("config").replaceChildren(...sections.map(([title, entries]) => element("section", {}, element("h3", { textContent: words(title) }), pairs(entries.map(([key, value]) => [words(key), key === "phases" ? value.map(phase).join("; ") : plain(value)])))));
  $("footer").replaceChildren("The same log in Python: ", element("code", { textContent: `argosy.track.read("${page.name}").series("train/loss")` }), " · as JSON: ", element("a", { href: runPath(), textContent: runPath() }));
}

function phase({ name, until_frac, weights }) {
  const sum = weights.reduce((total, [, weight]) => total + weight, 0);
  return `${name} to ${Math.round(100 * until_frac)}%: ${weights.map(([source, weight]) => `${source} ${Number(((100 * weight) / sum).toPrecision(2))}%`).join(", ")}`;
}

function planned(plan) {
  if (!plan) return [element("p", { className: "soft", textContent: "This run was started without a plan." })];
  const memory = plan.memory?.per_device_bytes?.device?.total, { params, tokens, flops, time, optim } = plan;
  const short = [
    params && ["parameters", `${grouped(params.total)} in all, ${grouped(params.active)} active per token`],
    page.about.run.data?.phases && ["mixture", page.about.run.data.phases.map(phase).join("; ")],
    tokens && ["tokens", `${grouped(tokens.horizon)} in ${grouped(plan.steps)} updates of ${grouped(tokens.per_step)}`],
    flops && ["compute", `${flops.train_total.toExponential(2)} FLOPs, ${flops.train_step.toExponential(2)} per update`],
    time && ["time", `${duration(86400 * time.days)} at ${grouped(time.tokens_per_s)} tokens/s, ${figure(time.mfu, "share")} of the peak`],
    memory && ["memory", `${(memory / 2 ** 30).toFixed(2)} GiB per device at the fullest moment`],
    optim && ["learning rates", `${optim.muonh_lr?.toPrecision(4)} for matrices, ${optim.adam_lr?.toPrecision(4)} for the Adam group`],
  ].filter(Boolean);
  return [pairs(short), element("details", { className: "tree" }, element("summary", { textContent: "The whole plan" }), element("div", { className: "scroll" }, tree(plan)))];
}

function tree(body) {
  const flat = Object.entries(body).filter(([, part]) => !part || typeof part !== "object" || (Array.isArray(part) && part.every((one) => typeof one !== "object")));
  const deep = Object.entries(body).filter(([key]) => !flat.some(([other]) => other === key));
  const parts = deep.map(([key, part]) => element("details", { className: "tree", open: deep.length < 3 }, element("summary", { textContent: words(Array.isArray(body) ? (part.name ?? key) : key) }), tree(part)));
  return element("div", {}, pairs(flat.map(([key, value]) => [words(key), plain(value)])), ...parts);
}

function history(events, lineage) {
  const told = lineage.map((record) => ({ ...record, text: lineageText(record) }));
  const saves = events.filter((event) => event.kind === "checkpoint").length, newest = events.findLastIndex((event) => event.kind === "checkpoint");
  const noted = events.map((event, i) => ({ ...event, text: (event.kind === "verdict" && event.fields.message ? sentence(event.fields.message) : plain(event.fields)) + (i === newest && saves > 1 ? `; the newest of ${saves}` : "") })).filter((event, i) => event.kind !== "checkpoint" || i === newest);
  const all = [...told, ...noted].sort((a, b) => b.time - a.time).slice(0, 300);
  if (!all.length) return element("p", { className: "soft", textContent: "Attempts, checkpoints, changes and incidents will be listed here." });
  const rows = all.map((record) => element("tr", { className: record.superseded ? "superseded" : "" },
    element("td", { className: "number", textContent: grouped(record.step) }),
    element("td", { textContent: (KINDS[record.kind] ?? words(record.kind)) + (record.superseded ? " (rolled back)" : "") }),
    element("td", { textContent: record.text }),
    element("td", { className: "number soft", textContent: clock(record.time) })));
  const head = element("tr", {}, ...["update", "what", "details", "when"].map((text) => element("th", { scope: "col", textContent: text })));
  return element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Events and lineage" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

function lineageText({ kind, attempt, fields }) {
  if (kind === "attempt") return `attempt ${attempt} began on ${fields.host}${fields.code?.commit ? `, code ${fields.code.commit.slice(0, 10)}${fields.code.dirty ? " with changes" : ""}` : ""}`;
  if (kind === "ended") return `attempt ${attempt}${fields.outcome ? `: ${fields.outcome}` : ""}`;
  if (kind === "corpus") return `${fields.name}, checksum ${String(fields.checksum).slice(0, 16)}`;
  return plain(fields);
}

// ---- beginning --------------------------------------------------------------------------------

for (const input of document.querySelectorAll("input[name=axis]")) input.addEventListener("change", () => { page.axis = input.value; page.zoom = {}; flushed = 0; if (page.about) redraw(); });
$("runs").addEventListener("change", () => { location.search = `?run=${encodeURIComponent($("runs").value)}`; });
$("residual-of").addEventListener("change", () => { residualOf = $("residual-of").value; better(); draw(DISTANCE, $("chart-residual")); });
sight.observe($("chart-residual"));
sizes.observe($("chart-residual"));
addEventListener("beforeprint", () => paper(true));
addEventListener("afterprint", () => paper(false));
$("more").addEventListener("toggle", () => { flushed = 0; if (page.about) redraw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { flushed = 0; if (page.about) redraw(); });
document.addEventListener("visibilitychange", () => { page.look?.(); if (!document.hidden) flush(); });
setInterval(fresh, 1000);
start();

"use strict";
// The live page of a run. Plain functions over one `page` value: load() reads a run, tell() writes words and figures, draw() makes
// charts with Plotly, forecast.js adds the forecast and the ladder to them, watch() follows the run by server-sent events, or by polling where those fail.

const $ = (id) => document.getElementById(id);
const BUCKETS = 700, FLUSH_MS = 2500, POLL_MS = 4000, QUIET = ["checkpoint", "baseline", "baseline_whole", "evaluation"];
const KINDS = { baseline: "gzip -9, bits/byte", baseline_whole: "gzip -9, bits/byte, all held-out text" };
const STATES = { planned: "Planned", running: "Running", done: "Done", stopped: "Stopped", failed: "Failed", damaged: "Damaged" };
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon"];
const page = { name: "", about: null, series: {}, summary: null, axis: "tokens", skew: 0, dirty: new Set(), seen: new Set(), zoom: {}, stop: null, look: null, lost: false, forecast: {}, ladder: {}, mark: "" };
const DISTANCE = { key: "residual", title: "Distance from the forecast", unit: "", style: "residual", scale: "linear", place: "top" };
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

// ---- charts -----------------------------------------------------------------------------------

const named = (panel) => Object.keys(page.about.metrics).filter((name) => page.about.metrics[name].panel === panel.key && page.series[name]?.step.length);
const baselines = () => page.about.events.filter((event) => event.kind === "baseline").at(-1)?.fields ?? {};

function cards() {  // one figure per panel, made once
  if ($("main-charts").children.length) return;
  for (const panel of page.about.panels) {
    const id = `chart-${panel.key}`;
    const chart = element("div", { id, className: "chart", role: "group" });
    const caption = element("figcaption", {}, element("h3", { textContent: panel.title }), element("p", { className: "look", textContent: panel.look }));
    const wide = ["loss", "heldout"].includes(panel.key);
    $(`${panel.place}-charts`).append(element("figure", { className: `card${wide ? " wide" : ""}` }, caption, chart));
    sight.observe(chart);
    sizes.observe(chart);
  }
}

let resizing = 0;
const sizes = new ResizeObserver((entries) => {  // also of a neighbour in the row, a fold, a turned phone
  for (const { target, contentRect: { width, height } } of entries) {
    const now = target.layout;
    if (now && width && (Math.abs(now.width - width) > 1 || Math.abs(now.height - height) > 1)) page.dirty.add(target.id.replace("chart-", ""));
  }
  clearTimeout(resizing);
  resizing = setTimeout(flush, 80);
});

const sight = new IntersectionObserver((entries) => {  // only what is on the screen is drawn
  for (const entry of entries) page.seen[entry.isIntersecting ? "add" : "delete"](entry.target.id);
  flush();
}, { rootMargin: "300px" });

let waiting = 0, flushed = 0;
function redraw() {
  for (const panel of [DISTANCE, ...page.about.panels]) page.dirty.add(panel.key);
  $("more").hidden = !page.about.panels.some((panel) => panel.place === "more" && named(panel).length);
  if (!waiting) waiting = setTimeout(flush, Math.max(0, flushed + FLUSH_MS - Date.now()));
}

function flush() {
  waiting = 0;
  if (!page.about || document.hidden) return;
  flushed = Date.now();
  for (const panel of shown()) {
    if (!page.dirty.has(panel.key) || !page.seen.has(`chart-${panel.key}`)) continue;
    page.dirty.delete(panel.key);
    draw(panel, $(`chart-${panel.key}`));
  }
}

const shown = () => [...(page.forecast.bands ? [DISTANCE] : []), ...page.about.panels];

function paper(printed) {  // what is printed is light, as narrow as a sheet, and has all its charts
  if (!page.about) return;
  if (printed) document.documentElement.dataset.paper = ""; else delete document.documentElement.dataset.paper;
  for (const panel of shown()) if ($(`chart-${panel.key}`).checkVisibility()) draw(panel, $(`chart-${panel.key}`));
}

function across(step) {  // a step's place on the horizontal axis
  if (page.axis === "step") return step;
  if (page.axis === "share") return step / (page.summary.steps || 1);
  const { step: steps, mean } = page.series["throughput/total_tokens"] ?? { step: [], mean: [] };
  if (!steps.length) return step * (page.about.run.data ? page.about.run.data.batch_seqs * page.about.run.data.seq_len : 1);
  let low = 0, high = steps.length - 1;
  while (low < high) { const middle = (low + high) >> 1; steps[middle] < step ? (low = middle + 1) : (high = middle); }
  const [a, ta] = low ? [steps[low - 1], mean[low - 1]] : [0, 0];
  return steps[low] === a ? mean[low] : ta + ((mean[low] - ta) * (step - a)) / (steps[low] - a);
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const faint = (hex, alpha) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;

function sourceColor(label) {  // a source has one colour and one symbol everywhere
  const known = [...new Set([...(page.about.run.data?.phases ?? []).flatMap((phase) => phase.weights.map(([name]) => name)), ...Object.keys(baselines()).sort()])];
  const at = known.indexOf(label.split("/").at(-1));
  return at < 0 ? known.length : at;
}

function smoothed(values) {  // mean over the 2% of the points around each
  const half = Math.max(1, Math.round(values.length / 100)), sums = [0], counts = [0];
  for (const value of values) { sums.push(sums.at(-1) + (value ?? 0)); counts.push(counts.at(-1) + (value === null ? 0 : 1)); }
  return values.map((_, i) => {
    const reach = Math.min(half, i, values.length - 1 - i), from = i - reach, to = i + reach + 1;
    return counts[to] > counts[from] ? (sums[to] - sums[from]) / (counts[to] - counts[from]) : null;
  });
}

function lineOf(name, panel, style, values) {
  const one = page.zoom[panel.key]?.[name] ?? page.series[name];
  const unit = panel.unit, scale = panel.key === "entropy" ? 1 / Math.log(page.about.run.moe?.experts || Math.E) : 1;
  const y = values ?? one.mean.map((value) => (value === null ? null : value * scale));
  return { type: "scatter", mode: "lines", x: one.step.map(across), y, name: words(page.about.metrics[name].label), line: { width: 1.6, ...style }, hovertemplate: `%{y:${unit === "share" ? ".2%" : ",.4~g"}}`, connectgaps: false };
}

const STYLES = {
  smooth(panel, all) {
    const made = [], judged = banded(panel), names = [...all].sort((a, b) => (b === judged) - (a === judged));
    names.forEach((name, i) => {
      const hue = color(`c${i}`), raw = lineOf(name, panel, { color: faint(hue, 0.3), width: 1 });
      const silent = { showlegend: false, hoverinfo: "skip", hovertemplate: undefined }, { low, high } = page.zoom[panel.key]?.[name] ?? page.series[name];
      if (i === 0 && low) made.push({ ...raw, ...silent, y: low, line: { width: 0 } }, { ...raw, ...silent, y: high, line: { width: 0 }, fill: "tonexty", fillcolor: faint(hue, 0.25) });
      else if (i === 0) made.push({ ...raw, ...silent });
      made.push({ ...lineOf(name, panel, { color: hue, width: i ? 1.4 : 2.4 }, smoothed(raw.y)), visible: i ? "legendonly" : true });
    });
    return { data: made };
  },
  sources(panel, names) {
    const gzip = panel.key === "heldout" ? baselines() : {}, shapes = [], judged = banded(panel);
    const data = names.map((name) => {
      const label = page.about.metrics[name].label, overall = label === "mean of sources", at = sourceColor(label);
      const hue = overall ? color("ink") : color(`c${at % 8}`);
      const made = lineOf(name, panel, { color: hue, width: overall ? 2.6 : judged ? 1.2 : 1.8 });
      if (judged && !overall) made.opacity = 0.6;
      if (made.x.length < 60 && (overall || !judged)) Object.assign(made, { mode: "lines+markers", marker: { symbol: overall ? "circle-open" : SYMBOLS[at % 8], size: 7 } });
      made.name = `${label} ${figure(made.y.at(-1), panel.unit)}${label in gzip ? `, gzip ${gzip[label].toFixed(3)}` : ""}`;
      if (label in gzip) shapes.push(level(gzip[label], faint(hue, 0.75), "dash"));
      return made;
    });
    return { data, shapes, include: judged ? [] : Object.values(gzip) };
  },
  lines(panel, names) {
    let at = 0;
    const data = names.map((name) => {
      if (/total$/.test(name) && names.length > 1) return lineOf(name, panel, { color: color("ink"), width: 2.4 });
      const turn = at++;
      return lineOf(name, panel, { color: color(`c${turn % 8}`), dash: turn < 8 ? "solid" : "dot" });
    });
    const marks = references(panel);
    const annotations = marks.map(([y, text], i) => ({ xref: "paper", x: 1 - (i % 2), xanchor: i % 2 ? "left" : "right", y, yanchor: "bottom", text, showarrow: false, bgcolor: faint(color("card"), 0.75), borderpad: 0, font: { size: 11, color: color("soft") } }));
    return { data, annotations, shapes: marks.map(([y]) => level(y, color("soft"), "dash")), include: marks.map(([y]) => y) };
  },
  band(panel, names) {
    const [low, high] = names.map((name) => lineOf(name, panel, { color: color("c0"), width: 1.3 }));
    if (!high) return { data: [low] };
    return { data: [low, { ...high, fill: "tonexty", fillcolor: faint(color("c0"), 0.16) }] };
  },
  heat(panel, names) {
    const layers = names.sort((a, b) => Number(page.about.metrics[a].label) - Number(page.about.metrics[b].label)).map((name) => page.zoom.heat?.[name] ?? page.series[name]);
    const steps = layers[0].step, late = layers.flatMap((one) => one.mean.filter((value, i) => value !== null && one.step[i] >= 0.05 * steps.at(-1))).sort((a, b) => a - b);
    const data = [{ type: "heatmap", x: steps.map(across), y: names.map((name) => page.about.metrics[name].label), z: layers.map((one) => one.mean), zmin: 1, zmax: Math.max(1.05, late[Math.floor(0.99 * (late.length - 1))] ?? 2), colorscale: "Cividis", reversescale: false, colorbar: { thickness: 10, outlinewidth: 0, tickfont: { size: 11 } }, hovertemplate: "layer %{y}: %{z:.3f} times the mean<extra></extra>" }];
    return { data, layout: { yaxis: { type: "category", title: { text: "layer", font: { size: 12 } } } } };
  },
};

const level = (y, hue, dash) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: hue, width: 1.3, dash }, layer: "below" });

function references(panel) {  // what a figure is to be compared with
  const { run, plan } = page.about, marks = [];
  if (panel.key === "load") {
    marks.push([1, "perfect balance"]);
    if (run.routing?.capacity === "bounded" && run.routing.exchange !== "dense") marks.push([run.routing.receiver_capacity, "room for an expert"]);
  }
  if (panel.key === "speed" && plan?.time?.tokens_per_s) marks.push([plan.time.tokens_per_s, "planned"]);
  if (panel.key === "mfu" && plan?.time?.mfu) marks.push([plan.time.mfu, "planned"]);
  return marks;
}

function frame(panel, { data, include, from: begins, until }) {  // vertical range: the run after its first 5%; a double click shows all
  const zero = ["tokens/s", "s", "GiB", "rate"].includes(panel.unit) || ["drops", "mfu"].includes(panel.key);
  let low = zero ? 0 : Infinity, high = -Infinity;
  for (const trace of data) {
    const early = trace.x.length > 20 ? 0.05 * trace.x.at(-1) : trace.x.length > 4 ? trace.x[1] : -1;
    const from = begins !== undefined && trace.x.at(-1) >= begins ? Math.max(early, 0.999 * begins) : early;
    const kept = trace.y.filter((y, i) => Number.isFinite(y) && y !== null && trace.x[i] >= from && !(trace.x[i] > 1.001 * until) && (panel.scale !== "log" || y > 0)).sort((a, b) => a - b);
    if (!kept.length) continue;
    low = Math.min(low, kept[Math.floor(0.002 * (kept.length - 1))]);
    high = Math.max(high, kept[Math.ceil(0.998 * (kept.length - 1))]);
  }
  for (const y of include ?? []) { low = Math.min(low, y); high = Math.max(high, y); }
  if (!(high >= low)) return undefined;
  if (panel.scale === "log") return [Math.log10(low) - 0.1, Math.log10(high) + 0.15];
  const pad = 0.07 * (high - low || Math.abs(high) || 1);
  return [zero && low === 0 ? 0 : low - pad, high + pad];
}

function decades([low, high]) {  // 1, 2, 5 in each power of ten, or the powers alone where there are many
  const marks = high - low > 2.2 ? [1] : high - low > 1.2 ? [1, 3] : [1, 2, 5], found = [];
  for (let power = Math.floor(low); power <= high; power++) found.push(...marks.map((mark) => Number((mark * 10 ** power).toPrecision(1))));
  return found.filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
}

function moments() {  // what happened, as lines through every chart
  const notable = page.about.events.filter((event) => !event.superseded && !QUIET.includes(event.kind) && event.step > 0).map((event) => [event.step, event.kind === "verdict" ? words(`${event.fields.verdict || "no verdict"}`) : words(event.kind)]);
  const begun = page.about.attempts.filter((attempt) => attempt.at_step > 0).map((attempt) => [attempt.at_step, `attempt ${attempt.number}`]);
  const joined = new Map();
  for (const [step, text] of [...notable, ...begun].slice(-40)) joined.set(step, joined.has(step) ? `${joined.get(step)}, ${text}` : text);
  return [...joined].sort((a, b) => a[0] - b[0]);
}

function draw(panel, place) {
  if (panel === DISTANCE) return plot(panel, place, residual(place));
  const names = named(panel), recorded = page.summary.step !== null;
  place.closest("figure").hidden = !names.length && recorded && (panel.place === "more" || panel.key === "heat");
  if (!names.length && !banded(panel)) {
    Plotly.purge(place);
    const over = recorded && page.summary.state !== "running";
    const text = over ? "Nothing of this was recorded." : panel.style === "sources" ? "The first evaluation of held-out text will be drawn here." : `${panel.title} will be drawn here from the first update on.`;
    place.setAttribute("aria-label", text);
    return place.replaceChildren(element("p", { className: "empty", textContent: text }));
  }
  place.querySelector(".empty")?.remove();
  plot(panel, place, underlay(panel, STYLES[panel.style](panel, names)));
  place.setAttribute("aria-label", `${panel.title}. ${names.slice(0, 8).map((name) => `${page.about.metrics[name].label}: ${figure(page.series[name].mean.at(-1), panel.key === "entropy" ? "" : panel.unit)} ${panel.unit === "share" ? "" : panel.unit}`).join("; ")}`);
  if (!place.zooms) { place.zooms = true; place.on("plotly_relayout", (change) => zoomed(panel, place, change)); }
}

function plot(panel, place, made) {
  const happened = moments(), legend = made.data.filter((trace) => trace.showlegend !== false && trace.type !== "heatmap");
  const lines = happened.map(([step]) => ({ type: "line", yref: "paper", y0: 0, y1: 1, x0: across(step), x1: across(step), line: { color: faint(color("soft"), 0.55), width: 1, dash: "dot" }, layer: "below" }));
  const furthest = made.until ?? Math.max(0, ...made.data.map((trace) => trace.x?.at(-1) ?? 0)), told = [];
  for (const [step, text] of happened) {  // names that would lie on each other are counted with the first
    if (told.length && across(step) - across(told.at(-1).step) < 0.035 * furthest) told.at(-1).more++; else told.push({ step, text, more: 0 });
  }
  const labels = panel.style !== "smooth" ? [] : told.map(({ step, text, more }) => ({ x: across(step), yref: "paper", y: 1, yanchor: "top", xanchor: "left", textangle: 90, text: more ? `${text} and ${more} more` : text, showarrow: false, font: { size: 11, color: color("soft") } }));
  place.style.setProperty("--rows", Math.max(0, rowsOf(legend.map((trace) => trace.name.length), place.clientWidth, panel.style === "lines") - 2));
  const axis = { gridcolor: color("line"), linecolor: color("line"), zeroline: false, automargin: true, tickfont: { size: 11.5 } };
  const layout = {
    width: place.clientWidth, height: place.clientHeight, margin: { l: 48, r: 12, t: 6, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: color("soft") },
    hovermode: "x unified", hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink"), size: 12.5 } },
    showlegend: legend.length > 1, legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom", itemwidth: 30, ...(legend.length > 4 && panel.style === "lines" ? { font: { size: 11 }, entrywidth: entry(Math.max(...legend.map((trace) => trace.name.length))) } : { font: { size: 12 } }) },
    xaxis: { ...axis, showgrid: false, ticks: "outside", tickcolor: color("line"), title: { text: { tokens: "tokens", step: "update", share: "share of the run" }[page.axis], font: { size: 12 }, standoff: 6 }, exponentformat: "B", rangemode: "nonnegative", ...(page.axis === "share" ? { tickformat: ".0%", hoverformat: ".1%" } : page.axis === "step" ? { tickformat: ",d" } : {}), nticks: 7, range: made.until === undefined ? undefined : [0, made.until] },
    yaxis: { ...axis, type: panel.scale === "log" && panel.style !== "heat" ? "log" : undefined, tickformat: panel.unit === "share" ? "~%" : "~g", range: panel.style === "heat" ? undefined : frame(panel, made), nticks: 6, minor: { showgrid: false } },
    shapes: [...(made.shapes ?? []), ...lines], annotations: [...(made.annotations ?? []), ...labels], modebar: { bgcolor: "rgba(0,0,0,0)", color: color("soft"), activecolor: color("accent") }, uirevision: `${page.name} ${page.axis}`, dragmode: "zoom",
  };
  if (panel.unit === "tokens/s") layout.yaxis.tickformat = "~s";
  if (layout.yaxis.type === "log" && layout.yaxis.range) Object.assign(layout.yaxis, { tickmode: "array", tickvals: decades(layout.yaxis.range) });
  for (const [key, value] of Object.entries(made.layout ?? {})) Object.assign(layout[key], value);
  const config = { displaylogo: false, doubleClick: "reset+autosize", plotlyServerURL: "", displayModeBar: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d", "autoScale2d"]], toImageButtonOptions: { filename: `${page.name} ${panel.key}`, scale: 2 } };
  Plotly.react(place, made.data, layout, config);
}

const entry = (letters) => Math.max(62, Math.ceil(6.3 * letters));

function rowsOf(letters, width, lines) {  // how many rows a legend will have, so that they do not take the room of the curves
  const wide = lines && letters.length > 4 ? entry(Math.max(...letters)) + 36 : 7 * Math.max(...letters, 0) + 44, room = width - 60;
  return lines && letters.length > 4 || letters.reduce((sum, count) => sum + 7 * count + 44, 0) > room ? Math.ceil(letters.length / Math.max(1, Math.floor(room / wide))) : 1;
}

async function zoomed(panel, place, change) {  // a closer look reads finer buckets
  const whole = () => { if (page.zoom[panel.key]) { delete page.zoom[panel.key]; draw(panel, place); } };
  if (change["xaxis.autorange"]) return whole();
  const from = change["xaxis.range[0]"], to = change["xaxis.range[1]"];
  const names = named(panel).filter((name) => page.series[name].low);
  if (from === undefined || !names.length) return;
  const steps = page.series[names[0]].step, inside = steps.filter((step) => across(step) >= from && across(step) <= to);
  if (inside.length > 0.9 * steps.length) return whole();
  if (inside.length < 2) return;
  const margin = inside.at(-1) - inside[0];
  const body = await ask(runPath(`/series?buckets=${2 * BUCKETS}&from=${Math.max(0, inside[0] - margin)}&to=${inside.at(-1) + margin}&metrics=${encodeURIComponent(names.join(","))}`));
  page.zoom[panel.key] = body.metrics;
  draw(panel, place);
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

"use strict";
// The forecast of a run and its ladder: the verdict in words, bands under the charts, the distance from the forecast, the rungs.
// Everything is read from /api/run/<name>/forecast and /ladder into page.forecast and page.ladder.

const VERDICTS = {  // word, what follows it, and the icon's path in a box of 24
  ahead: ["Ahead", "of its forecast", "M6 13l6-6 6 6M6 19l6-6 6 6"],
  "on track": ["On track", "within its forecast", "M5 12.5l5 5L19 7"],
  behind: ["Behind", "its forecast", "M6 11l6 6 6-6M6 5l6 6 6-6"],
  off: ["Off", "its forecast", "M6 6l12 12M18 6L6 18"],
  "not comparable": ["Not comparable", "with its forecast", "M5 9h14M5 15h14M16 4L8 20"],
  none: ["Registered", "no evaluation has been judged yet", "M7 4v17M7 5h11l-3 4 3 4H7"],
};
const PURPOSES = { size: "a smaller model", small_batch: "smaller batch: tells updates from tokens apart", seed: "another seed: tells luck" };
const LADDER_MS = 5000;
let ladderTimer = 0, residualOf = "";

const verdictOf = () => page.forecast?.verdict ?? null;
const percent = (value) => (value === null || value === undefined || !Number.isFinite(value) ? "–" : `${value >= 0 ? "+" : "−"}${Math.abs(100 * value).toFixed(Math.abs(value) < 0.0995 ? 2 : 1)}%`);
const part = (step) => (page.summary?.steps ? `${Math.round((100 * step) / page.summary.steps)}%` : `update ${grouped(step)}`);
const judgedName = (name) => { const known = page.forecast.metrics?.[name]; return known?.panel ? `${panelTitle(known.panel)}: ${words(known.label)}` : words(name.replace(/^train\/router\/layer_(\d+)\//, "Layer $1: ")); };
const panelTitle = (key) => page.about.panels.find((panel) => panel.key === key)?.title ?? key;
const fixedTo = (value, unit) => (unit === "bits/byte" || unit === "nats/token" ? (Number.isFinite(value) && value !== null ? value.toFixed(4) : "–") : figure(value, unit));

// ---- reading ----------------------------------------------------------------------------------

async function readForecast() {
  page.mark = page.about.forecast;
  const [forecast, ladder] = await Promise.all(["/forecast", "/ladder"].map((rest) => ask(runPath(rest)).catch((error) => ({ failed: error.message }))));
  Object.assign(page, { forecast, ladder });
}

async function renewForecast(mark) {  // news of the forecast or the ladder
  page.about.forecast = mark;
  await readForecast();
  besides();
  redraw();
}

function besides() {  // the run is followed all the same where a file of its forecast or ladder is not what it should be
  try { judgement(); } catch (error) {
    page.forecast = { failed: `The forecast's file is not what was written (${error.message}); argosy forecast judge ${page.name} writes it again.` };
    judgement();
  }
  rungs();
}

// ---- the card ---------------------------------------------------------------------------------

function judgement() {
  const { forecast, about } = page, has = Boolean(forecast?.bands);
  $("of-ladder").hidden = !about.hero;
  if (about.hero) $("of-ladder").replaceChildren("A rung of the ladder of ", element("a", { href: `?run=${encodeURIComponent(about.hero)}`, textContent: about.hero }));
  $("judged").hidden = !has;
  const silent = about.hero || page.summary.state === "damaged";
  $("unforecast").hidden = has || Boolean(silent);
  $("unforecast").textContent = forecast?.failed ?? "No forecast is registered for this run, so nothing judges it.";
  $("unforecast").classList.toggle("broken", Boolean(forecast?.failed));
  if (!has) return;
  const verdict = verdictOf(), kind = verdict?.verdict in VERDICTS ? verdict.verdict : "none", [word, rest, path] = VERDICTS[kind];
  $("verdict").className = `verdict ${kind.replaceAll(" ", "-")}`;
  $("verdict-icon").firstElementChild.setAttribute("d", path);
  $("verdict-word").textContent = word;
  const since = verdict?.since_step;
  $("verdict-since").textContent = rest + (since !== null && since !== undefined ? ` since update ${grouped(since)} (${part(since)})` : "");
  const marks = [forecast.forecast.late && ["late", "registered late"], forecast.forecast.bridged && ["bridged", "bridged"]].filter(Boolean);
  $("verdict-marks").replaceChildren(...marks.map(([kind_, text]) => element("span", { className: `chip ${kind_}`, textContent: text })));
  $("verdict-why").textContent = verdict?.differences?.length ? "The run is not the one that was registered, so its figures say nothing about the forecast:" : verdict?.why ? sentence(verdict.why) : "The bands were fixed from small runs; each evaluation will be held against them.";
  differences(verdict?.differences ?? []);
  $("end").replaceChildren(...ends(verdict?.end));
  fill($("registered"), ...registration(forecast.forecast));
  judgedMetrics(verdict?.metrics ?? {});
  choices();
}

const named_ = (text) => Object.keys(page.forecast.metrics ?? {}).sort((a, b) => b.length - a.length).reduce((told, name) => told.replaceAll(name, judgedName(name)), text);
const sentence = (text) => capital(named_(text));
const capital = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!]$/.test(text) ? "" : ".");

function differences(found) {
  $("differences").hidden = !found.length;
  $("differences").replaceChildren(...found.map((one) => element("li", { textContent: plain(one) })));
}

function ends(end) {  // registered and updated forecast of the end on one scale, with what was last measured
  const { forecast } = page, name = forecast.headline, band = forecast.bands[name], unit = forecast.metrics[name]?.unit ?? "";
  const last = band ? band.mean.length - 1 : -1;
  const registered = end?.registered ?? (last >= 0 ? Object.fromEntries(["mean", "lo90", "hi90"].map((key) => [key, band[key][last]])) : null);
  if (!registered || registered.mean === null || !forecast.metrics[name]) return [];
  const one = page.series[name], measured = one?.mean.at(-1) ?? null, over = page.summary.progress === 1;
  const rows = [["registered", registered], ...(end?.updated && !over ? [["updated by the run", end.updated]] : []), ...(measured !== null && over ? [["measured", { mean: measured }]] : [])];
  const values = rows.flatMap(([, row]) => [row.mean, row.lo90, row.hi90]).filter((value) => value !== undefined && value !== null);
  const low = Math.min(...values), high = Math.max(...values), pad = 0.12 * (high - low || 1);
  const place = (value) => Math.max(0, Math.min(100, (100 * (value - low + pad)) / (high - low + 2 * pad)));
  const made = rows.map(([label, row]) => {
    const bar = element("div", { className: "span", ariaHidden: "true" });
    if (row.lo90 !== undefined) {
      const body = element("div", { className: "body" });
      Object.assign(body.style, { left: `${place(row.lo90)}%`, width: `${place(row.hi90) - place(row.lo90)}%` });
      bar.append(body);
    }
    const tick = element("div", { className: row.lo90 === undefined ? "tick point" : "tick" });
    tick.style.left = `${place(row.mean)}%`;
    bar.append(tick);
    const text = fixedTo(row.mean, unit) + (row.lo90 !== undefined ? ` (${fixedTo(row.lo90, unit)} to ${fixedTo(row.hi90, unit)})` : "");
    return element("div", { className: `row ${label.split(" ")[0]}` }, element("dt", { textContent: label }), element("dd", {}, bar, element("span", { textContent: text })));
  });
  const expected = measured === null || over ? null : between(band, one.step.at(-1));
  if (measured !== null && !over) made.push(element("div", { className: "row" }, element("dt", { textContent: `measured at ${part(one.step.at(-1))}` }), element("dd", { className: "alone", textContent: fixedTo(measured, unit) + (expected ? `, ${percent(measured / expected - 1)} from the forecast for then, ${fixedTo(expected, unit)}` : "") })));
  return [element("h3", { textContent: `At the end: ${page.forecast.metrics[name].label}, ${unit}, with 90% bands` }), element("dl", { className: "spans" }, ...made)];
}

function registration(about) {  // who promised what, when
  const when = about.created ? new Date(about.created).toLocaleString("en-GB", { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", timeZone: "UTC" }) + " UTC" : "at an unknown time";
  const updates = about.late && typeof about.late === "object" ? about.late.updates : about.late;
  const late = Boolean(about.late);
  const lines = [["registered", [`${when}, `, element("strong", { className: late ? "late" : "", textContent: about.bridged && about.when ? about.when : late ? `late, after ${Number.isFinite(updates) && updates !== true ? `${grouped(updates)} updates` : "the first update"}` : "before the first update" })]]];
  if (about.number > 1 || about.supersedes) lines.push(["number", [`${about.number}, in place of ${about.number > 1 ? about.number - 1 : "an earlier one"}${about.reason ? `: ${about.reason}` : ""}`]]);
  if (about.bridged) lines.push(["bridged", [element("strong", { textContent: "over a change" }), ": bands shifted by its measured effect and widened", ...(typeof about.bridged === "object" ? [`; ${plain(about.bridged)}`] : [])]]);
  lines.push(["witness", about.witness_damaged ? [about.witness_damaged] : witnesses(about.witness)]);
  if (about.sha256) lines.push(["SHA-256", [element("details", { className: "hash", open: Boolean(document.querySelector(".hash")?.open) }, element("summary", { title: about.sha256 }, element("code", { textContent: `${about.sha256.slice(0, 12)}…` })), element("code", { textContent: about.sha256 }))]]);
  return lines.flatMap(([key, parts]) => [element("dt", { textContent: key }), element("dd", {}, ...parts)]);
}

function witnesses(found) {
  const all = (Array.isArray(found) ? found : found ? [found] : []).map((one) => (typeof one === "string" ? one : (one.at ?? one.where ?? plain(one))));
  return [all.length ? `recorded: ${all.join("; ")}` : "none outside this store is recorded"];
}

function judgedMetrics(found) {
  const order = ["off", "behind", "ahead", "on track"], place = (name) => (order.includes(found[name].verdict) ? order.indexOf(found[name].verdict) : order.length);
  const names = Object.keys(page.forecast.metrics).filter((name) => name in found).sort((a, b) => place(a) - place(b));  // worst first
  $("judged-metrics").hidden = names.length < 2;
  $("judged-count").textContent = `All ${names.length} metrics held against their bands`;
  const rows = names.map((name) => {
    const one = found[name], unit = page.forecast.metrics[name]?.unit ?? "", kind = one.verdict in VERDICTS ? one.verdict : "none";
    const cells = [fixedTo(one.actual, unit), fixedTo(one.mean, unit), `${fixedTo(one.lo90, unit)}\u00a0to ${fixedTo(one.hi90, unit)}`, Number.isFinite(one.widths_out) ? (one.widths_out ? `${one.widths_out > 0 ? "+" : "−"}${Math.abs(one.widths_out).toFixed(2)}` : "0") : "–", Number.isFinite(one.since_step) ? grouped(one.since_step) : ""];
    return element("tr", {}, element("th", { scope: "row", title: name }, judgedName(name), element("span", { className: "soft", textContent: ["", "share", "norm"].includes(unit) ? "" : `, ${unit}` })), element("td", {}, element("span", { className: `word ${kind.replaceAll(" ", "-")}`, textContent: one.verdict ?? "–" })),
      ...cells.map((cell, i) => element("td", { className: [0, 2].includes(i) ? "number" : "number wide-only", textContent: cell })));
  });
  fill($("judged-rows"), ...rows);
}

// ---- bands under the charts -------------------------------------------------------------------

const BANDED = ["smooth", "sources", "lines"];  // how a chart must be drawn to have a band below its curves
const banded = (panel) => (BANDED.includes(panel.style) ? Object.keys(page.forecast?.metrics ?? {}).find((name) => page.forecast.metrics[name].panel === panel.key) : undefined);

function placeOf(name, steps, i) {  // metrics of every update are means since the step before: drawn in the middle
  if (name.startsWith("eval_")) return across(steps[i]);
  return across(steps[i] - (i ? steps[i] - steps[i - 1] : (steps[1] ?? steps[0]) - steps[0]) / 2);
}

function bandTraces(name, scale = 1, over = null, most = Infinity) {  // `over`: draw shares of the mean, less 1, in place of values
  const band = page.forecast.bands[name], kept = band.step.map((_, i) => i).filter((i) => band.mean[i] !== null);
  const x = kept.map((i) => (over ? across(band.step[i]) : placeOf(name, band.step, i))), pick = (key) => kept.map((i) => (band[key][i] === null ? null : over ? band[key][i] / band.mean[i] - 1 : Math.min(most, band[key][i] * scale)));
  const base = { type: "scatter", mode: "lines", x, line: { width: 0 }, showlegend: false, hoverinfo: "skip", legendgroup: "forecast" };
  const hue = color("c6"), lows = pick("lo90"), highs = pick("hi90"), template = over ? "+.2%" : ",.5~g";
  return [
    { ...base, y: lows }, { ...base, y: highs, fill: "tonexty", fillcolor: faint(hue, 0.2) },
    { ...base, y: pick("lo50") }, { ...base, y: pick("hi50"), fill: "tonexty", fillcolor: faint(hue, 0.28) },
    { ...base, y: pick("mean"), line: { width: 1.1, color: hue }, name: "forecast", showlegend: !over, hoverinfo: undefined, customdata: lows.map((low, i) => [low, highs[i]]), hovertemplate: over ? "band %{customdata[0]:+.2%} to %{customdata[1]:+.2%}<extra></extra>" : `%{y:${template}}, 90%: %{customdata[0]:${template}} to %{customdata[1]:${template}}` },
  ];
}

function updatedTrace(name, scale = 1, over = null) {  // what is left of the run, by its own curve
  const found = page.forecast.updated?.[name], from = verdictOf()?.metrics?.[name]?.step ?? page.series[name]?.step.at(-1) ?? -1;
  if (!found?.step?.length || !found.mean) return [];
  const kept = found.step.map((_, i) => i).filter((i) => found.step[i] > from && found.mean[i] !== null);
  if (!kept.length) return [];
  const base = (step) => between(page.forecast.bands[name], step);
  return [{ type: "scatter", mode: "lines", x: kept.map((i) => (over ? across(found.step[i]) : placeOf(name, found.step, i))), y: kept.map((i) => (over ? found.mean[i] / base(found.step[i]) - 1 : found.mean[i] * scale)), name: "updated", line: { width: 1.8, dash: "dash", color: color("c3") }, hovertemplate: over ? "updated %{y:+.2%}<extra></extra>" : "%{y:,.5~g}" }];
}

function between(band, step, key = "mean") {  // a column of the band at a step, null outside
  const at = band.step.findIndex((one) => one >= step), column = band[key];
  if (at < 0 || column[at] === null) return null;
  if (band.step[at] === step) return column[at];
  if (!at || column[at - 1] === null) return null;
  return column[at - 1] + ((column[at] - column[at - 1]) * (step - band.step[at - 1])) / (band.step[at] - band.step[at - 1]);
}

function underlay(panel, made) {  // adds a chart's band below its curves; where it begins, charts begin to count
  const name = banded(panel);
  if (!name) return made;
  const scale = panel.key === "entropy" ? 1 / Math.log(page.about.run.moe?.experts || Math.E) : 1, band = page.forecast.bands[name];
  const at = band.mean.findIndex((mean) => mean !== null), first = band.step[at];
  if (at < 0) return made;
  const { step, steps, progress } = page.summary;
  const until = panel.key.startsWith("heldout") || progress === null || progress > 0.85 ? steps : Math.max(1.2 * step, 1.5 * first);
  return { ...made, data: [...bandTraces(name, scale, null, panel.unit === "share" ? 1 : Infinity), ...made.data, ...updatedTrace(name, scale)], from: placeOf(name, band.step, at), until: until ? across(until) : undefined };
}

// ---- the distance from the forecast -----------------------------------------------------------

function distances(name) {
  const told = verdictOf()?.metrics?.[name]?.residual;
  if (told?.length) return told;
  const one = page.series[name], band = page.forecast.bands[name];
  return one ? one.step.map((step, i) => [step, one.mean[i] === null ? null : between(band, step)]).map(([step, mean], i) => [step, mean ? one.mean[i] / mean - 1 : null]).filter(([, value]) => value !== null) : [];
}

function choices() {
  const judged = verdictOf()?.metrics ?? {}, { metrics, headline } = page.forecast;
  const names = Object.keys(metrics).filter((name) => name === headline || judged[name]?.residual?.length);
  if (!names.includes(residualOf)) residualOf = names.includes(headline) ? headline : (names[0] ?? Object.keys(metrics)[0] ?? "");
  fill($("residual-of"), ...(names.length ? names : [residualOf]).map((name) => element("option", { value: name, textContent: judgedName(name) })));
  $("residual-of").value = residualOf;
  better();
}

function better() {
  const known = page.forecast.metrics[residualOf];
  $("better").textContent = ["nats/token", "bits/byte"].includes(known?.unit) ? " Of losses, below 0 is better." : "";
}

function residual(place) {
  const name = residualOf, band = page.forecast.bands[name];
  if (!band) return { data: [] };
  const points = distances(name);
  const limit = (key, step, open) => { const mean = between(band, step); return mean ? between(band, step, key) / mean - 1 : open; };
  const out = points.map(([step, value]) => value < limit("lo90", step, -Infinity) || value > limit("hi90", step, Infinity));
  const measured = { type: "scatter", mode: "lines+markers", x: points.map(([step]) => across(step)), y: points.map(([, value]) => value), name: "measured", line: { width: 2, color: color("ink") }, marker: { size: out.map((one) => (one ? 10 : 6)), symbol: out.map((one) => (one ? "x" : "circle")), color: out.map((one) => color(one ? "bad" : "ink")) }, hovertemplate: "measured %{y:+.2%}<extra></extra>" };
  const data = [...bandTraces(name, 1, true), ...updatedTrace(name, 1, true), ...(points.length ? [measured] : [])];
  const shown = data.flatMap((trace) => trace.y).filter(Number.isFinite), low = Math.min(0, ...shown), high = Math.max(0, ...shown), pad = 0.08 * (high - low || 0.01);
  const latest = points.at(-1), text = latest ? `at ${part(latest[0])} of the run ${percent(latest[1])}, ${out.at(-1) ? "outside" : "inside"} the 90% band` : "not measured yet";
  place.setAttribute("aria-label", `Distance from the forecast, ${judgedName(name)}: ${text}`);
  return { data, layout: { yaxis: { tickformat: high - low > 0.1 ? "+.0%" : "+.1%", range: [low - pad, high + pad], zeroline: false }, xaxis: { range: page.summary.steps ? [0, 1.015 * across(page.summary.steps)] : undefined } } };
}

// ---- the ladder -------------------------------------------------------------------------------

function rungs() {
  clearTimeout(ladderTimer);
  const { ladder } = page, all = ladder?.rungs ?? [];
  $("ladder").hidden = !all.length && !ladder?.failed;
  $("ladder").classList.toggle("broken", Boolean(ladder?.failed));
  if (ladder?.failed) { $("ladder-title").textContent = ladder.failed; return fill($("rungs")); }
  if (!all.length) return;
  const climbing = ladder.finished < all.length, first = climbing && page.summary.step === null;
  if ($("ladder").dataset.first !== String(first)) { $("ladder").dataset.first = String(first); $("ladder").open = first; }
  if (first && page.summary.state === "planned") notice(`The ladder comes first: ${ladder.finished} of ${all.length} rungs are finished. What ${page.name} itself records appears here with its first updates.`);
  $("ladder-title").textContent = `Ladder of ${page.name}: ${climbing ? `${ladder.finished} of ${all.length} rungs finished` : `all ${all.length} rungs finished`}`;
  fill($("rungs"), ...all.map((rung) => {
    const done = Math.round(100 * (rung.progress ?? 0)), bar = element("div", { className: "progress small", role: "progressbar", ariaValueNow: String(done), ariaValueMin: "0", ariaValueMax: "100", ariaLabel: `Progress of ${rung.name}` }, element("div"));
    bar.firstChild.style.width = `${done}%`;
    const name = rung.state === "planned" && rung.step === null ? element("span", { textContent: rung.rung ?? rung.name }) : element("a", { href: `?run=${encodeURIComponent(rung.name)}`, textContent: rung.rung ?? rung.name });
    const left = rung.state === "running" && rung.eta_s ? `, about ${duration(rung.eta_s)} left` : "";
    return element("tr", {}, element("th", { scope: "row" }, name), element("td", { className: "soft wide-only", textContent: PURPOSES[rung.purpose] ?? plain(rung.purpose) }), element("td", { className: "number wide-only", textContent: rung.width === null ? "–" : grouped(rung.width) }),
      element("td", { className: "way-cell" }, element("div", {}, bar, element("span", { className: "soft", textContent: `${STATES[rung.state] ?? rung.state}${rung.step !== null ? `, ${grouped(rung.step)}${rung.steps ? ` of ${grouped(rung.steps)} updates` : ""}` : rung.steps ? `, ${grouped(rung.steps)} updates` : ""}${left}` }))),
      element("td", { className: "number", textContent: figure(rung.macro_bpb, "bits/byte") }));
  }));
  if (climbing && new URLSearchParams(location.search).get("live") !== "off") ladderTimer = setTimeout(renewLadder, LADDER_MS);
}

async function renewLadder() {
  const name = page.name, found = await ask(runPath("/ladder")).catch(() => null);
  if (name !== page.name) return;
  if (found) page.ladder = found;
  rungs();
}

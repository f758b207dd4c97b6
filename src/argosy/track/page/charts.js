"use strict";
// The charts of the page: which are drawn and when, how each kind of series looks, events and ranges, a closer look, paper.

const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon"];
const DISTANCE = { key: "residual", title: "Distance from the forecast", unit: "", style: "residual", scale: "linear", place: "top" };
const FLUSH_MS = 2500;

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

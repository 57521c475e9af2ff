"use strict";
// Plots over steps: lines, points, bands and stacked areas, with a cross-hair that tells the numbers.

function ticks(low, high, count) {
  const span = high - low || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

// Of seconds: whole minutes and hours, where there are so many.
function timeTicks(whole, count, low = 0) {
  const step = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800].find((candidate) => candidate >= whole / count);
  if (whole < 60 || step === undefined) return ticks(low, low + whole, count);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor((low + whole) / step) - first + 1 }, (_, index) => (first + index) * step);
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined || !isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

// Scales from numbers to pixels; with `log` in powers of ten, where all values are above 0.
function scales(plot, width, height) {
  const margin = { left: 3.3 * rem(), right: 0.6 * rem(), top: 0.5 * rem(), bottom: 1.5 * rem() };
  let xs = plot.range || extent(plot.series.flatMap((each) => each.at || each.x)) || [0, 1];
  if (plot.steps) xs = [xs[0] - 0.5, xs[1] + 0.5]; // a column for each step
  const inside = (each) => ["y", "low", "high"].flatMap((name) => (each[name] || []).filter((_, index) => !plot.range || (each.at[index] >= xs[0] && each.at[index] <= xs[1])));
  let ys = extent(plot.series.flatMap(inside)) || extent(plot.series.flatMap((each) => each.y)) || [0, 1];
  const log = plot.log && ys[0] > 0 && ys[1] / ys[0] > 20;
  if (plot.zero) ys = [0, ys[1] || 1];
  else if (!log) {
    const pad = (ys[1] - ys[0]) * 0.06 || Math.abs(ys[1]) * 0.1 || 1;
    ys = [ys[0] >= 0 && ys[0] < 2 * pad ? Math.min(0, ys[0]) : ys[0] - pad, ys[1] + pad];
  }
  const x = (value) => margin.left + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (width - margin.left - margin.right);
  const from = (pixels) => xs[0] + ((pixels - margin.left) / (width - margin.left - margin.right)) * (xs[1] - xs[0]);
  const portion = (value) => (log ? Math.log(value / ys[0]) / Math.log(ys[1] / ys[0]) : (value - ys[0]) / (ys[1] - ys[0]));
  const y = (value) => height - margin.bottom - portion(value) * (height - margin.top - margin.bottom);
  let marks = ticks(ys[0], ys[1], 4);
  if (log) {
    marks = [];
    const every = Math.max(1, Math.ceil(Math.log10(ys[1] / ys[0]) / 4));
    for (let at = Math.ceil(Math.log10(ys[0]) - 1e-9); at <= Math.log10(ys[1]) + 1e-9; at += every) marks.push(10 ** at);
  }
  return { x, y, from, xs, ys, marks, margin };
}

function axes(scale, width, height, format, axis = "steps") {
  const { x, y, xs, marks, margin } = scale;
  const count = Math.max(2, Math.floor(width / (6 * rem())));
  const across = axis === "seconds" ? timeTicks(xs[1] - xs[0], count, xs[0]) : ticks(xs[0], xs[1], count).filter((at) => axis !== "steps" || Number.isInteger(at));
  return [
    marks.map((at) => svg("line", { class: "gridline", x1: margin.left, x2: width - margin.right, y1: y(at), y2: y(at) })),
    marks.map((at) => svg("text", { x: margin.left - 6, y: y(at) + 4, "text-anchor": "end" }, format(at))),
    across.map((at) => svg("text", { x: x(at), y: height - 5, "text-anchor": "middle" }, AXES[axis][2](at))),
  ];
}

function path(x, y, xs, ys) {
  let text = "";
  let pen = false;
  xs.forEach((at, index) => {
    const value = ys[index];
    if (value === null || value === undefined) return; // gaps are bridged: evaluations are rare
    text += `${pen ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = true;
  });
  return text;
}

// The first series comes last and so lies on top; single runs lie below the mean of their group.
const inOrder = (series) => [...series.filter((each) => each.thin), ...series.filter((each) => !each.thin).reverse()];
const present = (values) => values.filter((value) => !missing(value)).length;

function band(each, below, above, scale, opacity) {
  if (!below) return null;
  const back = each.at.map((at, index) => [at, below[index]]).reverse();
  const outline = path(scale.x, scale.y, [...each.at, ...back.map((pair) => pair[0])], [...above, ...back.map((pair) => pair[1])]);
  return svg("path", { class: "mark area", d: outline + "Z", fill: each.colour, "fill-opacity": opacity });
}

function drawSeries(each, scale) {
  const { x, y } = scale;
  const parts = [band(each, each.least, each.most, scale, 0.07), band(each, each.low, each.high, scale, 0.18),
    svg("path", { class: `mark line${each.thin ? " thin" : ""}`, d: path(x, y, each.at, each.y), stroke: each.colour })];
  if (present(each.y) > 40) return parts;
  return [...parts, each.at.map((at, index) => !missing(each.y[index]) && svg("circle", { class: "mark", cx: x(at), cy: y(each.y[index]), r: each.thin ? 1.5 : 2.6, fill: each.colour }))];
}

function drawEvents(events, scale, height) {
  const { x, xs, margin } = scale;
  return events.filter((event) => event.at >= xs[0] && event.at <= xs[1]).map((event) =>
    svg("line", {
      class: "event", stroke: eventColour(event.event), x1: x(event.at), x2: x(event.at), y1: margin.top, y2: height - margin.bottom,
    }));
}

let clips = 0;

// Cuts what lies outside of the axes, as the points outside of the zoomed part do.
function clipped(scale, width, height, ...children) {
  const id = `clip${clips++}`;
  const { margin } = scale;
  const frame = svg("rect", { x: margin.left - 3, y: margin.top - 3, width: width - margin.left - margin.right + 6, height: height - margin.top - margin.bottom + 6 });
  return svg("g", {}, svg("clipPath", { id }, frame), svg("g", { "clip-path": `url(#${id})` }, children));
}

// One plot: {title, series: [{name, about, runs, x, y, colour, thin, low, high, least, most}], events, log, exact, format}.
function linePlot(plot) {
  const format = plot.format || number;
  const host = el("div", { class: "plot", "data-plot": plot.title });
  const named = plot.series.filter((each) => !each.thin);
  const last = named.length === 1 ? [...named[0].y].reverse().find((value) => !missing(value)) : null;
  const draw = drawn(host, (width) => {
    const height = Math.max(130, Math.min(230, width * 0.48));
    const seen = viewed(plot);
    const scale = scales(seen, width, height);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": plot.title },
      axes(scale, width, height, format, VIEW.axis), clipped(scale, width, height, drawEvents(seen.events, scale, height), inOrder(seen.series).map((each) => drawSeries(each, scale))));
    crosshair(picture, scale, height, (at) => plotLines(seen, at, format), seen.series.flatMap((each) => each.at));
    zooms(picture, scale, height);
    return picture;
  });
  queueMicrotask(draw);
  const shownKeys = named.length > 1 && legend(named.map((each) => [each.name, each.colour]));
  return el("figure", { class: "card" }, el("figcaption", { title: named.map((each) => each.about).join(", ") }, el("h3", {}, plot.title), el("b", {}, missing(last) ? "" : format(last))), host, shownKeys);
}

// What the series have where the pointer is: at the point that is nearest, if the series goes so far.
function plotLines(plot, at, format) {
  const lines = [el("b", {}, AXES[VIEW.axis][1](at))];
  for (const each of plot.series) {
    const index = at > each.at[each.at.length - 1] ? -1 : each.at.indexOf(nearest(each.at, (value) => Math.abs(value - at)));
    if (missing(each.y[index])) continue;
    const spread = each.least ? `, ${format(each.least[index])} to ${format(each.most[index])}` : "";
    lines.push(key(each.colour, `${each.name} ${format(each.y[index])}${spread}`));
  }
  for (const event of plot.events) {
    if (event.at === at) lines.push(key(eventColour(event.event), event.event));
  }
  return lines;
}

function crosshair(picture, scale, height, lines, xs) {
  const hair = svg("line", { class: "crosshair", y1: scale.margin.top, y2: height - scale.margin.bottom, visibility: "hidden" });
  picture.append(hair);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = nearest(xs, (value) => Math.abs(scale.x(value) - (event.clientX - box.left)));
    if (at === undefined || at < scale.xs[0] || at > scale.xs[1]) return;
    hair.setAttribute("x1", scale.x(at));
    hair.setAttribute("x2", scale.x(at));
    hair.setAttribute("visibility", "visible");
    showTip(event, ...lines(at));
  });
  picture.addEventListener("pointerleave", () => { hair.setAttribute("visibility", "hidden"); hideTip(); });
}

function nearest(values, distance) {
  let best;
  for (const value of values) if (best === undefined || distance(value) < distance(best)) best = value;
  return best;
}

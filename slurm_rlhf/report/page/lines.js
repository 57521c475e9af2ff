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
function timeTicks(whole, count) {
  const step = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800].find((candidate) => candidate >= whole / count);
  if (whole < 60 || step === undefined) return ticks(0, whole, count);
  return Array.from({ length: Math.floor(whole / step) + 1 }, (_, index) => index * step);
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
  let xs = extent(plot.series.flatMap((each) => each.x)) || [0, 1];
  if (plot.steps) xs = [xs[0] - 0.5, xs[1] + 0.5]; // a column for each step
  let ys = extent(plot.series.flatMap((each) => [...each.y, ...(each.low || []), ...(each.high || [])])) || [0, 1];
  const log = plot.log && ys[0] > 0 && ys[1] / ys[0] > 20;
  if (plot.zero) ys = [0, ys[1] || 1];
  else if (!log) {
    const pad = (ys[1] - ys[0]) * 0.06 || Math.abs(ys[1]) * 0.1 || 1;
    ys = [ys[0] >= 0 && ys[0] < 2 * pad ? Math.min(0, ys[0]) : ys[0] - pad, ys[1] + pad];
  }
  const x = (value) => margin.left + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (width - margin.left - margin.right);
  const portion = (value) => (log ? Math.log(value / ys[0]) / Math.log(ys[1] / ys[0]) : (value - ys[0]) / (ys[1] - ys[0]));
  const y = (value) => height - margin.bottom - portion(value) * (height - margin.top - margin.bottom);
  let marks = ticks(ys[0], ys[1], 4);
  if (log) {
    marks = [];
    const every = Math.max(1, Math.ceil(Math.log10(ys[1] / ys[0]) / 4));
    for (let at = Math.ceil(Math.log10(ys[0]) - 1e-9); at <= Math.log10(ys[1]) + 1e-9; at += every) marks.push(10 ** at);
  }
  return { x, y, xs, ys, marks, margin };
}

function axes(scale, width, height, format) {
  const { x, y, xs, marks, margin } = scale;
  const across = ticks(xs[0], xs[1], Math.max(2, Math.floor(width / (6 * rem())))).filter(Number.isInteger);
  return [
    marks.map((at) => svg("line", { class: "gridline", x1: margin.left, x2: width - margin.right, y1: y(at), y2: y(at) })),
    marks.map((at) => svg("text", { x: margin.left - 6, y: y(at) + 4, "text-anchor": "end" }, format(at))),
    across.map((at) => svg("text", { x: x(at), y: height - 5, "text-anchor": "middle" }, String(at))),
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
const present = (values) => values.filter((value) => value !== null && value !== undefined).length;

function drawSeries(each, scale) {
  const { x, y } = scale;
  const parts = [];
  if (each.low) {
    const back = each.x.map((at, index) => [at, each.low[index]]).reverse();
    const outline = path(x, y, [...each.x, ...back.map((pair) => pair[0])], [...each.high, ...back.map((pair) => pair[1])]);
    parts.push(svg("path", { class: "mark area", d: outline + "Z", fill: each.colour, "fill-opacity": 0.18 }));
  }
  parts.push(svg("path", { class: `mark line${each.thin ? " thin" : ""}`, d: path(x, y, each.x, each.y), stroke: each.colour }));
  if (present(each.y) <= 40) {
    each.x.forEach((at, index) => {
      if (each.y[index] === null || each.y[index] === undefined) return;
      parts.push(svg("circle", { class: "mark", cx: x(at), cy: y(each.y[index]), r: each.thin ? 1.5 : 2.6, fill: each.colour }));
    });
  }
  return parts;
}

function drawEvents(events, scale, height) {
  const { x, xs, margin } = scale;
  return events.filter((event) => event.step >= xs[0] && event.step <= xs[1]).map((event) =>
    svg("line", {
      class: "event", stroke: eventColour(event.event), x1: x(event.step), x2: x(event.step), y1: margin.top, y2: height - margin.bottom,
    }));
}

// One plot: {title, series: [{name, x, y, colour, thin, low, high}], events, log, zero, format}.
function linePlot(plot) {
  const format = plot.format || number;
  const host = el("div", { class: "plot", "data-plot": plot.title });
  const named = plot.series.filter((each) => !each.thin);
  const last = named.length === 1 ? [...named[0].y].reverse().find((value) => value !== null && value !== undefined) : null;
  const draw = drawn(host, (width) => {
    const height = Math.max(130, Math.min(230, width * 0.48));
    const scale = scales(plot, width, height);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": plot.title },
      axes(scale, width, height, format), drawEvents(plot.events || [], scale, height), inOrder(plot.series).map((each) => drawSeries(each, scale)));
    crosshair(picture, scale, height, (at) => plotLines(plot, at, format), plot.series[0].x);
    return picture;
  });
  queueMicrotask(draw);
  const shownKeys = named.length > 1 && legend(named.map((each) => [each.name, each.colour]));
  return el("figure", { class: "card" }, el("figcaption", {}, el("h3", {}, plot.title), el("b", {}, last === null || last === undefined ? "" : format(last))), host, shownKeys);
}

function plotLines(plot, at, format) {
  const lines = [el("b", {}, `step ${at}`)];
  for (const each of plot.series) {
    const value = each.y[each.x.indexOf(at)];
    if (value !== null && value !== undefined) lines.push(key(each.colour, `${each.name} ${format(value)}`));
  }
  for (const event of plot.events || []) {
    if (event.step === at) lines.push(key(eventColour(event.event), event.event));
  }
  return lines;
}

function crosshair(picture, scale, height, lines, xs) {
  const hair = svg("line", { class: "crosshair", y1: scale.margin.top, y2: height - scale.margin.bottom, visibility: "hidden" });
  picture.append(hair);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = nearest(xs, (value) => Math.abs(scale.x(value) - (event.clientX - box.left)));
    if (at === undefined) return;
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
